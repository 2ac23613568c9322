"""When and where processes die, and when the answer to a COMMIT is lost: all drawn from the seed."""

from random import Random

from postroad.model.failpoints import FAILPOINTS
from postroad.testing.simulation.options import Options

SITES_ON = 0.4
FIRES_MAX = 1
PASSED_SELDOM = frozenset({"shutdown.begun", "shutdown.abandoned"})  # where they are on, they go off the first time


class Fuse:
    """Burns down by one at each place it passes, and goes off at random, on average once in 1/rate places."""

    def __init__(self, rng: Random, rate: float) -> None:
        self._rng = rng
        self._rate = rate
        self._left = self._drawn()

    def passes(self) -> bool:
        """Pass a place; True: here it goes off."""
        if not self._rate:
            return False
        self._left -= 1
        if self._left > 0:
            return False
        self._left = self._drawn()
        return True

    def _drawn(self) -> int:
        return 1 + int(self._rng.expovariate(self._rate)) if self._rate else 0


class Faults:
    """All faults of one seed; none any more once it is `calm`: since then, in microseconds; 0: not yet."""

    def __init__(self, options: Options) -> None:
        rng = Random(f"{options.seed}/faults")
        self.calm = 0
        self._rng = rng
        self._latency = options.latency
        self._gathers = options.gathers
        self._statement = Fuse(rng, options.crash_statement)
        # A site is on in some seeds only and goes off once at the most, so that the sites that are passed all the time
        # don't hide the others (FoundationDB's BUGGIFY).
        self._sites = {name: FIRES_MAX for name in FAILPOINTS if options.crash_failpoint and rng.random() < SITES_ON}
        self._chance = options.crash_failpoint
        self._send = Fuse(rng, options.crash_send)
        self._commit = Fuse(rng, options.lost_commit)

    def at_statement(self) -> bool:
        """Whether to die before this statement, which is after the one before it."""
        return not self.calm and self._statement.passes()

    def at_failpoint(self, name: str) -> bool:
        """Whether to die at this failpoint."""
        if self.calm or not self._sites.get(name):
            return False
        if name not in PASSED_SELDOM and self._rng.random() >= self._chance:
            return False
        self._sites[name] -= 1
        return True

    def at_send(self) -> bool:
        """Whether to die before or after this message arrives."""
        return not self.calm and self._send.passes()

    def at_commit(self) -> bool:
        """Whether the connection breaks here, before or after COMMIT took effect."""
        return not self.calm and self._commit.passes()

    def latency(self) -> float:
        """How long the database takes, one way, in seconds."""
        return self._wait(self._latency)

    def gathers(self) -> float:
        """How long a writer is busy before it begins its next group, in seconds."""
        return self._wait(self._gathers)

    def _wait(self, mean: float) -> float:
        return 0 if self.calm or not mean else round(self._rng.expovariate(1 / mean), 6)
