"""Clocks that are set, zones that differ, a pump that dies or is kept waiting: never early, each once, none lost."""

import random
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from sqlalchemy import make_url

from postroad import OUTCOME, TIMER_FIRED, Dispatch, InvalidInput, Kind, Postroad, Turn
from postroad.engine.loop import Stalls
from postroad.model import failpoints
from postroad.model.clock import SECOND, FakeClock, micros
from postroad.model.rows import TimerChange
from postroad.store import log, moments, timers
from postroad.store.database import Database
from postroad.store.statements import Statement
from postroad.testing import Harness
from postroad.testing.contracts.dispatches import in_threads
from tests.cases.apps import until
from tests.engine.conftest import Open

Apps = Callable[[], Postroad]
NOTE = Kind("note", dict[str, int])
HOUR = 3_600
EVENTS = Statement("SELECT event_id FROM {p}inbox ORDER BY event_id")


def test_a_stepped_clock_fires_what_is_due_by_it_and_each_once(database: Database, clock: FakeClock) -> None:
    """A thousand timers over a day, the wall clock set an hour back and ahead, a restart: due ones, once, no others."""
    draw = random.Random(83)
    at = {f"t{n}": clock.wall() + draw.randrange(24 * HOUR * SECOND) for n in range(1_000)}
    database.transact(
        timers.apply,
        [TimerChange(verb="set", stream="s/1", key=k, fire_at=due, spec=f"at {due}") for k, due in at.items()],
    )
    latest, seen = 0, 0
    for step in (0, HOUR, -HOUR, HOUR, 6 * HOUR, -HOUR, HOUR, 0):
        clock.jump(step)
        latest = max(latest, clock.wall())
        while database.transact(timers.fire, limit=300).count:
            pass
        due = {key for key, when in at.items() if when <= latest}
        assert set(database.read(lambda conn: EVENTS(conn).scalars())) == {f"evt:{key}" for key in due}
        seen = max(seen, len(due))
    restarted = FakeClock(clock.now)  # its steady clock begins near zero again
    again = Database(database.engine, schema=database.schema, clock=restarted)
    assert again.transact(timers.fire, limit=300).count == 0
    restarted.advance(24 * HOUR)
    assert sum(iter(lambda: again.transact(timers.fire, limit=300).count, 0)) == 1_000 - seen
    again.close()


def test_a_clock_that_is_set_back_stops_nobody(harness: Open) -> None:
    """Two hours back in the middle of a send and of a turn: both are settled, and what comes next is done at once."""
    post = Postroad()
    jumps = [2]

    def set_back() -> None:
        if jumps:
            jumps.pop()
            h.clock.jump(-2 * HOUR)

    @post.sender("sms")
    def send(d: Dispatch[Any]) -> None:
        set_back()

    @post.turn("chat")
    def chat(t: Turn) -> None:
        set_back()
        t.send("sms", {}, key=t.events[0].key)
        t.set_timer(t.events[0].key, after=60)

    post.filter("chat", OUTCOME)(lambda e: "sent")
    post.filter("chat", TIMER_FIRED)(lambda e: "late")
    h = harness(post, senders="run")
    for n in range(3):
        jumps.append(n)
        with post.begin() as tx:
            tx.publish("chat/1", NOTE, {"n": n}, key=f"k{n}")
        h.drain()
        row = post.dispatches.get(f"k{n}")
        assert row is not None
        assert (row.status, row.attempt) == ("delivered", 1)
        h.advance(60)
    fired = [e.key for e in h.entries("chat/1") if e.kind == "postroad.timer_fired"]
    assert len(fired) == len(set(fired))
    h.advance(8 * HOUR)
    assert sorted(e.key for e in h.entries("chat/1") if e.kind == "postroad.timer_fired") == [
        "evt:k0",
        "evt:k1",
        "evt:k2",
    ]


def test_a_clock_that_is_set_ahead_takes_no_claim_from_a_living_sender(place: dict[str, Any]) -> None:
    """Two hours ahead during a send: the other dispatcher waits for a third of the lease, so that the first settles."""
    one, two = Postroad(), Postroad()
    sent: list[str] = []

    @one.sender("sms", timeout=10, lease=30)
    def send(d: Dispatch[Any]) -> None:
        sent.append("one")
        for h in (first, second):
            h.clock.jump(2 * HOUR)
        in_threads(second.drain)

    two.sender("sms", timeout=10, lease=30)(lambda d: sent.append("two"))
    with Harness(one, senders="run", **place) as first, Harness(two, senders="run", seed=1, **place) as second:
        for loop in second._loops:
            loop.stalls = Stalls(two.database)
        with one.begin() as tx:
            tx.send("sms", {}, key="k")
        first.drain()
        second.advance(60)
        row = one.dispatches.get("k")
    assert row is not None
    assert (sent, row.status, row.attempt) == (["one"], "delivered", 1)


def test_a_dead_senders_claim_does_not_outlast_a_clock_that_was_set_ahead(harness: Open) -> None:
    """What a dead process had claimed is free once its lease is over by the clock that counts, and not before."""
    post = Postroad()
    sent: list[int] = []
    post.sender("sms", timeout=10, lease=30)(lambda d: sent.append(d.attempt))
    h = harness(post, senders="run")
    with post.begin() as tx:
        tx.send("sms", {}, key="k")

    def die(name: str) -> None:
        if name == "dispatch.before_send" or dead:
            dead.append(name)
            raise KeyboardInterrupt

    dead: list[str] = []
    failpoints.arm(die)
    try:
        with pytest.raises(KeyboardInterrupt):
            h.drain()
    finally:
        failpoints.arm(None)
    successor = harness(post, senders="run", seed=1, start=h.clock.now)
    successor.advance(29)
    assert sent == []
    successor.advance(1)
    assert sent == [2]


@pytest.fixture
def east_of_greenwich(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process lives three hours east of Greenwich."""
    monkeypatch.setenv("TZ", "Africa/Dar_es_Salaam")
    time.tzset()
    assert time.timezone == -3 * HOUR
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("east_of_greenwich")
@pytest.mark.parametrize("session", ["UTC", "America/Los_Angeles"])
def test_zones_of_process_and_session_change_no_instant(place: dict[str, Any], session: str) -> None:
    """One instant written with three offsets is one due time on both databases; without an offset it is refused."""
    if "schema" in place:
        url = make_url(place["database"])
        place["database"] = url.update_query_dict({"options": f"-c TimeZone={session}"}).render_as_string(False)
    instant = datetime(2026, 3, 1, 6, tzinfo=UTC)
    forms = [
        instant,
        datetime(2026, 3, 1, 9, tzinfo=timezone(timedelta(hours=3))),
        datetime.fromisoformat("2026-03-01T06:00:00Z"),
        datetime.fromtimestamp(instant.timestamp()).astimezone(),
    ]
    post = Postroad()
    post.sender("sms")(lambda d: None)
    post.recorded("chat")
    with Harness(post, start="2026-03-01T05:59Z", **place) as h:
        for n, at in enumerate(forms):
            with post.begin() as tx:
                tx.send("sms", {}, key=f"m{n}", at=at)
                tx.set_timer(f"t{n}", at=at, stream="chat/1")
        with pytest.raises(InvalidInput, match="at must be a datetime with a time zone"), post.begin() as tx:
            tx.send("sms", {}, at=datetime(2026, 3, 1, 9))  # noqa: DTZ001
        rows = post.dispatches.list()
        assert {row.due_at for row in rows} == {instant}
        assert {row.due_at.utcoffset() for row in rows if row.due_at} == {timedelta()}
        assert {t.fire_at for t in post.database.read(timers.list_, stream="chat/1")} == {micros(instant, "at")}
        h.advance(59)
        assert (len(h._captured), len(h.entries("chat/1"))) == (0, 0)
        h.advance(1)
        assert (len(h._captured), len(h.entries("chat/1"))) == (4, 4)
        assert {d.created_at for d in h._captured} == {datetime(2026, 3, 1, 5, 59, tzinfo=UTC)}


@pytest.mark.usefixtures("east_of_greenwich")
def test_the_servers_clock_is_read_without_its_zone(postgres_url: str) -> None:
    """Whatever zone a session has, the server's time is the same number."""
    for session in ("UTC", "America/Los_Angeles", "Asia/Kolkata"):
        url = make_url(postgres_url).update_query_dict({"options": f"-c TimeZone={session}"})
        database = Database(url)
        now = database.transact(lambda conn, now: now)
        assert abs(now - time.time() * SECOND) < 60 * SECOND
        database.close()


@pytest.mark.parametrize("place_of_death", ["timers.due", "timers.published", "timers.marked", "commit.before"])
def test_a_pump_that_dies_leaves_timer_and_event_together(harness: Open, place_of_death: str) -> None:
    """Wherever it dies, a timer is armed without an event or fired with one; the next pump makes up for it."""
    post = Postroad()
    post.recorded("chat")
    h = harness(post)
    with post.begin() as tx:
        for n in range(3):
            tx.set_timer(f"t{n}", after=60, stream="chat/1")
    h.clock.advance(60)

    def die(name: str) -> None:
        if name == place_of_death:
            raise KeyboardInterrupt

    failpoints.arm(die)
    try:
        with pytest.raises(KeyboardInterrupt):
            h.drain()
    finally:
        failpoints.arm(None)
    assert {t.status for t in post.database.read(timers.list_, stream="chat/1")} == {"armed"}
    assert post.database.read(lambda conn: EVENTS(conn).scalars()) == []
    h.clock.advance(5)
    h.drain()
    assert [e.key for e in h.entries("chat/1")] == ["evt:t0", "evt:t1", "evt:t2"]


def test_a_blocked_event_loop_merges_no_timers(open_app: Apps) -> None:
    """A handler blocks the loop while three timers become due: afterwards each is an event of its own."""
    post = open_app()

    @post.turn("chat")
    async def chat(t: Turn) -> None:
        for e in t.events:
            if e.kind == "note":
                time.sleep(0.5)  # noqa: ASYNC251  # blocks on purpose

    with post.running():
        with post.begin() as tx:
            for n in range(3):
                tx.set_timer(f"t{n}", after=(n + 1) / 10, stream="chat/2")
            tx.publish("chat/1", NOTE, {"n": 1})
        until(lambda: post.database.read(moments.waiting) == 0)
    fired = post.database.read(log.read, "chat/2", limit=10)
    assert [e.key for e in fired] == ["evt:t0", "evt:t1", "evt:t2"]
