"""Where messages arrive: the world outside, which remembers everything and survives every crash."""

from typing import NamedTuple

import msgspec

from postroad.model.clock import FakeClock
from postroad.model.dispatches import Alert

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

    `sends` is how sends began (life, id, Begun) and were settled (life, id, reason) as the processes said it, and
    where a process's life ended (life, "", ENDED).
    """

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self.arrivals: list[Arrival] = []
        self.rung: list[Alert] = []
        self.sends: list[tuple[str, str, Begun | str]] = []
        self.tried: list[tuple[str, str, int]] = []

    def arrive(self, **about: object) -> Arrival:
        """Take a message in."""
        arrival = msgspec.convert({"at": self._clock.wall(), **about}, Arrival)
        self.arrivals.append(arrival)
        return arrival

    def ring(self, alert: Alert) -> None:
        """Take an alert in."""
        self.rung.append(alert)
