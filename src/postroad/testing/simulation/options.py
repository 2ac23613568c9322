"""What a seed decides before its run: how large everything is, and which faults there are (a swarm)."""

from collections.abc import Iterable
from random import Random
from typing import Any

import msgspec

OPERATIONS = 200
# What can be switched off, one by one: how a failure gets smaller.
TROUBLES = (
    "kills", "shutdowns", "pauses", "jumps", "crash_statement", "crash_failpoint", "crash_send", "lost_commit",
    "latency", "gathers", "send_trouble", "turn_trouble", "repeats", "think", "lanes", "acks", "regrets", "operators",
    "gates", "rates", "tools", "stops", "deletions", "reports",
    "delegations", "crons", "owners",
)  # fmt: skip


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """One seed's run. Times in seconds; a rate is a probability at each place it concerns.

    An operation is one publish, send or timer of a client; a client makes up to `burst` of them in one transaction,
    and is answered for each. `gathers` is how long, on average, a writer is busy before it begins its next group.
    `acks`: the share of dispatches that ask for an acknowledgement; `regrets` and `operators`: how often after a block
    a program withdraws something, and an operator does something. `gates`: how often after a block a host or a whole
    kind goes down for a while; `rates`: the attempts a second that one kind has, and another one to each host; 0: as
    many as there are. `tools`: the share of orders in conversations that call tools; 0: there are no conversations.
    `stops` and `deletions`: how often after a block a person stops, and deletes, a conversation. `reports`: how often
    after a block somebody begins to report something, until it has landed or he is tired of it.
    `delegations`: the share of orders that delegate something to crews. `crons`: how many there are. `owners`: the app
    says itself whose a stream is.

    Each fault is on in about half of the seeds (Groce and others, "Swarm Testing", ISSTA 2012): faults that
    are always on hide what only happens without them.
    """

    seed: int
    operations: int
    processes: int
    streams: int
    rooms: bool
    audits: bool
    concurrency: int
    poll: float
    lease: float
    turn_timeout: float
    send_timeout: float = 4
    grace: float
    pace: float
    burst: int
    think: float
    send_attempts: int
    turn_attempts: int
    hints: bool
    crash_statement: float
    crash_failpoint: float
    crash_send: float
    lost_commit: float
    kills: int
    shutdowns: int
    pauses: int
    jumps: int
    latency: float
    gathers: float
    send_trouble: float
    turn_trouble: float
    repeats: float
    lanes: float
    acks: float
    regrets: float
    operators: float
    gates: float
    rates: float
    tools: float
    stops: float
    deletions: float
    reports: float
    delegations: float
    crons: int
    owners: bool


def draw(seed: int, *, operations: int = OPERATIONS, without: Iterable[str] = ()) -> Options:
    """The options of a seed, without some of its troubles."""
    return msgspec.structs.replace(_drawn(seed, operations), **dict.fromkeys(without, 0))


def _drawn(seed: int, operations: int) -> Options:
    rng = Random(f"{seed}/options")
    return Options(seed=seed, operations=operations, **_shape(rng), **_troubles(rng))


def _shape(rng: Random) -> dict[str, Any]:
    """What there is, and how fast it goes. The order of the draws is part of what a seed means, here and below."""
    return {
        "processes": rng.choice((1, 2, 2, 3)),
        "streams": rng.choice((1, 2, 4, 8)),
        "rooms": rng.random() < 0.4,
        "audits": rng.random() < 0.4,
        "concurrency": rng.choice((1, 2, 4)),
        "poll": rng.choice((3, 6)),
        "lease": rng.choice((6, 12, 24, 48, 48)),
        "turn_timeout": rng.choice((15, 60)),
        "grace": rng.choice((0.1, 1, 25)),
        "pace": rng.choice((0.02, 0.2, 0.6)),
        "burst": rng.choice((6, 12, 24)),
        "think": rng.choice((0, 0.2, 1, 5)),
        "send_attempts": rng.choice((1, 2, 3, 5)),
        "turn_attempts": rng.choice((1, 2, 3, 3)),
        "hints": rng.random() < 0.5,
    }


def _troubles(rng: Random) -> dict[str, Any]:
    """What happens to it: each of these in about half of the seeds, in the others not at all or seldom."""

    def sometimes(value: float, otherwise: float = 0) -> float:
        return value if rng.random() < 0.5 else otherwise

    return {
        "crash_statement": sometimes(rng.choice((1 / 150, 1 / 500))),
        "crash_failpoint": sometimes(rng.choice((0.1, 0.5))),
        "crash_send": sometimes(rng.choice((0.05, 0.1))),
        "lost_commit": sometimes(rng.choice((0.01, 0.05))),
        "kills": 1 + rng.randrange(3),
        "shutdowns": int(sometimes(2 + rng.randrange(3))),
        "pauses": int(sometimes(1 + rng.randrange(4))),
        "jumps": int(sometimes(1 + rng.randrange(3))),
        "latency": sometimes(rng.choice((0.01, 0.2, 1.5))),
        "gathers": sometimes(rng.choice((0.02, 0.2, 1))),
        "send_trouble": sometimes(rng.choice((0.2, 0.6)), 0.05),
        "turn_trouble": sometimes(rng.choice((0.05, 0.15)), 0.02),
        "repeats": sometimes(0.2, 0.05),
        "lanes": sometimes(rng.choice((0.2, 0.8))),
        "acks": sometimes(rng.choice((0.3, 0.8))),
        "regrets": sometimes(rng.choice((0.3, 0.8))),
        "operators": sometimes(rng.choice((0.3, 0.8))),
        "gates": sometimes(rng.choice((0.06, 0.2))),
        "rates": sometimes(rng.choice((2, 20))),
        "tools": sometimes(rng.choice((0.4, 0.8))),
        "stops": sometimes(rng.choice((0.05, 0.2))),
        "deletions": sometimes(rng.choice((0.03, 0.1))),
        "reports": sometimes(rng.choice((0.08, 0.25))),
        "delegations": sometimes(rng.choice((0.02, 0.06))),
        "crons": int(sometimes(rng.choice((0, 0, 1, 2)))),
        "owners": rng.random() < 0.5,
    }
