"""Hosts: commit → send to a healthy host, and of another kind, while one host is down with ten thousand due dispatches.

Held against the same where nothing is down.
"""

import time
from collections.abc import Iterator
from contextlib import closing

from benchmarks import latency, work
from benchmarks.figures import Figure, Plan, Progress
from benchmarks.places import Kind, Place
from postroad import Dispatch, Postroad, Unreachable
from postroad import Kind as Payload

NAME = "hosts"
DOWN, UP = "https://down.example/", "https://up.example/"
HOOK = Payload("hook", dict[str, str])
OTHER = Payload("other", dict[str, str])
AT_ONCE = 500


def measure(kind: Kind, ours: Place, limit: Place, plan: Plan, progress: Progress) -> Iterator[Figure]:
    """p50 and p95 in milliseconds, by turns with and without the host that is down, all rounds together."""
    for case, payload in (("the healthy host", HOOK), ("another kind", OTHER)):
        found: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(plan.rounds):
            for down in found:
                ours.clear()
                found[down] += _lengths(ours, payload, plan, down=down)
        with_it, without = (latency.percentiles(of_one) for of_one in found.values())
        for name, mine, other in zip(("p50", "p95"), with_it, without, strict=False):
            yield Figure(
                work=NAME, database=kind, case=f"{case} beside one that is down, {name}", unit="ms",
                ours=mine, against=other,
            )  # fmt: skip


def _lengths(place: Place, payload: Payload[dict[str, str]], plan: Plan, *, down: bool) -> list[float]:
    post = Postroad(place.url, schema=place.schema)
    arrivals: latency.Arrivals = {}

    async def arrive(dispatch: Dispatch[dict[str, str]]) -> None:
        if dispatch.to == DOWN:
            raise Unreachable("connection refused")
        arrivals[dispatch.key] = time.monotonic_ns()

    post.sender(HOOK)(arrive)
    post.sender(OTHER)(arrive)

    def send(key: str) -> None:
        with post.begin() as tx:
            tx.send(payload, work.mail(key), to=UP, key=key)

    with closing(post):
        if down:
            _fill(post, plan.few)
        with post.running():
            left = latency.publish(send, plan.latency_seconds / plan.rounds)
            latency.await_all(arrivals, left.keys())
    return latency.lengths(left, arrivals)


def _fill(post: Postroad, number: int) -> None:
    for first in range(0, number, AT_ONCE):
        with post.begin() as tx:
            for each in range(first, min(first + AT_ONCE, number)):
                tx.send(HOOK, work.mail(str(each)), to=DOWN, key=f"down/{each}")
