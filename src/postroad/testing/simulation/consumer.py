"""The destination that acknowledges what it gets: at once, later, twice, too late, never, or with an old token."""

from random import Random

from postroad.model.acks import Keyring
from postroad.model.dispatches import Dispatch
from postroad.testing.simulation.deeds import Deed
from postroad.testing.simulation.process import Process
from postroad.testing.simulation.workload import SECRET, Message

# When copies of a dispatch are acknowledged, in seconds after their arrival; the sender lingers for 2 s.
HABITS: tuple[tuple[tuple[float, float], ...], ...] = (
    (), (), ((0, 0.01),), ((0, 1.9),), ((0, 1.9),), ((2, 30),), ((0, 4), (0, 4)), ((40, 120),),
)  # fmt: skip
WITH_AN_OLD_ONE = 0.6
_KEYS = Keyring([SECRET])


class Consumer:
    """Draws how it acknowledges each copy that arrives."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._tokens: dict[str, list[str]] = {}

    def plans(self, dispatch: Dispatch[Message]) -> list[tuple[float, str]]:
        """After how many seconds it presents which tokens, now that this has arrived."""
        token = dispatch.ack_token
        if token is None:
            return []
        known = self._tokens.setdefault(dispatch.id, [])
        plans = [(round(self._rng.uniform(*span), 3), token) for span in self._rng.choice(HABITS)]
        older = [one for one in known if one != token]
        if older and self._rng.random() < WITH_AN_OLD_ONE:
            plans.append((0, self._rng.choice(older)))
        if token not in known:
            known.append(token)
        return plans


def deed_of(token: str, how: str = "") -> Deed:
    """The deed of presenting a token; the consumer cannot know its epoch, we do."""
    presented = _KEYS.read(token)
    epoch = 0
    while not presented.proves(epoch):
        epoch += 1
    return Deed(who="consumer", verb="ack", subject=presented.dispatch, epoch=epoch, how=how)


async def ack(process: Process, token: str) -> None:
    """Acknowledge by a transaction of its own."""
    async with process.post.begin() as tx:
        tx.ack(token)
