"""What is down for a while in the world outside, a host or a whole kind: whoever wants to send there is told so."""

import re
from random import Random
from typing import Any

import msgspec

from postroad.model.clock import SECOND, Clock
from postroad.model.dispatches import Dispatch
from postroad.model.errors import Unreachable
from postroad.testing.simulation.options import Options
from postroad.testing.simulation.workload import BY_NAME, HOSTS, MAIL, PAGE, SMS

# How long, in seconds, at the most: shorter and longer than a dispatch is held, and longer than all else takes.
LONGEST = (4, 15, 15, 60, 60, 400)
KINDS = (SMS.name, MAIL.name, PAGE.name)
AFTER_SECONDS = 5  # what some ask to wait for
_SAID = re.compile(r"planned: (\S+) is down")
_LATER = ", come back later"


class Outage(msgspec.Struct, frozen=True, kw_only=True):
    """One place, a host or a kind, that is down until the steady clock shows `until`; `wall`: when that will be.

    `whole`: of a kind, whether its senders know that all of it is down, or only see that one host cannot be reached.
    """

    place: str
    until: int
    wall: int
    whole: bool
    later: bool

    def refusal(self, dispatch: Dispatch[Any]) -> Unreachable | None:
        """What the sender of this raises because it cannot connect; None: it goes elsewhere."""
        if self.place != dispatch.kind and f"//{self.place}/" not in dispatch.to:
            return None
        whole = self.whole and self.place == dispatch.kind
        host = dispatch.to.split("/")[2] if "//" in dispatch.to else dispatch.kind
        said = f"planned: {dispatch.kind if whole else host} is down"
        if self.later:
            return Unreachable(said + _LATER, after=AFTER_SECONDS, whole_kind=whole)
        return Unreachable(said, whole_kind=whole)


class Outages:
    """Draws what goes down and when, and tells senders. `log` is all of it, `turned_away` whom it has met, by id."""

    def __init__(self, options: Options, clock: Clock) -> None:
        self._rng = Random(f"{options.seed}/outages")
        self._often = options.gates
        self._clock = clock
        self.log: list[Outage] = []
        self.turned_away: list[str] = []

    def meanwhile(self) -> None:
        """Clients have made a block: something may go down now."""
        if self._rng.random() < self._often:
            self.begin(self._rng.choice((*HOSTS, *HOSTS, *KINDS)), self._rng.random() * self._rng.choice(LONGEST))

    def begin(self, place: str, seconds: float) -> None:
        """A place goes down for so long."""
        length = round(seconds * SECOND)
        whole, later = self._rng.random() < 0.5, self._rng.random() < 0.3
        until, wall = self._clock.monotonic() + length, self._clock.wall() + length
        self.log.append(Outage(place=place, until=until, wall=wall, whole=whole, later=later))

    def refusal(self, dispatch: Dispatch[Any]) -> Unreachable | None:
        """What the sender of this raises now because it cannot connect; None: it can."""
        now = self._clock.monotonic()
        for outage in self.log:
            if outage.until > now and (refusal := outage.refusal(dispatch)) is not None:
                self.turned_away.append(dispatch.id)
                return refusal
        return None


def named(summary: str) -> str | None:
    """The host that was said to be down, '' for a whole kind; None: this is no word of that."""
    found = _SAID.search(summary)
    return None if found is None else "" if found[1] in BY_NAME else found[1]


def asked_to_wait(summary: str) -> bool:
    """Whether what was down asked to wait for AFTER_SECONDS."""
    return _LATER in summary
