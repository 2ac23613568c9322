"""How things stand, counted from rows written by hand."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from postroad.model.clock import SECOND, FakeClock
from postroad.model.rows import NewAlert, NewEvent, TimerChange
from postroad.store import alerts, inbox, queues, status, stopping, timers
from postroad.store.statements import Statement
from postroad.store.status import Bounded, KindStatus, Snapshot, StreamCount

Run = Callable[..., Any]

DEAD = Statement("UPDATE {p}inbox SET reason = :reason WHERE event_id = :key")
ADOPT = Statement("UPDATE {p}inbox SET front = 0 WHERE event_id = :key")
DISPATCH = Statement("""
    INSERT INTO {p}outbox (id, key, stream, kind, version, destination, body, headers, policy, status, attempt, epoch,
        claim_token, due_at, content_hash, origin, created_at, updated_at)
    VALUES (:id, :id, '', :kind, 1, '', '1', '{}', 'event', :status, 0, 0,
        CASE WHEN :status = 'delivering' THEN 't' END, :due_at, '', '{}', :created_at, :created_at)
""")
TRANSITION = Statement("""
    INSERT INTO {p}transitions (entity, from_status, to_status, reason_code, summary, source, actor, evidence,
        metadata, at)
    VALUES ('d', :from_status, :to_status, :reason_code, '', '', '', '[]', '{}', :at)
""")
RUN = Statement("""
    INSERT INTO {p}runs (run_id, stream, turn_id, attempt, claim_token, started_at, ended_at, end_reason)
    VALUES (:run_id, :stream, 't', 1, 'c', :at, :at, :end_reason)
""")
QUEUE = Statement("""
    INSERT INTO {p}queues (stream, type, until, state, attempts) VALUES (:stream, 'load', :until, :state, 1)
""")


def test_nothing_is_going_on(run: Run, clock: FakeClock) -> None:
    """An empty database: zeros, and JSON that says so."""
    found: Snapshot = run(status.snapshot)
    assert found.now == clock.wall()
    assert (found.events_waiting, found.events_dead, found.alerts_unrung) == (Bounded(0), Bounded(0), Bounded(0))
    assert (found.oldest_event_age, found.oldest_dispatch_age, found.pump_lag) == (0, 0, 0)
    assert (found.conflict_rate, found.kinds, found.parked, found.conflicted) == (0.0, [], [], [])
    assert msgspec.json.decode(msgspec.json.encode(found))["dispatches"] == {"pending": 0, "delivering": 0}


def test_events(run: Run, clock: FakeClock) -> None:
    """Waiting and dead ones apart; the oldest one at the front of any type gives the age."""
    for stream, key in (("load/1", "dead"), ("load/1", "adopted"), ("chat/1", "old"), ("load/2", "new")):
        run(inbox.publish, [NewEvent(stream=stream, event_id=key, kind="k", data="1")])
        clock.advance(10)
    run(DEAD, key="dead", reason="failed")
    run(ADOPT, key="adopted")
    found: Snapshot = run(status.snapshot)
    assert (found.events_waiting, found.events_dead) == (Bounded(3), Bounded(1))
    assert found.oldest_event_age == 20 * SECOND


def ended(run: Run, *reasons: str) -> None:
    """Events that ended for these reasons, one after the other."""
    for number, reason in enumerate(reasons):
        run(inbox.publish, [NewEvent(stream="load/1", event_id=str(number), kind="k", data="1")])
        run(DEAD, key=str(number), reason=reason)


def test_what_somebody_has_dropped_is_no_death(run: Run) -> None:
    """Events that were withdrawn, or whose stream was deleted, ended because a person said so: nobody is to look."""
    ended(run, "turn.dead.max_attempts", stopping.WITHDRAWN, queues.STREAM_DELETED, "turn.dead.permanent")
    found: Snapshot = run(status.snapshot)
    assert (found.events_waiting, found.events_dead) == (Bounded(0), Bounded(2))


def test_the_dead_are_counted_among_the_last_that_ended(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many were dropped, no more is looked at; that there may be more of the dead is said."""
    monkeypatch.setattr(status, "COUNT_MAX", 2)
    ended(run, "turn.dead.permanent", "turn.dead.permanent", stopping.WITHDRAWN)
    assert run(status.snapshot).events_dead == Bounded(2, more=True)
    run(inbox.publish, [NewEvent(stream="load/2", event_id="new", kind="k", data="1")])
    run(DEAD, key="new", reason=stopping.WITHDRAWN)
    assert run(status.snapshot).events_dead == Bounded(1, more=True)


def test_dispatches(run: Run, clock: FakeClock) -> None:
    """Unfinished ones by status and by kind, with the age of the oldest; finished ones are not there."""
    now = clock.wall()
    for number, (kind, state, age) in enumerate(
        [
            ("sms", "pending", 10),
            ("sms", "pending", 30),
            ("sms", "delivering", 20),
            ("mail", "pending", 5),
            ("fax", "delivered", 99),
        ]
    ):
        due = None if state == "delivered" else now + age
        made = {"id": str(number), "kind": kind, "status": state, "created_at": now - age * SECOND}
        run(DISPATCH, due_at=due, **made)
    found: Snapshot = run(status.snapshot)
    assert found.dispatches == {"pending": 3, "delivering": 1}
    assert found.oldest_dispatch_age == 30 * SECOND
    assert found.kinds == [
        KindStatus(kind="mail", pending=1, delivering=0, oldest_age=5 * SECOND, more=False),
        KindStatus(kind="sms", pending=2, delivering=1, oldest_age=30 * SECOND, more=False),
    ]


def test_trouble_lately(run: Run, clock: FakeClock) -> None:
    """Dead letters, expiries, lost leases and stale settles of the last hour, by reason; successes are none."""
    for from_status, to_status, reason, hours in [
        ("delivering", "dead_letter", "dispatch.dead_letter.max_attempts", 0.5),
        ("delivering", "dead_letter", "dispatch.dead_letter.lease_lost", 0.5),
        ("delivering", "dead_letter", "dispatch.dead_letter.lease_lost", 2),
        ("pending", "expired", "dispatch.expired.deadline", 0.5),
        ("delivering", "delivering", "dispatch.delivering.attempt", 0.5),
        ("delivered", "delivered", "dispatch.stale.transport_failed", 0.5),
        ("pending", "delivering", "dispatch.delivering.attempt", 0.5),
        ("delivering", "delivered", "dispatch.delivered.transport_ok", 0.5),
    ]:
        at = clock.wall() - round(hours * status.HOUR)
        run(TRANSITION, from_status=from_status, to_status=to_status, reason_code=reason, at=at)
    found: Snapshot = run(status.snapshot)
    assert (found.dead_lately, found.expired_lately) == (2, 1)
    assert (found.lease_losses_lately, found.stale_settles_lately) == (2, 1)
    assert found.trouble == {
        "dispatch.dead_letter.max_attempts": 1,
        "dispatch.dead_letter.lease_lost": 1,
        "dispatch.expired.deadline": 1,
        "dispatch.delivering.attempt": 1,
        "dispatch.stale.transport_failed": 1,
    }
    assert run(status.snapshot, hour=3 * status.HOUR).dead_lately == 3


def test_runs_lately(run: Run, clock: FakeClock) -> None:
    """How many began in the last hour, what part met a conflict, and which streams had the most of them."""
    ended = [("load/1", "conflict")] * 2 + [("load/2", "conflict")] + [("load/3", "committed")] * 4
    ended += [("load/3", "interrupted"), ("load/3", "failed"), ("load/4", None)]
    for number, (stream, end) in enumerate(ended):
        run(RUN, run_id=str(number), stream=stream, end_reason=end, at=clock.wall() - SECOND)
    run(RUN, run_id="old", stream="load/5", end_reason="conflict", at=clock.wall() - 2 * status.HOUR)
    found: Snapshot = run(status.snapshot)
    assert found.runs == Bounded(10)
    assert found.conflict_rate == pytest.approx(0.3)
    assert found.runs_ended == {"conflict": 3, "interrupted": 1, "failed": 1}
    assert found.conflicted == [StreamCount("load/1", 2), StreamCount("load/2", 1)]


def test_streams_and_the_pump(run: Run, clock: FakeClock) -> None:
    """Parked streams by name, the pump's lag behind the longest due timer, alerts that nobody was told of."""
    for stream, state, until in [("load/2", "parked", None), ("load/1", "parked", None), ("load/3", "backoff", 1)]:
        run(QUEUE, stream=stream, state=state, until=until)
    run(timers.apply, [TimerChange(verb="set", stream="load/1", key="t", fire_at=clock.wall())])
    run(alerts.raise_alerts, [NewAlert(code="c", subject="s"), NewAlert(code="c", subject="s")])
    run(alerts.mark_rung, [run(alerts.unrung)[0][0]])
    clock.advance(7)
    found: Snapshot = run(status.snapshot)
    assert found.parked == ["load/1", "load/2"]
    assert found.pump_lag == 7 * SECOND
    assert found.alerts_unrung == Bounded(1)


def test_a_timer_of_the_future_is_no_lag(run: Run, clock: FakeClock) -> None:
    """The pump is late only for what is due."""
    run(timers.apply, [TimerChange(verb="set", stream="load/1", key="t", fire_at=clock.wall() + SECOND)])
    assert run(status.snapshot).pump_lag == 0


def test_counts_are_bounded(run: Run, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A count stops at its bound and says that there are more."""
    monkeypatch.setattr(status, "COUNT_MAX", 2)
    monkeypatch.setattr(status, "PER_KIND_MAX", 2)
    for number in range(3):
        key, now = str(number), clock.wall()
        run(inbox.publish, [NewEvent(stream="load/1", event_id=key, kind="k", data="1")])
        run(DISPATCH, id=key, kind="sms", status="pending", due_at=now, created_at=now)
        run(RUN, run_id=key, stream="load/1", end_reason="committed", at=now)
    found: Snapshot = run(status.snapshot)
    assert found.events_waiting == found.runs == Bounded(2, more=True)
    assert [(kind.pending, kind.more) for kind in found.kinds] == [(2, True)]
