"""What operators' verbs promise: guarded by what they expect, recorded and audited in the transaction that acts.

It cannot catch what a lane's order does to those that are retried or purged; the lanes' own suite does.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from sqlalchemy import Connection

from postroad.model.clock import SECOND, FakeClock
from postroad.model.dispatches import DispatchFilter
from postroad.store import audit, dispatch_claims, dispatch_filters, dispatch_why, operators, outbox, settle
from postroad.store.audit import Operator
from postroad.store.database import Database
from postroad.store.operators import Answered, Due, Many, Orders
from postroad.store.statements import Row, Statement
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

ANN = Orders(by=Operator(actor="ann", reason="fixed the route"))
FORCED = msgspec.structs.replace(ANN, force=True)
NOW = Due()
ID = f"{1:032x}"
NEW = f"{99:032x}"

_TOMBSTONES = Statement("SELECT key, id FROM {p}tombstones WHERE scope = '' ORDER BY key")
_NEW_KIND = Statement("UPDATE {p}outbox SET kind = 'other', origin = :origin WHERE id = :id")


def row(run: Run, id: str = ID) -> Row:
    """One row of the outbox."""
    (found,) = [each for each in run(outbox_rows) if each.id == id]
    return found


def dead(run: Run, result: str = "permanent", *, number: int = 1, **more: Any) -> Any:
    """A dispatch that ended so; its claim."""
    enqueue(run, dispatch(number, **more))
    (held,) = claim(run)
    run(settle.settle, [settlement(held, result, error="no route")])
    return held


def many(wanted: DispatchFilter, *, cautious: bool = True) -> Orders:
    """Orders for all that a filter chooses."""
    where = dispatch_filters.chosen(wanted)
    return msgspec.structs.replace(ANN, many=Many(filter="status=dead_letter", fitting=where, cautious=cautious))


def audited(run: Run) -> list[tuple[str, str, str, str]]:
    """(action, subject, actor, reason), oldest first."""
    return [(a.action, a.subject, a.actor, a.reason) for a in reversed(run(audit.list_))]


class RetryContract:
    """Once more, from the beginning."""

    def test_a_dead_letter_begins_anew(self, run: Run, clock: FakeClock) -> None:
        """A retry is a new epoch: attempt 0, due now, no error and no expiry, the same key; the history keeps all."""
        dead(run, stream="s/1", expires_at=clock.wall() + 9 * SECOND)
        clock.advance(60)
        assert run(operators.retry, [ID], orders=ANN, due=NOW) == Answered(done=[ID], refused={}, now=clock.wall())
        again = row(run)
        assert (again.status, again.attempt, again.epoch, again.key) == ("pending", 0, 1, "key/1")
        assert (again.due_at, again.expires_at, again.first_attempt_at) == (clock.wall(), None, None)
        assert (again.last_error, again.max_attempts, again.receipt, again.updated_at) == (
            None, None, None, clock.wall(),
        )  # fmt: skip
        assert run(history)[-2:] == [
            ("delivering", "dead_letter", "dispatch.dead_letter.permanent"),
            ("dead_letter", "pending", "dispatch.pending.operator_retry"),
        ]
        last = run(last_change)
        assert (last.source, last.actor, last.summary) == ("operator", "ann", "retried: fixed the route")
        assert msgspec.json.decode(last.metadata)["last_error"] == "no route"
        assert audited(run) == [("dispatch.retry", ID, "ann", "fixed the route")]
        (written,) = run(audit.list_, subject=ID)
        assert msgspec.json.decode(written.before)["last_error"] == "no route"

    def test_the_new_epoch_has_outcomes_of_its_own(self, run: Run) -> None:
        """The stream hears of the second end as of the first."""
        dead(run, stream="s/1")
        run(operators.retry, [ID], orders=ANN, due=NOW)
        (held,) = claim(run, token="t2")
        assert (held.attempt, held.epoch, held.possible_duplicate) == (1, 1, True)
        run(settle.settle, [settlement(held)])
        assert [event for _, event, _, _ in run(outcomes)] == ["out:key/1:dead_letter", "out:key/1:1:delivered"]

    def test_an_expired_one_gets_a_new_deadline(self, run: Run, clock: FakeClock) -> None:
        """What has expired may be given a deadline, counted from when it is due."""
        enqueue(run, dispatch(1, expires_at=clock.wall() + SECOND))
        clock.advance(2)
        run(settle.expire, limit=10)
        due = Due(expires=60 * SECOND, began=clock.wall() + 5 * SECOND)
        run(operators.retry, [ID], orders=ANN, due=due)
        again = row(run)
        assert (again.due_at, again.expires_at) == (clock.wall() + 5 * SECOND, clock.wall() + 65 * SECOND)

    def test_only_what_has_failed_is_retried(self, run: Run) -> None:
        """What waits, is under way or has arrived stays as it is and says so; an unknown id is no error."""
        enqueue(run, dispatch(1), dispatch(2), dispatch(3, due_at=1 << 60))
        held, _ = claim(run, limit=2)
        run(settle.settle, [settlement(held)])
        before = run(everything)
        answered = run(operators.retry, [f"{n:032x}" for n in range(5)], orders=FORCED, due=NOW)
        assert answered.done == []
        only = "only dead_letter and expired can be retried"
        assert list(answered.refused.values()) == [
            f"it is delivered; {only}", f"it is delivering; {only}", f"it is pending; {only}",
        ]  # fmt: skip
        assert run(everything) == before
        assert audited(run) == []

    def test_what_has_arrived_is_not_sent_again(self, run: Run) -> None:
        """A late success or a person's word that it arrived speaks against a retry, in every epoch; force does it."""
        run(settle.settle, [settlement(dead(run))])
        dead(run, "unknown", number=2)
        run(operators.resolve, f"{2:032x}", "sent", orders=ANN, due=NOW)
        ids = [ID, f"{2:032x}"]
        for _ in range(2):
            answered = run(operators.retry, ids, orders=ANN, due=NOW)
            assert set(answered.refused.values()) == {"its history says that it has arrived"}
            assert run(operators.retry, ids, orders=FORCED, due=NOW).done == ids
            run(settle.settle, [settlement(held, "permanent") for held in claim(run, token="t3")])

    def test_many_are_spread_over_time(self, run: Run, clock: FakeClock) -> None:
        """Due times follow one another at a rate, in the order of the ids, over chunks, and never lie in the past."""
        for n in range(1, 5):
            dead(run, number=n)
        ids = [f"{n:032x}" for n in range(1, 5)]
        began = clock.wall()
        due = Due(gap=SECOND)
        run(operators.retry, ids[:2], orders=ANN, due=due)
        clock.advance(2.5)
        run(operators.retry, ids[2:], orders=ANN, due=due.further(2, began=began))
        assert [each.due_at - began for each in run(outbox_rows)] == [0, SECOND, 2.5 * SECOND, 3 * SECOND]

    def test_many_are_one_row_of_the_audit(self, run: Run) -> None:
        """What a filter chose is audited once per transaction, with the number and the ids."""
        for n in range(1, 4):
            dead(run, number=n)
        ids = [f"{n:032x}" for n in range(1, 4)]
        run(operators.retry, ids, orders=many(DispatchFilter(status="dead_letter")), due=NOW)
        assert audited(run) == [("dispatch.retry", "status=dead_letter", "ann", "fixed the route")]
        (written,) = run(audit.list_)
        assert msgspec.json.decode(written.after) == {"force": False, "done": 3, "refused": 0, "ids": ids}

    def test_a_filter_must_still_fit(self, run: Run) -> None:
        """What changed since it was chosen is left alone and says so, and so is what only a person may judge."""
        dead(run)
        dead(run, "unknown", number=2)
        dead(run, number=3)
        run(_NEW_KIND, id=f"{3:032x}", origin="{}")
        ids = [f"{n:032x}" for n in (1, 2, 3)]
        answered = run(operators.retry, ids, orders=many(DispatchFilter(kind="mail")), due=NOW)
        assert answered.done == [ID]
        assert answered.refused == {
            ids[1]: "its reason is dispatch.dead_letter.unknown_outcome, which has to be named",
            ids[2]: "it changed meanwhile",
        }
        named = many(DispatchFilter(reason="unknown_outcome"), cautious=False)
        assert run(operators.retry, ids, orders=named, due=NOW).done == [ids[1]]

    def test_it_is_all_or_nothing(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        """A verb that fails at its last write leaves nothing behind."""
        dead(run, "unknown", stream="s/1")
        before = run(everything)

        def broken(*_: object, **__: object) -> None:
            raise RuntimeError("the audit")

        monkeypatch.setattr(audit, "record", broken)
        acts: list[Callable[[], Any]] = [
            lambda: run(operators.retry, [ID], orders=ANN, due=NOW),
            lambda: run(operators.resolve, ID, "sent", orders=ANN, due=NOW),
            lambda: run(operators.replay, ID, new_id=NEW, orders=ANN),
            lambda: run(operators.purge, [ID], orders=ANN, history=True),
        ]
        for act in acts:
            with pytest.raises(RuntimeError, match="the audit"):
                act()
            assert run(everything) == before


class ResolveContract:
    """A person says what became of it."""

    def test_it_has_arrived(self, run: Run) -> None:
        """Sent is a word in the history and to the stream, no change of the row; its reason is that word."""
        dead(run, "unknown", stream="s/1")
        before = row(run)
        assert run(operators.resolve, ID, "sent", orders=ANN, due=NOW).done == [ID]
        assert row(run) == before
        assert run(history)[-1] == ("dead_letter", "dead_letter", "dispatch.resolved.sent")
        assert [status for _, _, status, _ in run(outcomes)] == ["dead_letter", "delivered"]
        assert run(dispatch_why.why, ID) == (
            "Resolved as sent by ann at 2026-01-01T00:00:00+00:00; dead since 2026-01-01T00:00:00+00:00."
        )
        assert audited(run) == [("dispatch.resolve", ID, "ann", "fixed the route")]

    def test_nobody_minds(self, run: Run) -> None:
        """Discard is a word in the history; nobody is told, and nobody is alerted a second time."""
        dead(run, "unknown")
        alerted = run(alerts)
        assert run(operators.resolve, ID, "discard", orders=ANN, due=NOW).done == [ID]
        assert run(history)[-1] == ("dead_letter", "dead_letter", "dispatch.resolved.discarded")
        assert run(outcomes) == []
        assert run(alerts) == alerted
        assert run(operators.retry, [ID], orders=ANN, due=NOW).done == [ID]

    def test_it_is_sent_again(self, run: Run) -> None:
        """Resend is the edge back to pending, as a retry."""
        dead(run, "unknown")
        assert run(operators.resolve, ID, "resend", orders=ANN, due=NOW).done == [ID]
        assert (row(run).status, row(run).epoch) == ("pending", 1)
        assert run(history)[-1] == ("dead_letter", "pending", "dispatch.pending.operator_retry")

    def test_a_late_success_speaks_against_a_resend(self, run: Run) -> None:
        """What is known to have arrived is resent by force only."""
        run(settle.settle, [settlement(dead(run, "unknown"))])
        answered = run(operators.resolve, ID, "resend", orders=ANN, due=NOW)
        assert answered.refused == {ID: "its history says that it has arrived"}
        assert run(operators.resolve, ID, "resend", orders=FORCED, due=NOW).done == [ID]

    def test_only_what_may_have_arrived_is_resolved(self, run: Run) -> None:
        """Other dead letters, and what was resolved before, are refused with the reason."""
        dead(run)
        dead(run, "unknown", number=2)
        run(operators.resolve, f"{2:032x}", "discard", orders=ANN, due=NOW)
        for id, said in ((ID, "dispatch.dead_letter.permanent"), (f"{2:032x}", "resolved before")):
            (refused,) = run(operators.resolve, id, "sent", orders=ANN, due=NOW).refused.values()
            assert said in refused


class WithdrawContract:
    """No longer wanted."""

    def test_a_pending_one_ends(self, run: Run) -> None:
        """A withdrawal ends what is pending, with the operator in its history; its stream hears of it."""
        enqueue(run, dispatch(1, stream="s/1"))
        assert run(operators.withdraw, [ID], orders=ANN).done == [ID]
        assert (row(run).status, row(run).due_at) == ("expired", None)
        last = run(last_change)
        assert (last.reason_code, last.source, last.actor) == ("dispatch.expired.withdrawn", "operator", "ann")
        assert last.summary == "withdrawn: fixed the route"
        assert [status for _, _, status, _ in run(outcomes)] == ["expired"]
        assert run(alerts) == []
        assert audited(run) == [("dispatch.withdraw", ID, "ann", "fixed the route")]

    def test_too_late_says_so(self, run: Run) -> None:
        """What is under way or finished stays as it is."""
        enqueue(run, dispatch(1), dispatch(2))
        held, _ = claim(run)
        run(settle.settle, [settlement(held)])
        before = run(everything)
        refused = run(operators.withdraw, [ID, f"{2:032x}"], orders=FORCED).refused
        assert list(refused.values()) == ["too late: it is delivered", "too late: attempt 1 is under way"]
        assert run(everything) == before

    def test_a_claim_that_is_not_committed_yet_wins(self, database: Database, clock: FakeClock) -> None:
        """An operator who comes while a claim commits hears that an attempt is under way."""
        database.transact(outbox.insert, [dispatch(1)], source="test", actor="ann", in_turn=False)
        with database.engine.connect() as conn, conn.begin():
            dispatch_claims.claim(database.bind(conn), POLICY, names=["mail"], token="t", limit=1, now=clock.wall())
            late = Waiting(database, lambda: database.transact(operators.withdraw, [ID], orders=ANN))
            late.blocked()
        assert late.result().refused == {ID: "too late: attempt 1 is under way"}


class PurgeContract:
    """Gone, and its key still taken."""

    def test_a_finished_one_goes_and_its_key_stays(self, run: Run) -> None:
        """The row is deleted, its history stays, its key has a tombstone, and the audit says what it was."""
        dead(run)
        changes = run(history)
        assert run(operators.purge, [ID], orders=ANN).done == [ID]
        assert run(outbox_rows) == []
        assert run(history) == changes
        assert [tuple(each) for each in run(_TOMBSTONES).all()] == [("key/1", ID)]
        (written,) = run(audit.list_)
        assert (written.action, written.subject) == ("dispatch.purge", ID)
        assert msgspec.json.decode(written.before)["status"] == "dead_letter"
        assert msgspec.json.decode(written.after) == {"history": "kept", "force": False}

    def test_history_goes_if_asked(self, run: Run) -> None:
        """With `history` nothing but the tombstone and the audit are left."""
        dead(run)
        dead(run, number=2)
        run(operators.purge, [ID], orders=ANN, history=True)
        assert run(history, ID) == []
        assert len(run(history, f"{2:032x}")) == 3

    def test_what_is_in_flight_goes_by_force_only(self, run: Run) -> None:
        """Unfinished ones are refused; by force they end first, and a claimant finds nothing to settle."""
        enqueue(run, dispatch(1, stream="s/1"), dispatch(2, stream="s/1"))
        (held,) = claim(run, limit=1)
        ids = [ID, f"{2:032x}"]
        assert list(run(operators.purge, ids, orders=ANN).refused.values()) == [
            "it is delivering, and not finished", "it is pending, and not finished",
        ]  # fmt: skip
        assert run(operators.purge, ids, orders=FORCED).done == ids
        assert run(outbox_rows) == []
        assert [status for _, _, status, _ in run(outcomes)] == ["expired", "expired"]
        assert run(settle.settle, [settlement(held)])[0].status == ""


class ReplayContract:
    """The same words in a new message."""

    def test_a_new_dispatch_names_the_old(self, run: Run, clock: FakeClock) -> None:
        """A replay has the old one's content and stream, a key of its own, and the old one's id as origin."""
        dead(run, stream="s/1", headers='{"a":"b"}', origin='{"by":"x"}', max_attempts=7)
        answered = run(operators.replay, ID, new_id=NEW, expires=9 * SECOND, orders=ANN)
        assert (answered.done, answered.made) == ([ID], NEW)
        old, new = row(run), row(run, NEW)
        kept = ("stream", "kind", "version", "destination", "body", "headers", "policy", "content_hash", "lane")
        assert [getattr(new, name) for name in kept] == [getattr(old, name) for name in kept]
        assert (new.key, new.status, new.attempt, new.max_attempts) == (NEW, "pending", 0, None)
        assert (new.due_at, new.expires_at) == (clock.wall(), clock.wall() + 9 * SECOND)
        assert msgspec.json.decode(new.origin) == {"by": "x", "replay_of": ID}
        assert (old.status, run(last_change).source, run(last_change).actor) == ("dead_letter", "operator", "ann")
        (written,) = run(audit.list_)
        assert (written.action, written.subject) == ("dispatch.replay", ID)
        assert msgspec.json.decode(written.after)["made"] == NEW

    def test_a_key_that_is_taken_is_refused(self, run: Run) -> None:
        """A given key that another dispatch holds, whatever it says, is refused, and nothing is written."""
        dead(run)
        enqueue(run, dispatch(2, body="2", due_at=1 << 60))
        for key in ("key/1", "key/2"):
            before = run(everything)
            (said,) = run(operators.replay, ID, new_id=NEW, key=key, orders=ANN).refused.values()
            assert said.startswith(f"the key {key} is taken")
            assert run(everything) == before
        assert audited(run) == []
        assert run(operators.replay, ID, new_id=NEW, key="key/3", orders=ANN).done == [ID]
        assert row(run, NEW).key == "key/3"

    def test_what_is_still_to_be_sent_is_not_replayed(self, run: Run) -> None:
        """An unfinished one will be sent anyway."""
        enqueue(run, dispatch(1))
        assert run(operators.replay, ID, new_id=NEW, orders=ANN).refused == {
            ID: "it is pending: it is still to be sent"
        }


class AuditContract:
    """Who did what."""

    def test_the_newest_come_first(self, run: Run) -> None:
        """The audit is read newest first, bounded, for one subject if asked."""

        def write(conn: Connection, *, now: int) -> None:
            for n in range(3):
                audit.record(conn, "a", f"s{n % 2}", by=ANN.by, before={"n": n}, after={}, now=now + n)

        run(write)
        assert [msgspec.json.decode(each.before)["n"] for each in run(audit.list_)] == [2, 1, 0]
        assert [each.at for each in run(audit.list_, subject="s0", limit=1)] == [run(audit.list_)[0].at]
