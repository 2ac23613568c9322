"""What goes wrong and when: drawn from the seed before the run; and the log of what really went wrong."""

import time
from random import Random

import msgspec

from postroad.testing.chaos.sizes import CLIENT, LEASE_SECONDS, PROCESSES
from postroad.testing.simulation.outages import KINDS
from postroad.testing.simulation.workload import HOSTS

EVERY_SECONDS = 1.8
FIRST_SECONDS = 1.5
OUTAGE_EVERY_SECONDS = 1.5
# Of each ten faults; what is not there is a kill of one process.
_SHARES = (("stop", 0.2), ("database", 0.08), ("group", 0.07))


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One fault to come. Times in seconds; `at` counts from the run's beginning, `length` until it is repaired."""

    at: float
    kind: str
    victim: str = ""
    length: float
    how: str = ""


class Fault(msgspec.Struct, kw_only=True):
    """One fault that happened, in microseconds since 1970; `lives`: the processes that it hit."""

    kind: str
    lives: list[str]
    begun: int
    ended: int | None = None
    how: str = ""


def plan(seed: int, database: str, seconds: float) -> list[Plan]:
    """The faults of a run, in order: the same for the same seed, and each kind at least once."""
    rng = Random(f"{seed}/{database}/faults")
    count = max(5, round(seconds / EVERY_SECONDS))
    kinds = [kind for kind, share in _SHARES for _ in range(max(1, round(share * count)))]
    kinds += ["kill"] * (count - len(kinds))
    rng.shuffle(kinds)
    times = sorted(rng.uniform(FIRST_SECONDS, max(seconds, FIRST_SECONDS + 1)) for _ in kinds)
    return [_draw(rng, at, kind) for at, kind in zip(times, kinds, strict=True)]


def outages(seed: int, database: str, seconds: float) -> list[Plan]:
    """What goes down outside, and when: hosts and kinds in turn. `victim`: which; `how`: what its senders can tell."""
    rng = Random(f"{seed}/{database}/outages")
    found: list[Plan] = []
    at = FIRST_SECONDS
    while at < seconds or not found:
        victim = rng.choice((*HOSTS, *KINDS))
        how = " ".join(word for word in ("whole", "later") if rng.random() < 0.4)
        found.append(Plan(at=at, kind="outage", victim=victim, length=rng.uniform(1, 4), how=how))
        at += rng.uniform(0.5, 1.5) * OUTAGE_EVERY_SECONDS
    return found


def _draw(rng: Random, at: float, kind: str) -> Plan:
    match kind:
        case "stop":
            length = rng.uniform(1.2, 1.8) * LEASE_SECONDS
            return Plan(at=at, kind=kind, victim=rng.choice(PROCESSES), length=length)
        case "database":
            return Plan(at=at, kind=kind, length=rng.uniform(0, 1.5), how=rng.choice(("immediate", "killed")))
        case "group":
            return Plan(at=at, kind=kind, length=rng.uniform(0.1, 0.6))
    return Plan(at=at, kind=kind, victim=rng.choice((*PROCESSES, CLIENT)), length=rng.uniform(0.1, 0.6))


def now() -> int:
    """This host's time, in microseconds since 1970: the processes and the databases have the same."""
    return time.time_ns() // 1000
