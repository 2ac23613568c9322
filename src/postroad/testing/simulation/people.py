"""Who else acts upon dispatches: consumers that acknowledge, programs that withdraw, and operators.

Each of them acts through whatever process lives, and dies with it; what got no answer is not known to have happened.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from contextvars import Context
from functools import partial
from random import Random
from typing import Any, Protocol

from postroad.model.clock import FakeClock
from postroad.model.dispatches import Dispatch
from postroad.testing.simulation.clients import Clients
from postroad.testing.simulation.consumer import Consumer, ack, deed_of
from postroad.testing.simulation.deeds import Act, Deed, carry_out
from postroad.testing.simulation.gatekeeper import Gatekeeper
from postroad.testing.simulation.ledger import Answer, Ledger, ReportCall
from postroad.testing.simulation.minding import DELETE, Minder
from postroad.testing.simulation.operating import Operator
from postroad.testing.simulation.options import Options
from postroad.testing.simulation.outages import Outages
from postroad.testing.simulation.process import Process
from postroad.testing.simulation.reporters import Reporters
from postroad.testing.simulation.workload import LOAD, Message, Order, Step, minded

AGAIN = 0.6  # how often an ack that got no answer is presented again
BY_A_TURN = 0.15
RECENT = 10
REGRETTED_WITHIN = 5.0  # seconds
OPERATED_WITHIN = 15.0  # most of what an operator looks for takes a while to go wrong
OPENED = 0.1  # how often after a block somebody opens a gate
LOOK_SECONDS = 0.5


class Here(Protocol):
    """What they need of the world."""

    options: Options
    clock: FakeClock
    outages: Outages
    ledger: Ledger

    def alive(self) -> list[Process]:
        """The processes that live."""

    def inside(self, process: Process, work: Coroutine[Any, Any, None]) -> None:
        """Run something as part of a process."""

    def note(self, what: str) -> None:
        """Write a line of the run's log."""


class People:
    """All of them; `deeds` is what they have done, in the order in which it began."""

    def __init__(self, here: Here, clients: Clients) -> None:
        seed = here.options.seed
        self.deeds: list[Deed] = []
        self._here = here
        self._clients = clients
        self._rng = Random(f"{seed}/people")
        self._consumer = Consumer(Random(f"{seed}/consumer"))
        self._operator = Operator(Random(f"{seed}/operator"))
        self._gatekeeper = Gatekeeper(Random(f"{seed}/gatekeeper"))
        self._minder = Minder(Random(f"{seed}/minder"), clients.leave, minded(here.options))
        self._reporters = Reporters(
            Random(f"{seed}/reporters"), here.ledger, here.clock, here.note, latest=clients.latest, gone=self._gone
        )
        self._published = 0

    def got(self, dispatch: Dispatch[Message]) -> None:
        """A message has arrived: it may be acknowledged."""
        for after, token in self._consumer.plans(dispatch):
            if self._rng.random() < BY_A_TURN:
                self._later(after, partial(self._publish, token))
            else:
                self._later(after, partial(self._present, token))

    def meanwhile(self) -> None:
        """Clients have made a block: a program may withdraw something now, an operator may act.

        Or a destination goes down.
        """
        options = self._here.options
        if self._clients.keys and self._rng.random() < options.regrets:
            key = self._rng.choice(self._clients.keys[-RECENT:])
            after = self._rng.random() * REGRETTED_WITHIN
            self._later(after, partial(self._do, Deed(who="app", verb="withdraw", subject=key), _withdraw))
        if self._rng.random() < options.operators:
            after = self._rng.random() * OPERATED_WITHIN
            self._later(after, partial(self._do, self._operator.deed(), self._operator.act))
        self._here.outages.meanwhile()
        if options.gates and self._rng.random() < OPENED:
            after = self._rng.random() * OPERATED_WITHIN
            self._later(after, partial(self._do, self._gatekeeper.deed(), self._gatekeeper.act))

        for deed in self._minder.deeds(options):
            self._later(self._rng.random() * REGRETTED_WITHIN, partial(self._do, deed, self._minder.act))
        for after, call in self._reporters.plans(options):
            self._later(after, partial(self._reporters.make, call))

    def _gone(self) -> list[str]:
        """The streams that somebody was told to have deleted, by name."""
        told = (deed for deed in self.deeds if deed.verb in (DELETE, "delete") and deed.answer is Answer.OK)
        return sorted({deed.subject for deed in told if deed.subject})

    def telling(self, call: ReportCall) -> AbstractContextManager[None]:
        """A turn reports something within this."""
        return self._reporters.telling(call, "a turn")

    def begun(self, stream: str) -> None:
        """A turn of a stream has begun: somebody may stop or delete it."""
        for after, deed in self._minder.during(self._here.options, stream):
            self._later(after, partial(self._do, deed, self._minder.act))

    def relieve(self, streams: Sequence[str]) -> None:
        """Nothing goes on but what an operator lets go on: that is what one does now."""
        for stream in streams:
            self._later(0, partial(self._do, self._minder.resolution(stream), self._minder.act))

    def _later(self, after: float, begin: Callable[[Process], Coroutine[Any, Any, None]]) -> None:
        """Begin something after a while through one of those that live then; it is no part of whoever runs now."""
        asyncio.get_running_loop().call_later(after, self._begin, begin, context=Context())

    def _begin(self, begin: Callable[[Process], Coroutine[Any, Any, None]]) -> None:
        alive = self._here.alive()
        if alive:
            process = self._rng.choice(alive)
            self._here.inside(process, begin(process))
        else:
            self._later(LOOK_SECONDS, begin)

    async def _do(self, deed: Deed, act: Act, process: Process) -> None:
        self.deeds.append(deed)
        await carry_out(process, deed, act, self._here.note)

    async def _present(self, token: str, process: Process) -> None:
        deed = deed_of(token)
        await self._do(deed, lambda through, _: ack(through, token), process)
        if deed.answer is Answer.INFO and self._rng.random() < AGAIN:
            self._later(self._rng.random() * 3, partial(self._present, token))

    async def _publish(self, token: str, process: Process) -> None:
        """A turn acknowledges: what an event asks for."""
        self._published += 1
        self.deeds.append(deed_of(token, "turn"))
        order = Order(steps=[Step("ack", token)])
        await self._clients.make(process, self._clients.offer(f"{LOAD}/0", f"ack{self._published}", order))


async def _withdraw(process: Process, deed: Deed) -> None:
    async with process.post.begin() as tx:
        withdrawn = tx.withdraw(deed.subject)
    deed.done = int(withdrawn.done)
