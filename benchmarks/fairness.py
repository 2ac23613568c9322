"""Fairness: how long a hundred cold conversations wait for their turns beside one with a thousand messages.

Held against the same without that one. A message waits from the answer to its COMMIT until its handler is called.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import closing

from benchmarks import latency, work
from benchmarks.figures import Figure, Plan, Progress
from benchmarks.ours import DECIDED, EVENT
from benchmarks.places import Kind, Place
from postroad import Postroad, Turn

NAME = "fairness"
COLD = 100
MESSAGES = 1_000
AT_ONCE = 500
HOT = f"{work.TYPE}/hot"
DECIDING_SECONDS = 0.02  # a turn's, whatever its events: as a model, it takes time and no CPU
ROUNDS_MAX = 2
PAUSE_SECONDS = 0.003  # a hundred of them are about as long as the hot conversation has work


def measure(kind: Kind, ours: Place, limit: Place, plan: Plan, progress: Progress) -> Iterator[Figure]:
    """p50 and p95 in milliseconds, by turns with and without the hot conversation, all rounds together."""
    for case, pause in (("at one stroke", 0.0), ("one by one", PAUSE_SECONDS)):
        found: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(min(plan.rounds, ROUNDS_MAX)):
            for hot in found:
                ours.clear()
                found[hot] += _lengths(ours, pause, hot=hot)
        with_it, without = (latency.percentiles(of_one) for of_one in found.values())
        for name, mine, other in zip(("p50", "p95"), with_it, without, strict=False):
            yield Figure(
                work=NAME, database=kind, case=f"{COLD} cold {case} beside a hot one, {name}", unit="ms",
                ours=mine, against=other,
            )  # fmt: skip


def _lengths(place: Place, pause: float, *, hot: bool) -> list[float]:
    post = Postroad(place.url, schema=place.schema)
    begun: latency.Arrivals = {}

    @post.turn(work.TYPE)
    async def decide(turn: Turn) -> None:
        begun.setdefault(turn.stream, time.monotonic_ns())
        await asyncio.sleep(DECIDING_SECONDS)
        turn.record(DECIDED, work.decision(turn.events[0].key))

    with closing(post), post.running():
        left = _publish(post, "warm", latency.WARM, pause)
        latency.await_all(begun, left)
        if hot:
            _heat(post)
        left |= _publish(post, "cold", COLD, pause)
        # The hot one's own turn has begun too.
        latency.await_all(begun, [*left, HOT] if hot else left)
    return latency.lengths(left, begun)


def _heat(post: Postroad) -> None:
    for first in range(0, MESSAGES, AT_ONCE):
        with post.begin() as tx:
            for number in range(first, first + AT_ONCE):
                tx.publish(HOT, EVENT, work.event(number), key=f"e{number}")


def _publish(post: Postroad, name: str, streams: int, pause: float) -> latency.Arrivals:
    """A message for each of these conversations, all in one transaction, or one after the other: when it was in."""
    names = [f"{work.TYPE}/{name}{number}" for number in range(streams)]
    left: latency.Arrivals = {}
    for part in [names] if not pause else [[each] for each in names]:
        with post.begin() as tx:
            for stream in part:
                tx.publish(stream, EVENT, work.event(0), key="e0")
        left |= dict.fromkeys(part, time.monotonic_ns())
        time.sleep(pause)
    return left
