"""Commit → send: how long after its commit was answered a dispatch reaches its sender, when nothing else is to do.

One publisher commits a dispatch about 50 times a second, at moments drawn from a seed; the loops that carry them out
run in its own process or in another one. The limit is told of each commit without any polling: by NOTIFY, or on
SQLite by a datagram.
"""

import random
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from multiprocessing.connection import Connection as Pipe
from statistics import quantiles
from typing import Protocol

from benchmarks import work
from benchmarks.children import child
from benchmarks.figures import Figure, Plan, Progress, rounded
from benchmarks.latency_limit import PostgresByHand, SQLiteByHand
from benchmarks.ours import MAIL
from benchmarks.places import Kind, Place
from postroad import Dispatch, Postroad

NAME = "latency"
PER_SECOND = 50
SEED = 20
WARM = 25
LAST_SECONDS = 30

Arrivals = dict[str, int]
Send = Callable[[str], None]


class Side(Protocol):
    """One of the two ways, in one process."""

    def receiving(self) -> AbstractContextManager[Arrivals]:
        """Carry out what comes; when it reached its sender, by key, in nanoseconds of the host's steady clock."""

    def send(self, key: str) -> None:
        """Commit a dispatch."""

    def close(self) -> None:
        """Close it."""


class Ours:
    """The public API."""

    def __init__(self, url: str, schema: str | None) -> None:
        self._post = Postroad(url, schema=schema)
        self._arrivals: Arrivals = {}
        self._post.sender(MAIL)(self._arrive)

    async def _arrive(self, dispatch: Dispatch[dict[str, str]]) -> None:
        self._arrivals[dispatch.key] = time.monotonic_ns()

    @contextmanager
    def receiving(self) -> Iterator[Arrivals]:
        """Worker, dispatcher and pump in a thread of their own."""
        with self._post.running():
            yield self._arrivals

    def send(self, key: str) -> None:
        """One transaction with one dispatch of no stream."""
        with self._post.begin() as tx:
            tx.send(MAIL, work.mail(key), to="driver", key=key)

    def close(self) -> None:
        """Close the app."""
        self._post.close()


SIDES: dict[str, Callable[[str, str | None], Side]] = {
    "ours": Ours,
    "sqlite": SQLiteByHand,
    "postgres": PostgresByHand,
}


def measure(kind: Kind, ours: Place, limit: Place, plan: Plan, progress: Progress) -> Iterator[Figure]:
    """p50, p95 and p99 in milliseconds, in one process and between two; both sides by turns, all rounds together."""
    for case, run in (("one process", _beside), ("two processes", _between)):
        found: dict[str, list[float]] = {"ours": [], kind: []}
        for _ in range(plan.rounds):
            for side, place in (("ours", ours), (kind, limit)):
                place.clear()
                found[side] += run(side, place, plan.latency_seconds / plan.rounds)
        sides = [percentiles(of_side) for of_side in found.values()]
        for name, mine, theirs in zip(("p50", "p95", "p99"), *sides, strict=True):
            yield Figure(work=NAME, database=kind, case=f"{case}, {name}", unit="ms", ours=mine, against=theirs)


def _beside(side: str, place: Place, seconds: float) -> list[float]:
    with closing(SIDES[side](place.url, place.schema)) as both, both.receiving() as arrivals:
        left = publish(both.send, seconds)
        await_all(arrivals, left.keys())
        return lengths(left, arrivals)


def _between(side: str, place: Place, seconds: float) -> list[float]:
    with closing(SIDES[side](place.url, place.schema)) as publisher, child(_receive, place, side) as receiver:
        left = publish(publisher.send, seconds)
        return lengths(left, receiver.ask(list(left)))


def _receive(url: str, schema: str | None, pipe: Pipe, side: str) -> None:
    with closing(SIDES[side](url, schema)) as receiver, receiver.receiving() as arrivals:
        pipe.send("ready")
        await_all(arrivals, pipe.recv())
        pipe.send(arrivals)
        pipe.recv()


def publish(send: Send, seconds: float) -> Arrivals:
    """Commit dispatches at random moments; when each commit was answered."""
    moments = random.Random(SEED)
    due = time.monotonic()
    left: Arrivals = {}
    for number in range(WARM + round(seconds * PER_SECOND)):
        due += moments.uniform(0.5, 1.5) / PER_SECOND
        time.sleep(max(0, due - time.monotonic()))
        send(key := f"m{number}")
        left[key] = time.monotonic_ns()
    return left


def await_all(arrivals: Arrivals, keys: Collection[str]) -> None:
    """Wait until that many have come."""
    over = time.monotonic() + LAST_SECONDS
    while len(arrivals) < len(keys):
        if time.monotonic() > over:
            raise TimeoutError(f"{len(arrivals)} of {len(keys)} dispatches have come")
        time.sleep(0.01)


def lengths(left: Arrivals, arrivals: Arrivals) -> list[float]:
    """How long each was under way, in milliseconds; the first ones, which warm up, don't count."""
    return [(arrivals[key] - at) / 1e6 for key, at in list(left.items())[WARM:]]


def percentiles(lengths: list[float]) -> tuple[float, float, float]:
    """p50, p95 and p99."""
    cuts = quantiles(lengths, n=100, method="inclusive")
    return rounded(cuts[49]), rounded(cuts[94]), rounded(cuts[98])
