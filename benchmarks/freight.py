"""The freight agent over two virtual weeks: every load pings, asks twice, and hears how its messages fared.

The production code of worker, dispatcher and pump, stepped through every due moment on a SQLite file by
`postroad.testing.Harness`; only the senders' network and the waiting are left out.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from time import perf_counter

import msgspec
from sqlalchemy import Connection

from postroad import GiveUp, RetryLater, Transaction
from postroad.demo.freight import release_1
from postroad.demo.kinds import FIRST, REPLY, STAGE, DriverSms
from postroad.store.statements import Statement
from postroad.testing import Harness

LOADS = 1_000
DAYS = 14
PINGS = 60
CLIENTS = "ABC"
HOUR = 3_600
REPLY_SECONDS = 900
# Of each load's pings these are risky: the first ask is answered, the second ends with a person.
ANSWERED, UNANSWERED = 10, 40
LAST_HOURS = 4  # time for the last ladders to come to their end
BUSY_EVERY = 7  # for one risky load of so many the SMS service fails for a moment
REFUSED_EVERY = 25  # and for one of so many an SMS and an update of a stage are refused for good

_ENTRIES = Statement("SELECT count(*) FROM {p}log")
_OUTCOMES = Statement("SELECT status, count(*) AS many FROM {p}outbox GROUP BY status ORDER BY status")


class Weeks(msgspec.Struct, frozen=True, kw_only=True):
    """What two weeks came to."""

    loads: int
    days: int
    entries: int
    outcomes: dict[str, int]
    waiting: int
    seconds: float

    def __str__(self) -> str:
        outcomes = ", ".join(f"{many:,} {status}" for status, many in self.outcomes.items())
        return (
            f"freight: {self.loads:,} loads x {self.days} virtual days in {self.seconds:.1f} s: "
            f"{self.entries:,} entries ({self.entries / self.seconds:,.0f}/s); dispatches: {outcomes}; "
            f"still waiting: {self.waiting}"
        )


def run(loads: int = LOADS, *, days: int = DAYS, progress: Callable[[str], None] = lambda _: None) -> Weeks:
    """Run that many loads for that many virtual days, `PINGS` pings each."""
    post = release_1()
    post.alert_sink(lambda _: None)
    hours = days * 24
    pings = _schedule(loads, hours)
    with Harness(post) as harness:
        began = perf_counter()
        for hour in range(hours):
            _hour(harness, pings.get(hour, []))
            if hour % 24 == 23:
                progress(f"freight: day {hour // 24 + 1} of {days}, {perf_counter() - began:.0f} s")
        waiting = harness.advance(LAST_HOURS * HOUR).waiting
        seconds = perf_counter() - began
        entries, outcomes = post.database.read(_count)
    return Weeks(loads=loads, days=days, entries=entries, outcomes=outcomes, waiting=waiting, seconds=seconds)


def _schedule(loads: int, hours: int) -> Mapping[int, list[tuple[int, int]]]:
    """Which pings of which loads come in which hour: evenly, and the loads not all at once."""
    found: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for load in range(loads):
        for ping in range(PINGS):
            found[int((ping + load / loads) * hours / PINGS)].append((load, ping))
    return found


def _hour(harness: Harness, pings: list[tuple[int, int]]) -> None:
    with harness.post.begin() as tx:
        for load, ping in pings:
            _ping(tx, load, ping)
            if ping in (ANSWERED, UNANSWERED):
                _misfortune(harness, load)
    harness.advance(REPLY_SECONDS)
    with harness.post.begin() as tx:
        for load, ping in pings:
            if ping == ANSWERED:
                tx.publish(_stream(load), REPLY, DriverSms("in about an hour"), key=f"sms_{ping}")
    harness.advance(HOUR - REPLY_SECONDS)


def _ping(tx: Transaction, load: int, ping: int) -> None:
    body = FIRST.ping_body(
        risky=ping in (ANSWERED, UNANSWERED), client=CLIENTS[load % len(CLIENTS)], driver=f"+1555{load:07}"
    )
    tx.publish(_stream(load), FIRST.ping, body, key=f"ping_{ping:02}")


def _misfortune(harness: Harness, load: int) -> None:
    """What goes wrong with the next sends, so that retries and dead letters are there too."""
    if load % BUSY_EVERY == 0:
        harness.fail(FIRST.sms, RetryLater("the service is busy"))
    if load % REFUSED_EVERY == 0:
        harness.fail(FIRST.sms, GiveUp("no such number"))
        harness.fail(STAGE, GiveUp("no such load"))


def _stream(load: int) -> str:
    return f"load/{481_000 + load}"


def _count(conn: Connection) -> tuple[int, dict[str, int]]:
    return _ENTRIES(conn).scalar_one(), {row.status: row.many for row in _OUTCOMES(conn)}
