"""What retention promises: old rows go, keys stay taken, what is under way or not old enough stays.

It cannot catch what the walk of a pass costs; the plans and a benchmark show that.
"""

from functools import partial
from typing import Any

import pytest
from sqlalchemy import Connection

from postroad.model import failpoints
from postroad.model.clock import FakeClock
from postroad.model.errors import KeyConflict, StreamDeleted
from postroad.model.lifecycle import RunEnd
from postroad.model.retention import DAY, Retention
from postroad.model.rows import EndedRun, Enqueued, NewAlert, Published, TimerChange
from postroad.store import alerts, audit, inbox, lanes, moves, retention, runs, settle, timers
from postroad.store.database import Database
from postroad.store.retention import Place, Tally
from postroad.store.statements import Statement
from postroad.testing.contracts.dispatches import (
    Run,
    Waiting,
    another,
    claim,
    dispatch,
    enqueue,
    everything,
    history,
    in_threads,
    settlement,
)
from postroad.testing.contracts.purging import buried, keys, purge, same
from postroad.testing.contracts.streams import STREAM, Uses, commit, decided, delete_stream, event, waits

KEPT = Retention()
_SET = Statement("UPDATE {p}outbox SET status = :status, due_at = NULL, claim_token = NULL WHERE key = :key")
_RUNS = Statement("SELECT run_id FROM {p}runs ORDER BY run_id")
_TIMERS = Statement("SELECT key, status FROM {p}timers ORDER BY key")


def set_status(conn: Connection, key: str, status: str) -> None:
    """End a dispatch without what else belongs to it."""
    _SET(conn, key=key, status=status)


def sweep(run: Run, kept: Retention = KEPT, *, limit: int = 500) -> Tally:
    """A whole pass, each look and each end in a transaction of its own."""
    place: Place | None = Place()
    tally = Tally()
    while place is not None:
        found = run(retention.look, place, retention=kept, limit=limit)
        place, tally = run(retention.end, found, tally, retention=kept)
    return tally


class RetentionContract(Uses):
    """Passes over all tables."""

    @pytest.mark.parametrize("status", ["delivered", "acked", "dead_letter", "expired"])
    def test_a_dispatch_is_kept_by_its_status(self, run: Run, clock: FakeClock, status: str) -> None:
        """A finished one goes when it has been finished for longer than its status is kept, not earlier."""
        enqueue(run, dispatch(1))
        run(set_status, "key/1", status)
        clock.advance_to(clock.wall() + getattr(KEPT, status))
        assert sweep(run) == Tally()
        assert run(keys) == ["key/1"]
        clock.advance(1)
        assert sweep(run).counts == {status: 1}
        assert (run(keys), run(buried)) == ([], [("", "key/1")])
        assert enqueue(run, same(2, 1)) == [Enqueued(f"{1:032x}", "key/1", False)]

    def test_age_counts_from_the_end(self, run: Run, clock: FakeClock) -> None:
        """A dispatch that was sent late is kept as long as any other."""
        enqueue(run, dispatch(1))
        clock.advance_to(clock.wall() + 100 * DAY)
        (held,) = claim(run)
        run(settle.settle, [settlement(held)])
        clock.advance_to(clock.wall() + 6 * DAY)
        assert sweep(run).counts == {}
        clock.advance_to(clock.wall() + 2 * DAY)
        assert sweep(run).counts["delivered"] == 1

    def test_what_is_in_flight_stays(self, run: Run, clock: FakeClock) -> None:
        """However old it is."""
        enqueue(run, dispatch(1), dispatch(2))
        claim(run, limit=1)
        clock.advance_to(clock.wall() + 1_000 * DAY)
        assert sweep(run).counts == {}
        assert run(keys) == ["key/1", "key/2"]

    def test_a_dead_letter_that_holds_up_its_lane_stays(self, run: Run, clock: FakeClock) -> None:
        """It waits for a person; once it has left its lane it goes like any other, and the lane is not touched."""
        enqueue(run, dispatch(1, lane="l"), dispatch(2, lane="l"))
        run(lanes.promote, ["mail"], limit=10)
        run(set_status, "key/1", "dead_letter")
        clock.advance_to(clock.wall() + 31 * DAY)
        assert sweep(run).counts == {}
        run(lambda conn, *, now: lanes.leave(conn, [("l", f"{1:032x}")], now=now))
        assert sweep(run).counts["dead_letter"] == 1
        assert (run(keys), len(claim(run))) == (["key/2"], 1)

    def test_rows_that_stay_are_walked_over(self, run: Run, clock: FakeClock) -> None:
        """In steps of two rows, past many that stay, a pass finds all that may go, and no step deletes more."""
        enqueue(run, *(dispatch(n) for n in range(9)))
        for number in (1, 5, 6, 8):
            run(set_status, f"key/{number}", "delivered")
        clock.advance_to(clock.wall() + 8 * DAY)
        found = run(retention.look, Place(), retention=KEPT, limit=2)
        assert len(found.rows) <= 2
        assert sweep(run, limit=2).counts == {"delivered": 4}
        assert run(keys) == [f"key/{n}" for n in (0, 2, 3, 4, 7)]

    def test_history_outlives_its_dispatch(self, run: Run, clock: FakeClock) -> None:
        """It is kept as long as a tombstone; that of a dispatch that is still there for ever."""
        enqueue(run, dispatch(1), dispatch(2))
        run(set_status, "key/1", "delivered")
        clock.advance_to(clock.wall() + 8 * DAY)
        sweep(run)
        assert len(run(history)) == 2
        clock.advance_to(clock.wall() + 90 * DAY)
        assert sweep(run, limit=1).counts["history"] == 1
        assert run(history, f"{2:032x}") == run(history) != []

    def test_history_that_is_not_kept(self, run: Run, clock: FakeClock) -> None:
        """Where it is not kept it goes with the row."""
        enqueue(run, dispatch(1), dispatch(2))
        run(set_status, "key/1", "delivered")
        clock.advance_to(clock.wall() + 8 * DAY)
        sweep(run, Retention(history=False))
        assert len(run(history)) == 1

    def test_a_key_without_a_stream_is_free_again(self, run: Run, clock: FakeClock) -> None:
        """90 days after its row went its tombstone goes, and the key may be given again."""
        enqueue(run, dispatch(1))
        run(purge, 1)
        clock.advance_to(clock.wall() + 90 * DAY)
        assert "tombstones" not in sweep(run).counts
        clock.advance(1)
        assert sweep(run, limit=1).counts["tombstones"] == 1
        assert enqueue(run, same(2, 1)) == [Enqueued(f"{2:032x}", "key/1", True)]

    def test_a_stream_holds_its_keys(self, run: Run, clock: FakeClock) -> None:
        """The tombstones of a stream's dispatches and events stay until it was deleted for as long as they are kept."""
        enqueue(run, dispatch(1, stream=STREAM), dispatch(2, stream="load/2"))
        run(purge, 1, 2)
        self.die(run, event(1))
        clock.advance_to(clock.wall() + 1_000 * DAY)
        assert sweep(run).counts["events"] == 1
        run(delete_stream, STREAM)
        assert sweep(run, limit=1).counts == {"tombstones": 2}
        assert run(buried) == [("", "key/2")]
        assert sweep(run).counts == {}

    def test_a_deleted_streams_timers(self, run: Run, clock: FakeClock) -> None:
        """They go with it; a living stream's stay: the number of their generation tells their events apart."""
        for armed, left in (("ab", "fired"), ("c", "armed")):
            places = [(stream, key) for stream in (STREAM, "load/2") for key in armed]
            run(timers.apply, [TimerChange(verb="set", stream=s, key=key, fire_at=1) for s, key in places])
            if left == "fired":
                run(timers.fire, limit=10)
        clock.advance_to(clock.wall() + 1_000 * DAY)
        run(delete_stream, STREAM)
        assert sweep(run).counts["timers"] == 3
        assert [row.key for row in run(lambda conn: _TIMERS(conn).all())] == ["a", "b", "c"]

    def test_a_stream_with_much_to_go(self, run: Run, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
        """One deleted stream's tombstones go in several steps, none of which deletes more than its bound."""
        monkeypatch.setattr(retention, "CHUNK", 3)
        enqueue(run, *(dispatch(n, stream=STREAM) for n in range(10)))
        run(purge, *range(10))
        run(delete_stream, STREAM)
        clock.advance_to(clock.wall() + 91 * DAY)
        place, tally, steps = Place(stage=len(retention._STAGES) - 1), Tally(), []
        while place is not None:
            found = run(retention.look, place, retention=KEPT, limit=3)
            place, after = run(retention.end, found, tally, retention=KEPT)
            steps.append(sum(after.counts.values()) - sum(tally.counts.values()))
            tally = after
        assert steps == [3, 3, 3, 1]
        assert run(buried) == []

    def die(self, run: Run, *events: Any) -> None:
        """Let events end without a decision."""
        self.publish(run, *events)
        for held in self.claim(run, "dying"):
            commit(run, decided(held, consumed=[], dead=held.events, dead_reason="poison"))

    def test_dead_events_leave_tombstones(self, run: Run, clock: FakeClock) -> None:
        """30 days after its death a dead event goes; its id stays taken, as if it stood in the log."""
        clock.advance(60)
        self.publish(run, event(1), event(9, "load/2"))
        clock.advance_to(clock.wall() + 40 * DAY)
        for held in self.claim(run, "dying"):
            commit(run, decided(held, consumed=[], dead=held.events, dead_reason="poison"))
        self.publish(run, event(2), event(3))
        assert "events" not in sweep(run).counts, "it has waited for long, but has just died"
        clock.advance_to(clock.wall() + 31 * DAY)
        assert sweep(run).counts["events"] == 2
        assert run(waits) == [(STREAM, "e2", None), (STREAM, "e3", None)]
        assert run(buried) == [(STREAM, "e1"), ("load/2", "e9")]
        assert self.publish(run, event(1, data='{ "n": 1.0 }'), event(4))[0] == Published("e1", None, False)
        with pytest.raises(KeyConflict) as refused:
            self.publish(run, event(5), event(1, data='{"n":2}'))
        assert (refused.value.key, refused.value.about["stream"]) == ("e1", STREAM)
        assert self.publish(run, event(1, "load/3"))[0].created
        run(delete_stream, STREAM)
        with pytest.raises(StreamDeleted):
            self.publish(run, event(1))

    def test_many_dead_events_go_in_steps(self, run: Run, clock: FakeClock) -> None:
        """However many there are, a step reads the payloads of few of them."""
        self.die(run, *(event(n, f"load/{n}") for n in range(10)))
        clock.advance_to(clock.wall() + 31 * DAY)
        assert sweep(run, limit=3).counts["events"] == 10
        assert len(run(buried)) == 10

    def test_runs_that_have_ended(self, run: Run, clock: FakeClock) -> None:
        """They go 30 days after their end; one without an end belongs to a claim, and stays."""
        self.publish(run, event(1), event(1, "load/2"))
        first, second = self.claim(run)
        clock.advance_to(clock.wall() + 31 * DAY)
        run(runs.end, [EndedRun(run_id=first.run_id, end=RunEnd.FAILED)])
        assert "runs" not in sweep(run).counts
        clock.advance_to(clock.wall() + 31 * DAY)
        assert sweep(run, limit=1).counts["runs"] == 1
        assert run(lambda conn: _RUNS(conn).scalars()) == [second.run_id]

    def test_alerts_that_have_rung(self, run: Run, clock: FakeClock) -> None:
        """They go 30 days after they were raised; one that no sink was told of stays."""
        raised = [NewAlert(severity="error", code=str(n), subject="s", detail="") for n in range(3)]
        run(alerts.raise_alerts, raised)
        first, _, last = run(alerts.unrung)
        run(alerts.mark_rung, [first[0], last[0]])
        clock.advance_to(clock.wall() + 29 * DAY)
        assert sweep(run).counts == {}
        clock.advance_to(clock.wall() + 2 * DAY)
        assert sweep(run, limit=1).counts == {"alerts": 2}
        assert [row.code for row in run(alerts.list_)] == ["1"]

    def test_a_pass_is_audited_once(self, run: Run, clock: FakeClock) -> None:
        """One row says what the whole pass has deleted, and is written with the first rows that go."""
        enqueue(run, *(dispatch(n) for n in range(5)))
        sweep(run)
        assert run(audit.list_) == []
        for number, status in enumerate(("delivered", "delivered", "delivered", "expired", "pending")):
            run(set_status, f"key/{number}", status)
        clock.advance_to(clock.wall() + 31 * DAY)
        found = run(retention.look, Place(), retention=KEPT, limit=2)
        run(retention.end, found, Tally(), retention=KEPT)
        (begun,) = run(audit.list_)
        assert (begun.action, begun.actor, begun.after) == ("retention", "retention", '{"delivered":2}')
        sweep(run, limit=2)
        whole, _ = run(audit.list_)
        assert whole.after == '{"delivered":1,"expired":1}'

    def test_what_has_changed_since_the_look_stays(self, run: Run, clock: FakeClock) -> None:
        """What an operator has sent again, or what was deleted meanwhile, is left alone."""
        enqueue(run, dispatch(1), dispatch(2), dispatch(3))
        for number in (1, 2, 3):
            run(set_status, f"key/{number}", "dead_letter")
        clock.advance_to(clock.wall() + 31 * DAY)
        found = run(retention.look, Place(), retention=KEPT)
        run(set_status, "key/1", "pending")
        run(purge, 2)
        _, tally = run(retention.end, found, Tally(), retention=KEPT)
        assert tally.counts == {"dead_letter": 1}
        assert run(keys) == ["key/1"]
        assert run(retention.end, found, tally, retention=KEPT)[1] == tally

    def test_a_crash_in_the_middle(self, run: Run, clock: FakeClock) -> None:
        """A step that breaks at any of its places has deleted nothing, and the next pass deletes all of it."""
        enqueue(run, dispatch(1))
        run(set_status, "key/1", "delivered")
        clock.advance_to(clock.wall() + 8 * DAY)
        before = run(everything)
        for place in ("purging.deleted", "purging.buried", "retention.ended"):
            failpoints.arm(partial(_break, place))
            with pytest.raises(ZeroDivisionError):
                sweep(run)
            failpoints.arm(None)
            assert (run(everything), run(buried), run(audit.list_)) == (before, [], [])
        assert sweep(run).counts == {"delivered": 1}


def _break(place: str, reached: str) -> None:
    if reached == place:
        raise ZeroDivisionError


class RetentionRaces(Uses):
    """Passes beside others. They need a database of their own, not a way to run."""

    def test_what_others_have_locked_is_skipped(self, database: Database, clock: FakeClock) -> None:
        """A row that somebody works on stays until the next pass, and nobody waits."""
        if database.is_sqlite:
            pytest.skip("SQLite has one lock")
        enqueue(database.transact, dispatch(1), dispatch(2))
        for number in (1, 2):
            database.transact(lambda conn, *, now, n=number: set_status(conn, f"key/{n}", "delivered"))
        clock.advance_to(clock.wall() + 8 * DAY)
        with database.engine.connect() as conn:
            moves.lock(database.bind(conn), [f"{1:032x}"])
            assert sweep(database.transact).counts == {"delivered": 1}
            conn.rollback()
        assert database.read(keys) == ["key/1"]
        assert sweep(database.transact).counts == {"delivered": 1}

    def test_two_passes_at_once(self, database: Database, clock: FakeClock) -> None:
        """Two pumps over the same rows delete each once, and together count each once."""
        enqueue(database.transact, *(dispatch(n) for n in range(200)))
        (ended,) = {database.transact(lambda conn, *, now: _end_all(conn))}
        assert ended == 200
        clock.advance_to(clock.wall() + 8 * DAY)
        other = another(database, clock)
        one, two = in_threads(partial(sweep, database.transact, limit=20), partial(sweep, other.transact, limit=20))
        other.close()
        assert one.counts.get("delivered", 0) + two.counts.get("delivered", 0) == 200
        assert database.read(keys) == []
        assert len(database.read(buried)) == 200

    @pytest.mark.parametrize("commits", [True, False])
    def test_publishing_what_is_being_deleted(self, database: Database, clock: FakeClock, commits: bool) -> None:
        """Who publishes a dead event again while it is deleted is answered as the second one, and puts nothing back."""
        run = database.transact
        self.publish(run, event(1))
        (held,) = self.claim(run)
        commit(run, decided(held, consumed=[], dead=held.events, dead_reason="poison"))
        clock.advance_to(clock.wall() + 31 * DAY)
        found = database.read(retention.look, Place(stage=1), retention=KEPT, now=clock.wall())
        assert len(found.rows) == 1
        with database.engine.connect() as conn:
            retention.end(database.bind(conn), found, Tally(), retention=KEPT, now=clock.wall())
            waiting = Waiting(database, partial(run, inbox.publish, [event(1)]))
            waiting.blocked()
            conn.commit() if commits else conn.rollback()
        (answer,) = waiting.result()
        assert (answer.created, answer.position is None) == (False, commits)
        assert database.read(waits) == ([] if commits else [(STREAM, "e1", "poison")])


def _end_all(conn: Connection) -> int:
    return Statement("UPDATE {p}outbox SET status = 'delivered', due_at = NULL")(conn).rowcount
