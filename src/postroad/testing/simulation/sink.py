"""Where messages arrive: the world outside, which remembers everything and survives every crash."""

from collections import Counter
from typing import NamedTuple

import msgspec

from postroad.model.clock import FakeClock
from postroad.model.dispatches import Alert
from postroad.testing.simulation.toolbox import Handled, Happened, Who

ENDED = "ended"


class Begun(NamedTuple):
    """That an attempt has begun, and when the first one of its epoch had; what its process knows of the epoch."""

    attempt: int
    first: int


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """One message as the destination got it. `attempt` is what its envelope said; times in microseconds.

    `first`: when the first attempt of its epoch began.
    """

    at: int
    process: str
    id: str
    key: str
    kind: str
    to: str
    attempt: int
    first: int = 0
    body: str
    possible_duplicate: bool = False


class Sink:
    """Everything that arrived, in order, every alert that rang, every call of a handler (stream, turn, attempt).

    `handled` is every call of a handler with its events, `happened` all that tools have done.

    `sends` is how sends began (life, id, Begun) and were settled (life, id, reason) as the processes said it, and
    where a process's life ended (life, "", ENDED).
    """

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self.arrivals: list[Arrival] = []
        self.rung: list[Alert] = []
        self.sends: list[tuple[str, str, Begun | str]] = []
        self.tried: list[tuple[str, str, int]] = []
        self.handled: list[Handled] = []
        self.happened: list[Happened] = []
        self._asked: Counter[tuple[str, str]] = Counter()

    def arrive(self, **about: object) -> Arrival:
        """Take a message in."""
        arrival = msgspec.convert({"at": self._clock.wall(), **about}, Arrival)
        self.arrivals.append(arrival)
        return arrival

    def asked(self, tool: str, name: str) -> int:
        """A tool is called with this name; how often it was by now."""
        self._asked[tool, name] += 1
        return self._asked[tool, name]

    def happen(self, who: Who, tool: str, name: str, key: str) -> int:
        """A tool does its work; how much tools have done by now."""
        self.happened.append(Happened(at=self._clock.wall(), who=who, tool=tool, name=name, key=key))
        return len(self.happened)

    def ring(self, alert: Alert) -> None:
        """Take an alert in."""
        self.rung.append(alert)
