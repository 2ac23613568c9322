"""Steady load: 40 mixed messages a second on Postgres, carried out by two processes; what waits must not grow.

Of four messages two are events, each of which is decided on and sends twice; one is a dispatch of no stream; one is a
timer that fires within seconds.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from statistics import linear_regression

import msgspec
from sqlalchemy import Connection

from benchmarks import application, work
from benchmarks.children import child
from benchmarks.figures import Figure, Plan, Progress, rounded
from benchmarks.ours import EVENT, MAIL
from benchmarks.places import Kind, Place
from postroad import Postroad, Transaction
from postroad.store.statements import Statement

NAME = "steady"
PER_SECOND = 40
PROCESSES = 2
STREAMS = 50
TIMER_SECONDS = 2
LAST_SECONDS = 30

_BACKLOG = Statement("""
SELECT (SELECT count(*) FROM {p}inbox WHERE reason IS NULL) AS events,
    (SELECT count(*) FROM {p}outbox WHERE status IN ('pending', 'delivering')) AS dispatches,
    (SELECT count(*) FROM {p}timers WHERE status = 'armed' AND fire_at <= :now) AS timers
""")
_LATE = Statement("""
SELECT percentile_cont(0.95) WITHIN GROUP (ORDER BY updated_at - created_at) FROM {p}outbox WHERE status = 'delivered'
""")


class Backlog(msgspec.Struct, frozen=True, kw_only=True):
    """What was due and not at its end, `at` seconds after the start."""

    at: float
    events: int
    dispatches: int
    timers: int

    @property
    def rows(self) -> int:
        """All of it."""
        return self.events + self.dispatches + self.timers


def measure(kind: Kind, ours: Place, limit: Place, plan: Plan, progress: Progress) -> Iterator[Figure]:
    """How the backlog grows, its highest, what is left at the end, how long dispatches took, and what it costs."""
    if kind != "postgres":
        return
    ours.clear()
    with ExitStack() as stack:
        apps = [stack.enter_context(child(application.run, ours)) for _ in range(PROCESSES)]
        post = stack.enter_context(closing(application.build(ours.url, ours.schema)))
        before = [float(app.ask()) for app in apps]
        seen = list(_load(post, ours, plan, progress))
        used = [float(app.ask()) - began for app, began in zip(apps, before, strict=True)]
        left = _left(ours)
    case = f"{PER_SECOND}/s for {plan.steady_seconds:.0f} s"
    for what, unit, value in (
        ("backlog's growth", "rows/min", _growth(seen)),
        ("highest backlog", "rows", max(each.rows for each in seen)),
        ("left at the end", "rows", left),
        ("sent to delivered, p95", "ms", ours.database.read(_p95_milliseconds)),
        (f"each of {PROCESSES} processes", "% of a core", sum(used) / PROCESSES / seen[-1].at * 100),
    ):
        yield Figure(work=NAME, database=kind, case=f"{case}: {what}", unit=unit, ours=rounded(value))


def _growth(seen: list[Backlog]) -> float:
    """The slope of the line through what was seen, in rows a minute."""
    return linear_regression([each.at / 60 for each in seen], [each.rows for each in seen]).slope


def _load(post: Postroad, place: Place, plan: Plan, progress: Progress) -> Iterator[Backlog]:
    """Commit messages at their times, and look at what waits from time to time."""
    began = time.monotonic()
    look = plan.sample_seconds
    for number in range(round(plan.steady_seconds * PER_SECOND)):
        time.sleep(max(0, began + number / PER_SECOND - time.monotonic()))
        with post.begin() as tx:
            _message(tx, number)
        if (passed := time.monotonic() - began) >= look:
            look += plan.sample_seconds
            seen = _backlog(place, passed)
            progress(f"postgres: steady, {passed:.0f} s: {seen.rows} rows wait")
            yield seen
    yield _backlog(place, time.monotonic() - began)


def _message(tx: Transaction, number: int) -> None:
    stream = work.stream(number % STREAMS)
    match number % 4:
        case 0 | 1:
            tx.publish(stream, EVENT, work.event(number), key=f"e{number}")
        case 2:
            tx.send(MAIL, work.mail(f"{number:06}"), to="driver", key=f"d{number}")
        case _:
            tx.set_timer(f"t{number}", after=TIMER_SECONDS, stream=stream)


def _left(place: Place) -> int:
    """What still waits when nothing came for a while."""
    over = time.monotonic() + LAST_SECONDS
    time.sleep(TIMER_SECONDS)
    while (left := _backlog(place, 0).rows) and time.monotonic() < over:
        time.sleep(0.1)
    return left


def _backlog(place: Place, at: float) -> Backlog:
    row = place.database.read(lambda conn: _BACKLOG(conn, now=place.database.clock.wall()).one())
    return Backlog(at=at, events=row.events, dispatches=row.dispatches, timers=row.timers)


def _p95_milliseconds(conn: Connection) -> float:
    return float(_LATE(conn).scalar_one()) / 1_000
