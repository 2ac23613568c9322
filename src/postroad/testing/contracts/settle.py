"""What settling promises: one guarded transaction per group, and a stale claimant that changes no status.

It cannot catch what a dispatcher does between its send and its settle; the engine's and the process tests do.
"""

from typing import Any

import msgspec
import pytest
from sqlalchemy import Connection

from postroad.model import failpoints
from postroad.model.clock import SECOND, FakeClock
from postroad.model.errors import StaleClaim
from postroad.model.lifecycle import Reason, Status
from postroad.model.retry import Retry
from postroad.model.rows import Settled
from postroad.store import dispatch_claims, moves, outbox, settle
from postroad.store.database import Database
from postroad.store.statements import Statement
from postroad.testing.contracts.dispatches import (
    POLICY,
    Run,
    Waiting,
    alerts,
    claim,
    dispatch,
    enqueue,
    everything,
    history,
    last_change,
    outbox_rows,
    outcomes,
    settlement,
)

ALERT = msgspec.structs.replace(POLICY, on_failure="alert")

_DELETE_STREAM = Statement("INSERT INTO {p}streams (id, type, version, deleted_at) VALUES ('s/1', 's', 0, 1)")
_PURGE = Statement("DELETE FROM {p}outbox")
_OTHER_OUTCOME = Statement("UPDATE {p}inbox SET data = :data")
_NEW_EPOCH = Statement(
    "UPDATE {p}outbox SET status = 'pending', epoch = epoch + 1, attempt = 0, due_at = 0, claim_token = NULL"
)


class SettleContract:
    """An attempt's result, under the claim's token."""

    def test_a_success_ends_it(self, run: Run, clock: FakeClock) -> None:
        """A success is delivered with its receipt; an earlier error is cleared and stays in the history."""
        enqueue(run, dispatch(1, stream="s/1"))
        run(settle.settle, [settlement(claim(run)[0], "failed", error="busy")])
        assert run(outbox_rows)[0].last_error == "busy"
        assert run(last_change).summary == "attempt 1 of 3 failed: busy"
        clock.advance(60)
        held = claim(run, token="t2")[0]
        assert run(settle.settle, [settlement(held, receipt='"ref"')]) == [
            Settled(held.id, "delivered", "dispatch.delivered.transport_ok", False)
        ]
        row = run(outbox_rows)[0]
        assert (row.status, row.due_at, row.claim_token, row.last_error) == ("delivered", None, None, None)
        assert (row.receipt, row.attempt, row.updated_at) == ('"ref"', 2, clock.wall())
        assert run(history)[-1] == ("delivering", "delivered", "dispatch.delivered.transport_ok")
        assert run(outcomes) == [("s/1", "out:key/1:delivered", "delivered", None)]
        assert run(alerts) == []

    @pytest.mark.parametrize(("floor", "delay"), [(0, 60 * SECOND), (90 * SECOND, 90 * SECOND)])
    def test_a_failure_is_tried_again(self, run: Run, clock: FakeClock, floor: int, delay: int) -> None:
        """A failure is due again after its back-off, never before a Retry-After."""
        enqueue(run, dispatch(1, stream="s/1"))
        held = claim(run)[0]
        settled = run(settle.settle, [settlement(held, "failed", error="busy", floor=floor)])
        assert settled == [Settled(held.id, "pending", "dispatch.pending.retry_backoff", False)]
        row = run(outbox_rows)[0]
        assert (row.status, row.due_at, row.attempt) == ("pending", clock.wall() + delay, 1)
        assert run(outcomes) == run(alerts) == []

    @pytest.mark.parametrize(
        ("result", "reason"),
        [("permanent", Reason.PERMANENT), ("unknown", Reason.UNKNOWN_OUTCOME), ("failed", Reason.MAX_ATTEMPTS)],
    )
    def test_a_death_is_told(self, run: Run, result: str, reason: Reason) -> None:
        """A dispatch that dies tells its stream; without a stream, or on demand, operators are alerted."""
        enqueue(run, *(dispatch(n, stream="s/1" if n else "", max_attempts=1) for n in range(3)))
        none, event, alert = claim(run)
        given = [
            settlement(none, result, error="no"),
            settlement(event, result, error="no"),
            settlement(alert, result, error="no", policy=ALERT),
        ]
        assert [(s.status, s.reason) for s in run(settle.settle, given)] == [("dead_letter", reason)] * 3
        assert run(alerts) == [("dispatch.dead_letter", "key/0"), ("dispatch.dead_letter", "key/2")]
        assert run(outcomes) == [
            ("s/1", "out:key/1:dead_letter", "dead_letter", "no"),
            ("s/1", "out:key/2:dead_letter", "dead_letter", "no"),
        ]
        assert [row.last_error for row in run(outbox_rows)] == ["no"] * 3

    def test_the_budget_ends_retries(self, run: Run, clock: FakeClock) -> None:
        """A retry that would start after the budget is not waited for; the first one always is."""
        retry = Retry(attempts=8, budget=50, first=60, jitter=False)
        policy = msgspec.structs.replace(POLICY, retry=retry)
        enqueue(run, dispatch(1))
        first = run(settle.settle, [settlement(claim(run, policy=policy)[0], "failed", policy=policy)])
        assert first[0].status == "pending"
        clock.advance(60)
        held = claim(run, policy=policy, token="t2")[0]
        assert run(settle.settle, [settlement(held, "failed", policy=policy)])[0].reason == Reason.BUDGET

    def test_an_attempt_that_we_cut_short_costs_none(self, run: Run, clock: FakeClock) -> None:
        """An attempt that our own shutdown ended counts, one more is allowed, and it is due again at once."""
        enqueue(run, dispatch(1))
        run(settle.settle, [settlement(claim(run)[0], "failed", error="busy")])
        clock.advance(60)
        held = claim(run, token="t2")[0]
        settled = run(settle.settle, [settlement(held, "cut_short", error="shutdown")])
        assert settled == [Settled(held.id, "pending", "dispatch.pending.released", False)]
        row = run(outbox_rows)[0]
        assert (row.attempt, row.max_attempts) == (2, held.max_attempts + 1)
        assert (row.due_at, row.last_error) == (clock.wall(), "shutdown")

    def test_answers_keep_the_order(self, run: Run) -> None:
        """Settlements are answered in their own order, whatever the order of the locks."""
        enqueue(run, *(dispatch(n) for n in range(5)))
        held = claim(run)
        order = [held[3], held[0], held[4]]
        settled = run(settle.settle, [settlement(each) for each in order])
        assert [each.id for each in settled] == [each.id for each in order]
        assert run(settle.settle, []) == []

    @pytest.mark.parametrize("error", ["a\0b", "x" * 5_000_000, "\ud800", ""])
    def test_any_error_text_can_be_stored(self, run: Run, error: str) -> None:
        """NUL, lone surrogates, megabytes and nothing at all are stored, bounded."""
        enqueue(run, dispatch(1, stream="s/1"))
        held = claim(run)[0]
        run(settle.settle, [settlement(held, "permanent", error=error, receipt="r\0")])
        row = run(outbox_rows)[0]
        assert row.status == "dead_letter"
        assert len(row.last_error) <= 2_000
        assert "\0" not in row.last_error + row.receipt

    def test_a_lease_that_is_over_still_settles(self, run: Run, clock: FakeClock) -> None:
        """As long as nobody else has claimed it, a late settle under the current token is accepted."""
        enqueue(run, dispatch(1))
        held = claim(run)[0]
        clock.advance(3_600)
        assert not run(settle.settle, [settlement(held)])[0].stale

    @pytest.mark.parametrize("point", ["settle.locked", "moves.written", "moves.told", "moves.recorded"])
    def test_a_settle_is_one_transaction(self, run: Run, point: str) -> None:
        """Whatever statement it dies at, nothing of a settle is there: it is delivering, or all of it is done."""
        enqueue(run, dispatch(1, stream="s/1"))
        held = claim(run)[0]
        before = run(everything)

        def die(name: str) -> None:
            if name == point:
                raise RuntimeError(name)

        failpoints.arm(die)
        try:
            with pytest.raises(RuntimeError):
                run(settle.settle, [settlement(held, "permanent", error="no", policy=ALERT)])
        finally:
            failpoints.arm(None)
        assert run(everything) == before
        run(settle.settle, [settlement(held, "permanent", error="no", policy=ALERT)])
        after = run(everything)
        assert all(len(table) > len(old) for table, old in zip(after[1:], before[1:], strict=True))

    def test_a_move_of_something_else_is_refused(self, run: Run) -> None:
        """A row that is not what its move says is an error, not a silent change."""
        enqueue(run, dispatch(1))
        claim(run)

        def move_wrongly(conn: Connection, *, now: int) -> None:
            row = moves.lock(conn, [f"{1:032x}"])[f"{1:032x}"]
            other = msgspec.structs.replace(row, claim_token="other")
            moves.apply(conn, [moves.move(other, Status.DELIVERED, Reason.TRANSPORT_OK, "")], now=now)

        with pytest.raises(StaleClaim):
            run(move_wrongly)
        assert run(outbox_rows)[0].status == "delivering"

    def test_groups_do_not_lock_in_a_circle(self, database: Database, clock: FakeClock) -> None:
        """Two groups of the same dispatches in opposite orders wait for one another, and both are answered."""
        given = [dispatch(n) for n in range(2)]
        database.transact(outbox.insert, given, source="test", actor="ann", in_turn=False)
        won = database.transact(dispatch_claims.claim, POLICY, names=["mail"], token="t", limit=2)
        group = [settlement(held) for held in won.claims]
        with database.engine.connect() as conn, conn.begin():  # on SQLite that is the lock
            settle.lock(database.bind(conn), group)
            second = Waiting(
                database, lambda: database.transact(settle.settle, group[::-1], lock=lambda c: settle.lock(c, group))
            )
            second.blocked()
            first = settle.settle(conn, group, now=clock.wall())
        assert [each.stale for each in first] == [False, False]
        assert [each.stale for each in second.result()] == [True, True]


class StaleContract:
    """A claimant whose claim is over changes no status, and what it did is not forgotten."""

    def two_claims(self, run: Run, clock: FakeClock) -> Any:
        enqueue(run, dispatch(1, stream="s/1"))
        first = claim(run)[0]
        clock.advance(15)
        return first, claim(run, token="t2")[0]

    def test_a_late_failure_is_history_only(self, run: Run, clock: FakeClock) -> None:
        """A failure under an old token changes no row, publishes nothing and is recorded."""
        first, second = self.two_claims(run, clock)
        before = run(outbox_rows)
        settled = run(settle.settle, [settlement(first, "permanent", error="no")])
        assert settled == [Settled(first.id, "delivering", "dispatch.stale.transport_failed", True)]
        assert run(outbox_rows) == before
        assert run(history)[-1] == ("delivering", "delivering", "dispatch.stale.transport_failed")
        assert run(last_change).summary == "attempt 1 failed for good after its claim was over: no"
        assert msgspec.json.decode(run(last_change).metadata) == {"attempt": 1, "epoch": 0}
        assert run(outcomes) == run(alerts) == []
        assert not run(settle.settle, [settlement(second)])[0].stale

    def test_a_late_success_is_told(self, run: Run, clock: FakeClock) -> None:
        """A success under an old token changes no status, but its outcome is published, once."""
        first, second = self.two_claims(run, clock)
        assert run(settle.settle, [settlement(first)])[0].stale
        assert run(outbox_rows)[0].status == "delivering"
        assert run(outcomes) == [("s/1", "out:key/1:delivered", "delivered", None)]
        run(settle.settle, [settlement(second, receipt='"other"', policy=ALERT)])
        assert run(outbox_rows)[0].status == "delivered"
        assert len(run(outcomes)) == 1

    def test_failed_and_delivered_may_both_be_known(self, run: Run, clock: FakeClock) -> None:
        """A late success beside a death leaves the death, its history and both outcomes."""
        first, second = self.two_claims(run, clock)
        run(settle.settle, [settlement(second, "permanent", error="no"), settlement(first)])
        row = run(outbox_rows)[0]
        assert (row.status, row.last_error) == ("dead_letter", "no")
        assert [event for _, event, _, _ in run(outcomes)] == ["out:key/1:dead_letter", "out:key/1:delivered"]
        assert run(history)[-1] == ("dead_letter", "dead_letter", "dispatch.stale.transport_ok")

    def test_an_outcome_that_exists_stays(self, run: Run, clock: FakeClock) -> None:
        """An outcome with the same id and other content is no conflict: the first one stays."""
        first, second = self.two_claims(run, clock)
        run(settle.settle, [settlement(first)])
        other = '{"dispatch":"d","key":"k","kind":"k","status":"other","reason":"r","error":null}'
        run(lambda conn: _OTHER_OUTCOME(conn, data=other))
        run(settle.settle, [settlement(second)])
        assert [status for _, _, status, _ in run(outcomes)] == ["other"]

    def test_twice_in_one_call(self, run: Run) -> None:
        """The second settlement of a claim in one call comes too late."""
        enqueue(run, dispatch(1, stream="s/1"))
        held = claim(run)[0]
        settled = run(settle.settle, [settlement(held, "failed", error="busy"), settlement(held)])
        assert [(each.status, each.stale) for each in settled] == [("pending", False), ("pending", True)]
        assert run(outbox_rows)[0].last_error == "busy"
        assert [status for _, _, status, _ in run(outcomes)] == ["delivered"]

    def test_who_holds_it_still_is_known(self, run: Run, clock: FakeClock) -> None:
        """After a lost answer of COMMIT it can be told which settlements have not happened."""
        first, second = self.two_claims(run, clock)
        both = [settlement(first, "ok"), settlement(second, "ok")]
        assert run(lambda conn, now: settle.unsettled(conn, both[:1])) == set()
        assert run(lambda conn, now: settle.unsettled(conn, both[1:])) == {second.id}
        run(settle.settle, both[1:])
        assert run(lambda conn, now: settle.unsettled(conn, both[1:])) == set()

    def test_what_was_heard_of_late_is_known(self, run: Run, clock: FakeClock) -> None:
        """After a lost answer the history tells which late results have not been settled."""
        first, second = self.two_claims(run, clock)
        late = [settlement(first, epoch=first.epoch)]
        assert run(lambda conn, now: settle.unheard(conn, late)) == {first.id}
        run(settle.settle, late)
        assert run(lambda conn, now: settle.unheard(conn, late)) == set()
        others = [settlement(second, epoch=first.epoch), settlement(first, epoch=first.epoch + 1)]
        assert [run(lambda conn, now, one=one: settle.unheard(conn, [one])) for one in others] == [{first.id}] * 2

    def test_a_late_success_belongs_to_its_epoch(self, run: Run, clock: FakeClock) -> None:
        """A success that was claimed before an operator's retry is told under the epoch of its claim."""
        enqueue(run, dispatch(1, stream="s/1"))
        held = claim(run)[0]
        run(_NEW_EPOCH)
        run(settle.settle, [settlement(held, epoch=held.epoch)])
        again = claim(run, token="t2")[0]
        assert (again.epoch, again.attempt, again.possible_duplicate) == (1, 1, True)
        run(settle.settle, [settlement(again, epoch=again.epoch)])
        assert [event for _, event, _, _ in run(outcomes)] == ["out:key/1:delivered", "out:key/1:1:delivered"]

    def test_what_was_purged_is_gone(self, run: Run) -> None:
        """A settlement of a dispatch that is gone is stale and writes nothing."""
        enqueue(run, dispatch(1))
        held = claim(run)[0]
        run(_PURGE)
        before = run(everything)
        assert run(settle.settle, [settlement(held)]) == [Settled(held.id, "", Reason.STALE_OK, True)]
        assert run(everything) == before

    def test_a_deleted_stream_drops_the_outcome(self, run: Run) -> None:
        """The outcome for a stream that was deleted is dropped, and the history says so."""
        enqueue(run, dispatch(1, stream="s/1"), dispatch(2, stream="s/2"))
        held = claim(run)
        run(_DELETE_STREAM)
        run(settle.settle, [settlement(held[1]), settlement(held[0])])
        assert [row.status for row in run(outbox_rows)] == ["delivered"] * 2
        assert [stream for stream, _, _, _ in run(outcomes)] == ["s/2"]
        assert msgspec.json.decode(run(last_change).metadata)["outcome"] == "dropped: the stream was deleted"


class ExpireContract:
    """The pump's part: deadlines of every kind, whoever sends it."""

    def test_deadlines_of_every_kind_are_kept(self, run: Run, clock: FakeClock) -> None:
        """What is overdue expires, oldest first, up to the limit, told by the row's own policy."""
        now = clock.wall()
        enqueue(
            run,
            dispatch(1, expires_at=now - 1, stream="s/1", kind="sms"),
            dispatch(2, expires_at=now - 2, stream="s/1", on_failure="alert"),
            dispatch(3, expires_at=now, due_at=now + 99),
            dispatch(4, expires_at=now + 1),
            dispatch(5),
        )
        assert run(settle.expire, limit=1) == 1
        assert run(outcomes) == [("s/1", "out:key/2:expired", "expired", None)]
        assert run(settle.expire, limit=9) == 2
        assert run(settle.expire, limit=9) == 0
        assert [row.status for row in run(outbox_rows)] == ["expired"] * 3 + ["pending"] * 2
        assert run(alerts) == [("dispatch.expired", "key/2"), ("dispatch.expired", "key/3")]
        assert run(history)[-1] == ("pending", "expired", "dispatch.expired.deadline")

    def test_what_is_under_way_keeps_its_lease(self, run: Run, clock: FakeClock) -> None:
        """A dispatch that is being sent expires only when its lease is over."""
        enqueue(run, dispatch(1, expires_at=clock.wall() + SECOND))
        claim(run)
        clock.advance(14)
        assert run(settle.expire, limit=9) == 0
        clock.advance(1)
        assert run(settle.expire, limit=9) == 1
        assert run(outbox_rows)[0].claim_token is None
