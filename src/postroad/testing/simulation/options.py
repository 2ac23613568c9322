"""What a seed decides before its run: how large everything is, and which faults there are (a swarm)."""

from random import Random

import msgspec

OPERATIONS = 30


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """One seed's run. Times in seconds; a rate is a probability at each place it concerns.

    Each fault is on in about half of the seeds (Groce and others, "Swarm Testing", ISSTA 2012): faults that
    are always on hide what only happens without them.
    """

    seed: int
    operations: int
    processes: int
    streams: int
    concurrency: int
    poll: float
    lease: float
    turn_timeout: float
    send_timeout: float = 4
    grace: float
    pace: float
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
    send_trouble: float
    turn_trouble: float
    repeats: float


def draw(seed: int, *, operations: int = OPERATIONS) -> Options:
    """The options of a seed."""
    rng = Random(f"{seed}/options")

    def sometimes(value: float, otherwise: float = 0) -> float:
        return value if rng.random() < 0.5 else otherwise

    return Options(
        seed=seed,
        operations=operations,
        processes=rng.choice((1, 2, 2, 3, 3)),
        streams=rng.choice((1, 2, 4, 8)),
        concurrency=rng.choice((1, 2, 4)),
        poll=rng.choice((1, 3, 6)),
        lease=rng.choice((6, 6, 24, 48)),
        turn_timeout=rng.choice((15, 60)),
        grace=rng.choice((0.5, 5, 25)),
        pace=rng.choice((0.02, 0.3, 1)),
        think=sometimes(rng.choice((0.5, 4, 12))),
        send_attempts=rng.choice((1, 2, 3, 5)),
        turn_attempts=rng.choice((1, 2, 3)),
        hints=rng.random() < 0.5,
        crash_statement=sometimes(rng.choice((1 / 200, 1 / 500))),
        crash_failpoint=sometimes(rng.choice((0.05, 0.3))),
        crash_send=sometimes(rng.choice((0.05, 0.2))),
        lost_commit=sometimes(rng.choice((0.01, 0.05))),
        kills=1 + rng.randrange(3),
        shutdowns=int(sometimes(1 + rng.randrange(2))),
        pauses=int(sometimes(1 + rng.randrange(4))),
        jumps=int(sometimes(1 + rng.randrange(3))),
        latency=sometimes(rng.choice((0.01, 0.2, 1.5))),
        send_trouble=sometimes(rng.choice((0.2, 0.6)), 0.05),
        turn_trouble=sometimes(rng.choice((0.1, 0.3)), 0.03),
        repeats=sometimes(0.2, 0.05),
    )
