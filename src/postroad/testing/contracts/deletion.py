"""What the deletion of a stream promises: nothing comes into being in it any more, and what it contained goes.

It cannot catch what two transactions at once make of each other; `tests/contracts/test_deletion_races.py` does that.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from sqlalchemy import Connection

from postroad.engine.records import BEGIN, Records, TimerRecord
from postroad.model.clock import SECOND, FakeClock
from postroad.model.dispatches import Accepted, Withdrawn
from postroad.model.errors import StaleClaim, StreamDeleted
from postroad.model.lifecycle import RunEnd
from postroad.model.retention import DAY, Retention
from postroad.model.rows import NewAlert, TimerChange, TurnClaim
from postroad.store import alerts, audit, inbox, queues, retention, settle, stream_views, streams, timers
from postroad.store.retention import Place, Tally
from postroad.store.statements import Statement, as_json
from postroad.testing.contracts.dispatches import claim as claim_sends
from postroad.testing.contracts.dispatches import dispatch, enqueue, last_change, outcomes, settlement
from postroad.testing.contracts.retention import KEPT, sweep
from postroad.testing.contracts.streams import (
    STREAM,
    Uses,
    commit,
    decided,
    ends,
    event,
    everything,
    hold,
    logged,
    queue_rows,
    waits,
)

Run = Callable[..., Any]
OTHER = "load/2"
TABLES = ("log", "inbox", "runs", "operations", "timers", "queues", "partials")
_STREAMS = Statement("SELECT id, version, deleted_at FROM {p}streams ORDER BY id")
_LEFT = {name: Statement(f"SELECT stream FROM {{p}}{name}") for name in TABLES}
_OPERATIONS = Statement(
    "INSERT INTO {p}operations (turn_id, ordinal, run_id, stream, tool, version, effect, status, started_at, ended_at, "
    "arguments) SELECT turn_id, ordinal, run_id, stream, 'mail', 1, 'unsafe', 'finished', :now, :now, '{}' FROM "
    "{rows:made(turn_id text, ordinal int, run_id text, stream text)}"
)
_PARTIAL = Statement(
    "INSERT INTO {p}partials (stream, run_id, turn_id, updated_at, said) VALUES (:stream, 'r', 't', :now, 'hm')"
)
_STRANDED = Statement(
    "SELECT i.event_id FROM {p}inbox AS i WHERE i.front = 0 AND i.reason IS NULL "
    "AND (SELECT 1 FROM {p}queues AS q WHERE q.stream = i.stream) IS NULL"
)


def delete(run: Run, *names: str, **more: Any) -> None:
    """Delete streams as a program's block does, with what else it records."""
    run(BEGIN.run, [Records(deletions=list(names), **more)])


def deleted(conn: Connection) -> list[tuple[str, int, int | None]]:
    """(name, version, when it was deleted) of all streams."""
    return [tuple(row) for row in _STREAMS(conn)]


def left(conn: Connection, stream: str) -> dict[str, int]:
    """How many rows of a stream each table holds, of those that hold some."""
    found = {name: statement(conn).scalars().count(stream) for name, statement in _LEFT.items()}
    return {name: count for name, count in found.items() if count}


def call(conn: Connection, held: TurnClaim, many: int, *, now: int) -> None:
    """Leave the tool calls of a run."""
    rows = [{"turn_id": held.turn_id, "ordinal": n, "run_id": held.run_id, "stream": held.stream} for n in range(many)]
    _OPERATIONS(conn, made=as_json(rows), now=now)


def armed(key: str, stream: str = STREAM, *, at: int) -> TimerChange:
    """The setting of a timer."""
    return TimerChange(verb="set", stream=stream, key=key, fire_at=at, spec=f"at {at}")


def statuses(conn: Connection, stream: str = STREAM) -> dict[str, str]:
    """A stream's timers."""
    return {row.key: row.status for row in timers.list_(conn, stream=stream)}


class DeletionContract(Uses):
    """From the deletion on."""

    def test_publishing_is_refused(self, run: Run) -> None:
        """A new message, and one that was accepted before, are refused and leave nothing; other streams go on."""
        self.publish(run, event(1), event(1, OTHER))
        delete(run, STREAM)
        before = run(everything)
        for number in (1, 2):
            with pytest.raises(StreamDeleted) as refused:
                self.publish(run, event(7, OTHER), event(number))
            assert refused.value.stream == STREAM
        assert run(everything) == before
        assert self.publish(run, event(2, OTHER))[0].created

    def test_twice_is_the_same_success(self, run: Run, clock: FakeClock) -> None:
        """The second deletion changes nothing, not the time of the first one either."""
        self.publish(run, event(1))
        commit(run, decided(self.claim_one(run)))
        delete(run, STREAM)
        at = clock.wall()
        clock.advance(1)
        delete(run, STREAM, STREAM)
        assert run(deleted) == [(STREAM, 1, at)]

    def test_one_that_has_never_been(self, run: Run, clock: FakeClock) -> None:
        """A message that comes late, to a conversation that was deleted before its first one, begins nothing."""
        delete(run, STREAM)
        assert run(deleted) == [(STREAM, 0, clock.wall())]
        with pytest.raises(StreamDeleted):
            self.publish(run, event(1))
        assert (self.claim(run), run(left, STREAM)) == ([], {})

    def test_its_armed_timers_are_cancelled(self, run: Run, clock: FakeClock) -> None:
        """They never fire, another stream's do, and none is armed any more; what has fired stays as it is."""
        run(timers.apply, [armed("fired", at=0)])
        run(timers.fire, limit=9)
        run(timers.apply, [armed("a", at=clock.wall()), armed("b", at=10**18), armed("c", OTHER, at=clock.wall())])
        delete(run, STREAM)
        assert run(statuses) == {"a": "cancelled", "b": "cancelled", "fired": "fired"}
        assert run(timers.fire, limit=9).count == 1
        assert run(alerts.unrung) == []
        for verb in ("set", "rearm"):
            with pytest.raises(StreamDeleted):
                run(BEGIN.run, [Records(timers=[TimerRecord(verb=verb, stream=STREAM, key="a", at=1)])])
        run(BEGIN.run, [Records(timers=[TimerRecord(verb="cancel", stream=STREAM, key="a")])])
        assert run(statuses) == {"a": "cancelled", "b": "cancelled", "fired": "fired"}

    def test_a_timer_that_was_armed_at_the_same_time(self, run: Run, clock: FakeClock) -> None:
        """One that the deletion could not see is dropped when it is due, with an alert."""
        delete(run, STREAM)
        run(timers.apply, [armed("late", at=clock.wall())])
        assert run(timers.fire, limit=9).dropped == 1
        assert (run(statuses), run(waits)) == ({"late": "cancelled"}, [])
        assert [alert.code for _, alert in run(alerts.unrung)] == ["timer.refused"]

    def test_a_turn_under_way_commits_nothing(self, run: Run) -> None:
        """Its result is discarded whole; what it was about, and what waits behind it, is dropped at the next claim."""
        self.publish(run, event(1), event(2))
        held = self.claim_one(run, batch=1)
        delete(run, STREAM)
        before = run(everything)
        result = decided(
            held, "reply", dispatches=[dispatch(1, stream=STREAM)], publishes=[event(5, OTHER)],
            timers=[armed("t", at=1)], alerts=[NewAlert(code="c", subject=STREAM)],
        )  # fmt: skip
        with pytest.raises(StreamDeleted) as refused:
            commit(run, result)
        assert (refused.value.stream, run(everything)) == (STREAM, before)
        run(queues.release, hold(held), end=RunEnd.STOPPED, error="its stream was deleted")
        assert self.claim(run, "t2") == []
        assert run(waits) == [(STREAM, "e1", "stream_deleted"), (STREAM, "e2", "stream_deleted")]
        assert (run(logged), run(queue_rows), run(ends)) == ([], [], ["stopped"])

    @pytest.mark.parametrize("way", ["backs off", "is split", "is lost"])
    def test_a_turn_that_is_to_be_tried_again(self, run: Run, clock: FakeClock, way: str) -> None:
        """However its last attempt has ended, there is no further one."""
        self.publish(run, event(1), event(2))
        held = self.claim_one(run)
        if way == "backs off":
            run(queues.back_off, hold(held), delay=60 * SECOND, error="e")
        elif way == "is split":
            run(queues.split, hold(held), error="e")
        delete(run, STREAM)
        clock.advance(61)
        assert (self.claim(run, "t2"), self.claim(run, "t3")) == ([], [])
        assert {reason for _, _, reason in run(waits)} == {"stream_deleted"}
        assert run(queue_rows) == []

    def test_an_outcome_is_dropped_with_a_word_on_it(self, run: Run) -> None:
        """What was sent goes on its way; its stream hears nothing of it, and the dispatch's history says so."""
        enqueue(run, dispatch(1, stream=STREAM))
        (sent,) = claim_sends(run)
        delete(run, STREAM)
        run(settle.settle, [settlement(sent, "permanent")])
        assert (run(outcomes), run(left, STREAM)) == ([], {})
        assert msgspec.json.decode(run(last_change).metadata)["outcome"] == "dropped: the stream was deleted"

    def test_what_must_not_be_sent_is_withdrawn_along_with_it(self, run: Run) -> None:
        """A block may end what the stream has sent together with the stream."""
        enqueue(run, dispatch(1, stream=STREAM), dispatch(2, stream=OTHER))
        gone = Withdrawn()
        delete(run, STREAM, withdrawals=[("key/1", gone)])
        assert [held.key for held in claim_sends(run)] == ["key/2"]
        assert run(outcomes) == []

    def test_several_in_one_transaction(self, run: Run) -> None:
        """Blocks that are written together delete first; what another one publishes there is refused."""
        self.publish(run, event(1))
        batch = [
            Records(publishes=[(event(9, "room/1"), Accepted())]),
            Records(deletions=[OTHER, "load/3"]),
            Records(deletions=[STREAM]),
        ]
        first, *_ = run(BEGIN.run, batch)
        assert [one.created for one in first.published] == [True]
        assert [name for name, _, at in run(deleted) if at is not None] == [STREAM, OTHER, "load/3"]
        with pytest.raises(StreamDeleted):
            run(BEGIN.run, [Records(publishes=[(event(9, "load/4"), Accepted())]), Records(deletions=["load/4"])])
        assert BEGIN.names(Records(deletions=[STREAM])) == BEGIN.names(Records(deletions=[STREAM])) != []

    def test_an_operator_s_is_audited(self, run: Run, clock: FakeClock) -> None:
        """Who, why, and what was there, once; a second deletion is no change and writes nothing."""
        self.publish(run, event(1), event(2))
        commit(run, decided(self.claim_one(run, batch=1)))
        run(timers.apply, [armed("a", at=10**18)])
        by = audit.Operator(actor="ann", reason="asked to")
        assert run(streams.delete_by, STREAM, by=by)
        assert not run(streams.delete_by, STREAM, by=by)
        (row,) = run(audit.list_)
        assert (row.action, row.subject, row.actor, row.reason) == ("stream.delete", STREAM, "ann", "asked to")
        assert msgspec.json.decode(row.before) == {"version": 1, "state": "waiting", "dead": 0, "waiting": 1}
        assert run(statuses) == {"a": "cancelled"}
        assert run(streams.delete_by, "load/none", by=by)
        seen = run(stream_views.row, STREAM, now=clock.wall())
        assert seen.why.startswith("The stream was deleted at ")


class ContentsContract(Uses):
    """What retention does with a deleted stream's content."""

    def fill(self, run: Run, stream: str = STREAM, many: int = 2) -> TurnClaim:
        """Leave something of each table in a stream; the claim of its last turn, which is held."""
        self.publish(run, *(event(n, stream) for n in range(many)))
        held = self.claim_one(run, f"fill {stream}")
        run(call, held, many)
        commit(run, decided(held, *(f"n{n}" for n in range(many)), consumed=held.events[1:], dead=held.events[:1]))
        run(timers.apply, [armed(f"t{n}", stream, at=10**18) for n in range(many)])
        run(lambda conn, *, now: _PARTIAL(conn, stream=stream, now=now))
        self.publish(run, *(event(100 + n, stream) for n in range(many)))
        return self.claim_one(run, f"held {stream}", batch=1)

    def fill_both(self, run: Run, many: int = 2) -> None:
        """Leave something of each table in two streams, whose last turns nobody is at."""
        for held in [self.fill(run, stream, many) for stream in (STREAM, OTHER)]:
            run(queues.release, hold(held))

    def test_it_goes_a_day_after_the_deletion(self, run: Run, clock: FakeClock) -> None:
        """All of it, counted in the audit; the stream's row stays and its ids stay refused. A living one keeps all."""
        self.fill_both(run)
        kept = run(left, OTHER)
        assert set(kept) == set(TABLES)
        delete(run, STREAM)
        at = clock.wall()
        clock.advance_to(at + DAY)
        assert (sweep(run).counts, run(left, STREAM)) == ({}, kept)
        clock.advance(1)
        counts = {"events": 3, "entries": 3, "operations": 2, "runs": 2, "timers": 2}
        assert sweep(run).counts == counts
        assert (run(left, STREAM), run(left, OTHER)) == ({}, kept)
        assert run(deleted) == [(STREAM, 3, at), (OTHER, 3, None)]
        (row,) = run(audit.list_)
        assert msgspec.json.decode(row.after) == counts
        with pytest.raises(StreamDeleted):
            self.publish(run, event(0))
        assert sweep(run).counts == {}

    def test_at_once_if_the_setting_says_so(self, run: Run, clock: FakeClock) -> None:
        """With `deleted = 0` the next pass takes it."""
        run(queues.release, hold(self.fill(run)))
        delete(run, STREAM)
        clock.advance(1)
        assert sweep(run, Retention(deleted=0)).counts["entries"] == 3
        assert run(left, STREAM) == {}

    @pytest.mark.parametrize("adopted", [False, True])
    def test_a_few_rows_at_a_time(self, run: Run, clock: FakeClock, adopted: bool) -> None:
        """No step deletes more than its bound, and between two steps no event is stranded."""
        self.fill_both(run, many=9)
        if adopted:  # off the inbox's front, found through the queues row alone
            run(queues.adopt, stream_type="load")
        delete(run, STREAM, OTHER)
        clock.advance_to(clock.wall() + 2 * DAY)
        place, tally = Place(), Tally()
        while place is not None:
            found = run(retention.look, place, retention=KEPT, limit=4)
            place, after = run(retention.end, found, tally, retention=KEPT)
            assert sum(after.counts.values()) - sum(tally.counts.values()) <= 4
            assert run(lambda conn: _STRANDED(conn).all()) == []
            tally = after
        assert (run(left, STREAM), run(left, OTHER)) == ({}, {})

    def test_a_turn_under_way_is_left_alone(self, run: Run, clock: FakeClock) -> None:
        """Its stream is passed over until its claim is over; a claimant that comes back then finds it gone."""
        held = self.fill(run)
        delete(run, STREAM)
        kept = run(left, STREAM)
        run(queues.renew, [hold(held)], lease=3 * DAY)
        clock.advance_to(clock.wall() + 2 * DAY)
        assert (sweep(run).counts, run(left, STREAM)) == ({}, kept)
        clock.advance_to(clock.wall() + 2 * DAY)
        assert sweep(run).counts["entries"] == 3
        assert run(left, STREAM) == {}
        with pytest.raises(StaleClaim):
            commit(run, decided(held))

    def test_a_parked_one_goes_too(self, run: Run, clock: FakeClock) -> None:
        """Nobody has to let it go first."""
        held = self.fill(run)
        run(queues.park, hold(held), error="e", alert=NewAlert(code="turn.parked", subject=STREAM))
        delete(run, STREAM)
        clock.advance_to(clock.wall() + 2 * DAY)
        sweep(run)
        assert run(left, STREAM) == {}

    def test_what_arrived_at_the_same_time(self, run: Run, clock: FakeClock) -> None:
        """What could not see the deletion, and arrives in the emptied stream, goes with the next pass."""
        delete(run, STREAM)
        clock.advance_to(clock.wall() + 2 * DAY)
        run(inbox.add, [event(1)])
        run(timers.apply, [armed("late", at=10**18)])
        assert run(left, STREAM) == {"inbox": 1, "timers": 1}
        assert sweep(run).counts == {"events": 1, "timers": 1}
        assert run(left, STREAM) == {}

    def test_a_stream_that_is_not_deleted_after_all(self, run: Run, clock: FakeClock) -> None:
        """What a look has found is looked at again: nothing of a living stream goes."""
        run(queues.release, hold(self.fill(run)))
        kept = run(left, STREAM)
        delete(run, OTHER)
        clock.advance_to(clock.wall() + 2 * DAY)
        place = Place(stage=next(n for n, one in enumerate(retention._STAGES) if one.look is retention._CONTENTS))
        found = run(retention.look, place, retention=KEPT)
        rows = [retention.Row(0, STREAM)]
        run(retention.end, msgspec.structs.replace(found, rows=rows), Tally(), retention=KEPT)
        assert run(left, STREAM) == kept

    def test_the_tool_calls_of_a_living_stream(self, run: Run, clock: FakeClock) -> None:
        """They go as runs do, 30 days after their end; those of a turn that is not over stay, however old."""
        over, parked = self.fill(run), self.fill(run, OTHER)
        commit(run, decided(over))
        run(call, parked, 1)
        run(queues.park, hold(parked), error="e", alert=NewAlert(code="turn.parked", subject=OTHER))
        clock.advance_to(clock.wall() + 30 * DAY)
        assert "operations" not in sweep(run).counts
        clock.advance(1)
        assert sweep(run, limit=1).counts["operations"] == 2
        assert (run(left, STREAM).get("operations"), run(left, OTHER)["operations"]) == (None, 3)
