"""What the clients ask for, drawn from the seed: short waits, so that all of it ends soon after the last fault."""

from collections import deque
from collections.abc import Iterator
from random import Random

import msgspec

from postroad.testing.chaos.sizes import STREAMS
from postroad.testing.simulation.workload import AUDIT, BY_NAME, LOAD, ROOM, Message, Order, Step

AFTER_SECONDS_MAX = 4.0
REMEMBERED = 12
BURST = 40
_VERBS = ("publish",) * 6 + ("send",) * 3 + ("timer", "withdraw")
_STEPS = (*["send"] * 8, "timer", "rearm", "cancel", "publish", "write", "withdraw")
# What each attempt to send comes to, in turn. None of it fails to the last of the attempts that there are.
_TROUBLES = (
    ["lost", "ok"], ["unknown", "ok"], ["later", "ok"], ["giveup"], ["slow", "ok"], ["late", "ok"],
    ["stuck", "ok"], ["error", "error", "ok"], ["late", "lost", "ok"],
)  # fmt: skip
_TURN_TROUBLES = (["raise", "ok"], ["later", "ok"], ["exit", "raise", "ok"], ["giveup"])


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """One call that a client wants made, as the ledger keeps it; `data` is JSON."""

    verb: str
    stream: str
    key: str
    data: str = ""
    joined: bool = False


class Wishes:
    """An endless row of wishes. `name` begins all of its keys: no other row may have it."""

    def __init__(self, seed: int, name: str) -> None:
        self._rng = Random(f"{seed}/{name}")
        self._name = name
        self._made = 0
        self._keys: deque[str] = deque(maxlen=REMEMBERED)
        self._timers: deque[tuple[str, str]] = deque(maxlen=REMEMBERED)

    def next(self) -> Wish:
        """The next one."""
        self._made += 1
        rng, key = self._rng, f"{self._name}.{self._made}"
        verb = rng.choice(_VERBS)
        stream = self._stream()
        joined = verb in ("publish", "send") and rng.random() < 0.15
        match verb:
            case "publish":
                return Wish(verb=verb, stream=stream, key=key, data=self._order(stream, key), joined=joined)
            case "withdraw" if self._keys:
                return Wish(verb=verb, stream=stream, key=rng.choice(self._keys))
            case "timer":
                self._timers.append((stream, key))
                return Wish(verb=verb, stream=stream, key=key, data=_text(self._after()))
        self._keys.append(key)
        said = [rng.choice(tuple(BY_NAME)), self._message(), self._after()]
        return Wish(verb="send", stream=stream, key=key, data=_text(said), joined=joined)

    def again(self, wish: Wish) -> Wish | None:
        """The wish once more, rarely with other content; None: once was enough."""
        if wish.verb == "withdraw" or self._rng.random() > 0.15:
            return None
        if wish.verb == "publish" and self._rng.random() < 0.2:
            return msgspec.structs.replace(wish, data=_text(Order(think=0.001)))
        return wish

    def pause(self, mean: float) -> float:
        """How long to wait before the next one, in seconds."""
        return self._rng.expovariate(1 / mean)

    def _stream(self) -> str:
        return f"{self._rng.choice((LOAD, LOAD, LOAD, ROOM, AUDIT))}/{self._rng.randrange(STREAMS)}"

    def _order(self, stream: str, name: str) -> str:
        if stream.startswith(AUDIT):
            return _text(Order())
        count = BURST if self._rng.random() < 0.1 else self._rng.randrange(12)
        plan = self._rng.choice(_TURN_TROUBLES) if self._rng.random() < 0.06 else []
        think = round(self._rng.random() * 0.3, 3)
        return _text(Order(steps=list(self._steps(stream, name, count)), think=think, plan=plan))

    def _steps(self, stream: str, name: str, count: int) -> Iterator[Step]:
        for number in range(count):
            yield self._step(stream, f"{name}.{number}")

    def _step(self, stream: str, name: str) -> Step:
        rng, do = self._rng, self._rng.choice(_STEPS)
        match do:
            case "send":
                key = rng.choice(self._keys) if self._keys and rng.random() < 0.02 else name
                self._keys.append(key)
                expires = round(rng.random() * 10, 3) if rng.random() < 0.1 else None
                message = self._message()
                kind = rng.choice(tuple(BY_NAME))
                return Step(do, key, kind, self._after(), message.plan, expires, message.take)
            case "timer":
                self._timers.append((stream, name))
                return Step(do, name, after=self._after())
            case "publish":
                return Step(do, f"{rng.choice((LOAD, ROOM, AUDIT))}/other", kind=name)
            case "withdraw" if self._keys:
                return Step(do, rng.choice(self._keys))
            case "rearm" | "cancel":
                own = [key for owner, key in self._timers if owner == stream]
                return Step(do, rng.choice(own) if own else name, after=self._after())
        return Step(do, name)

    def _message(self) -> Message:
        plan = self._rng.choice(_TROUBLES) if self._rng.random() < 0.15 else ["ok"]
        return Message(plan, round(self._rng.random() * 0.6, 3) if self._rng.random() < 0.3 else 0)

    def _after(self) -> float:
        return round(self._rng.random() * AFTER_SECONDS_MAX, 3) if self._rng.random() < 0.3 else 0


def _text(value: object) -> str:
    return msgspec.json.encode(value).decode()
