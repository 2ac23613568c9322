"""An operator who opens a gate now and then, although what is behind it may still be down."""

from random import Random

from postroad.store import gates
from postroad.store.audit import Operator
from postroad.testing.simulation.deeds import Deed
from postroad.testing.simulation.operating import ACTOR
from postroad.testing.simulation.process import Process

VERB = "gate.open"
_BY = Operator(actor=ACTOR, reason="they are said to be back")


class Gatekeeper:
    """Draws which one, and opens it through a process."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def deed(self) -> Deed:
        """What to do; to which gate, a look will show."""
        return Deed(who=ACTOR, verb=VERB)

    async def act(self, process: Process, deed: Deed) -> None:
        """Look, choose one that is closed, and open it: the verb of `postroad gate open`."""
        closed = process.database.read(gates.list_)
        if closed:
            gate = self._rng.choice(closed)
            deed.subject = f"{gate.kind} {gate.host}".strip()
            deed.done = int(process.database.transact(gates.open_, gate.kind, gate.host, by=_BY))
