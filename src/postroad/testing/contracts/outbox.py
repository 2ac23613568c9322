"""What the outbox promises: one dispatch for each key, claims for what can be sent, withdrawal while it is ours.

It cannot catch what only other isolation levels or a broken database show, nor anything about lanes and acks.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError

from postroad.model import failpoints
from postroad.model.clock import FakeClock
from postroad.model.errors import DuplicateKey, IllegalEdge, KeyConflict
from postroad.model.lifecycle import EDGES, Reason, Status
from postroad.model.rows import Enqueued, NewTransition
from postroad.store import dispatch_claims, outbox, settle, transitions
from postroad.store.database import Database
from postroad.store.statements import Statement
from postroad.testing.contracts.dispatches import (
    POLICY,
    Run,
    Waiting,
    alerts,
    another,
    claim,
    dispatch,
    enqueue,
    everything,
    history,
    in_threads,
    last_change,
    outbox_rows,
    outcomes,
    settlement,
)

_FORGET = Statement("DELETE FROM {p}outbox WHERE key = :key")
_BREAK_CLAIM = Statement("UPDATE {p}outbox SET claim_token = :token, due_at = :due_at WHERE key = 'key/1'")
_BREAK_STATUS = Statement("UPDATE {p}outbox SET status = :status WHERE key = 'key/1'")


class EnqueueContract:
    """One dispatch for each key, whoever asks, however often."""

    def test_each_dispatch_is_written_with_its_history(self, run: Run, clock: FakeClock) -> None:
        """A dispatch begins pending, with one row of history; an empty key becomes its id; answers keep the order."""
        answers = enqueue(run, dispatch(2, max_attempts=5, expires_at=9), dispatch(1, key="", stream="s/1"))
        assert answers == [
            Enqueued(f"{2:032x}", "key/2", True),
            Enqueued(f"{1:032x}", f"{1:032x}", True),
        ]
        first, second = run(outbox_rows)
        assert (first.key, first.stream, first.status, first.attempt) == (f"{1:032x}", "s/1", "pending", 0)
        assert (second.due_at, second.max_attempts, second.expires_at, second.epoch) == (2, 5, 9, 0)
        assert second.created_at == second.updated_at == clock.wall()
        assert run(history) == [(None, "pending", "dispatch.pending.enqueued")] * 2
        change = run(last_change)
        assert (change.summary, change.source, change.actor) == ("enqueued kind=mail", "test", "ann")
        assert change.at == clock.wall()

    def test_nothing_is_nothing(self, run: Run) -> None:
        """No dispatches and no keys are fine, and write nothing."""
        assert enqueue(run) == []
        assert run(outbox.withdraw, [], actor="ann") == []

    def test_the_same_content_is_accepted_once(self, run: Run) -> None:
        """The same key with the same content answers with the first one's id and writes nothing."""
        enqueue(run, dispatch(1))
        before = run(everything)
        assert enqueue(run, dispatch(7, key="key/1")) == [Enqueued(f"{1:032x}", "key/1", False)]
        assert run(everything) == before

    def test_a_key_stays_taken_in_every_status(self, run: Run) -> None:
        """A key is taken as long as its row is there: delivering, delivered, dead or expired."""
        enqueue(run, *(dispatch(n) for n in range(5)))
        run(outbox.withdraw, ["key/0"], actor="ann")
        sent, dead, held = claim(run, limit=3)
        run(settle.settle, [settlement(sent), settlement(dead, "permanent", error="no such address")])
        assert [row.status for row in run(outbox_rows)] == [
            "expired",
            "delivered",
            "dead_letter",
            "delivering",
            "pending",
        ]
        assert held.key == "key/3"
        again = enqueue(run, *(dispatch(n + 10, key=f"key/{n}") for n in range(5)))
        assert again == [Enqueued(f"{n:032x}", f"key/{n}", False) for n in range(5)]

    def test_other_content_is_refused(self, run: Run) -> None:
        """A key that is taken by other content is an error that names it; `keep` answers with the first one."""
        enqueue(run, dispatch(1))
        other = dispatch(2, '{"n":2}', key="key/1")
        with pytest.raises(KeyConflict) as refused:
            enqueue(run, other)
        assert refused.value.key == "key/1"
        assert enqueue(run, msgspec.structs.replace(other, keep=True)) == [Enqueued(f"{1:032x}", "key/1", False)]

    @pytest.mark.parametrize(("in_turn", "error"), [(True, DuplicateKey), (False, KeyConflict)])
    def test_a_refusal_leaves_nothing(self, run: Run, in_turn: bool, error: type[Exception]) -> None:
        """A refused call has written nothing, even if its caller goes on and commits."""

        def go_on(conn: Connection, *, now: int) -> None:
            given = [dispatch(2), dispatch(3, '{"n":3}', key="key/1"), dispatch(4)]
            with pytest.raises(error):
                outbox.insert(conn, given, source="test", actor="ann", in_turn=in_turn, now=now)

        enqueue(run, dispatch(1))
        before = run(everything)
        run(go_on)
        assert run(everything) == before

    def test_in_a_turn_a_taken_key_is_an_error(self, run: Run) -> None:
        """In a turn a key that exists is a decision bug, even with the same content; the error names all of them."""
        enqueue(run, dispatch(1), dispatch(2))
        given = [dispatch(11, key="key/1"), dispatch(12, key="key/2"), dispatch(3)]
        with pytest.raises(DuplicateKey) as refused:
            run(outbox.insert, given, source="turn", actor="ann", in_turn=True)
        assert refused.value.keys == ("key/1", "key/2")

    @pytest.mark.parametrize(("in_turn", "error"), [(True, DuplicateKey), (False, KeyConflict)])
    def test_a_key_twice_in_one_call(self, run: Run, in_turn: bool, error: type[Exception]) -> None:
        """Twice the same in one call is one dispatch; other content is refused."""
        call = partial(run, outbox.insert, source="test", actor="ann", in_turn=in_turn)
        with pytest.raises(error):
            call([dispatch(1), dispatch(2, '{"n":2}', key="key/1")])
        assert call([dispatch(1), dispatch(2, key="key/1")]) == [
            Enqueued(f"{1:032x}", "key/1", True),
            Enqueued(f"{1:032x}", "key/1", False),
        ]
        assert len(run(outbox_rows)) == len(run(history)) == 1

    def test_two_turns_in_one_call_share_no_key(self, run: Run) -> None:
        """What two streams decide is decided twice, even with the same content."""
        other = msgspec.structs.replace(dispatch(2, key="key/1"), stream="load/other")
        with pytest.raises(DuplicateKey):
            run(outbox.insert, [dispatch(1), other], source="turn", actor="ann", in_turn=True)
        assert run(outbox_rows) == []

    def test_twenty_threads_race_for_a_key(self, database: Database, clock: FakeClock) -> None:
        """Of twenty transactions with one key one writes it; all get the one id."""
        others = [another(database, clock) for _ in range(4)]

        def ask(number: int) -> Any:
            return others[number % 4].transact(
                outbox.insert,
                [dispatch(number, key="key")],
                source="test",
                actor="ann",
                in_turn=False,
            )

        answers = in_threads(*(partial(ask, n) for n in range(20)))
        assert len({answer[0].id for answer in answers}) == 1
        assert sum(answer[0].created for answer in answers) == 1
        assert len(database.transact(count_rows)) == 1
        for other in others:
            other.close()

    @pytest.mark.parametrize("commits", [True, False])
    def test_the_second_of_a_race_waits(self, database: Database, commits: bool) -> None:
        """Whoever waits for a transaction with its key gets that one's id, or writes a row when it rolls back."""

        def ask(number: int) -> Any:
            given = [dispatch(number, key="key")]
            return database.transact(outbox.insert, given, source="test", actor="ann", in_turn=False)

        with database.engine.connect() as conn:
            outbox.insert(database.bind(conn), [dispatch(1, key="key")], source="t", actor="a", in_turn=False, now=1)
            second = Waiting(database, lambda: ask(2))
            second.blocked()
            conn.commit() if commits else conn.rollback()
        holder = f"{1 if commits else 2:032x}"
        assert second.result() == [Enqueued(holder, "key", not commits)]
        assert ask(3) == [Enqueued(holder, "key", False)]

    @pytest.fixture
    def taken_and_freed(self, database: Database) -> Iterator[list[str]]:
        """A key that somebody takes before each insert and frees after it, as often as the list is long."""
        times: list[str] = []
        with database.engine.connect() as conn:
            bound = database.bind(conn)

            def reached(name: str) -> None:
                if name == "outbox.insert" and times:
                    outbox._INSERT(bound, new=msgspec.json.encode([dispatch(1)]).decode(), now=1)
                elif name == "outbox.inserted" and times:
                    _FORGET(bound, key=times.pop())

            self.connection = bound
            failpoints.arm(reached)
            yield times
            failpoints.arm(None)
            conn.rollback()

    def insert_in_between(self) -> Any:
        given = [dispatch(2, key="key/1")]
        return outbox.insert(self.connection, given, source="test", actor="ann", in_turn=False, now=1)

    def test_a_key_that_was_freed_is_tried_again(self, taken_and_freed: list[str]) -> None:
        """If the holder of a key is purged before it could be read, the insert is tried again."""
        taken_and_freed.extend(["key/1"] * (outbox.INSERT_TRIES - 1))
        assert self.insert_in_between() == [Enqueued(f"{2:032x}", "key/1", True)]

    def test_the_tries_are_bounded(self, taken_and_freed: list[str]) -> None:
        """A key that is taken and freed again and again is refused in the end."""
        taken_and_freed.extend(["key/1"] * outbox.INSERT_TRIES)
        with pytest.raises(KeyConflict):
            self.insert_in_between()


def count_rows(conn: Connection, *, now: int) -> Any:
    """The outbox, for `transact`."""
    return outbox_rows(conn)


class WithdrawContract:
    """A dispatch is ours to end until somebody has claimed it."""

    def test_what_is_pending_is_ended(self, run: Run) -> None:
        """A pending dispatch expires as withdrawn, its stream gets the outcome, nobody is alerted."""
        enqueue(run, dispatch(1, stream="s/1"), dispatch(2), dispatch(3))
        assert sorted(run(outbox.withdraw, ["key/2", "key/1", "no such"], actor="bob")) == ["key/1", "key/2"]
        first, _, third = run(outbox_rows)
        assert (first.status, first.due_at, third.status) == ("expired", None, "pending")
        assert run(history)[-1] == ("pending", "expired", "dispatch.expired.withdrawn")
        assert run(last_change).actor == "bob"
        assert run(outcomes) == [("s/1", "out:key/1:expired", "expired", None)]
        assert run(alerts) == []

    def test_what_is_claimed_or_finished_stays(self, run: Run) -> None:
        """A dispatch that is under way or ended is left as it is."""
        enqueue(run, dispatch(1), dispatch(2))
        sent, _ = claim(run)
        run(settle.settle, [settlement(sent)])
        before = run(everything)
        assert run(outbox.withdraw, ["key/1", "key/2"], actor="bob") == []
        assert run(everything) == before

    def test_withdrawal_and_claim_race(self, database: Database, clock: FakeClock) -> None:
        """Of a withdrawal and a claim at the same instant exactly one succeeds, 200 times."""
        other = another(database, clock)
        ends = set()
        for number in range(200):
            given = [dispatch(number)]
            database.transact(outbox.insert, given, source="test", actor="ann", in_turn=False)
            withdraw = partial(database.transact, outbox.withdraw, [given[0].key], actor="ann")
            withdrawn, won = in_threads(withdraw, partial(other.transact, claim_one))
            assert len(withdrawn) + len(won.claims) == 1
            other.transact(settle.settle, [settlement(held) for held in won.claims])
            ends |= {row.status for row in database.transact(count_rows)}
        assert ends <= {"expired", "delivered"}
        other.close()

    @pytest.mark.parametrize("commits", [True, False])
    def test_a_withdrawal_waits_for_a_claim(self, database: Database, commits: bool) -> None:
        """A withdrawal that meets a claim under way does nothing if it commits, and ends it if it rolls back."""
        database.transact(outbox.insert, [dispatch(1)], source="test", actor="ann", in_turn=False)
        with database.engine.connect() as conn:
            won = claim_one(database.bind(conn), now=database.clock.wall())
            assert len(won.claims) == 1
            second = Waiting(database, partial(database.transact, outbox.withdraw, ["key/1"], actor="ann"))
            second.blocked()
            conn.commit() if commits else conn.rollback()
        assert second.result() == ([] if commits else ["key/1"])


def claim_one(conn: Connection, *, now: int) -> Any:
    """A claim of one mail."""
    return dispatch_claims.claim(conn, POLICY, names=["mail"], token="t", limit=1, now=now)


class HistoryContract:
    """One table of edges, and nothing that is not in it."""

    def test_only_edges_of_the_table_are_recorded(self, run: Run) -> None:
        """Each pair of statuses that is no edge is refused, and every edge is accepted."""
        refused = set()
        for before in (None, *Status):
            for after in Status:
                change = NewTransition(entity="d", from_status=before, to_status=after, reason_code=Reason.ENQUEUED)
                try:
                    run(transitions.record, [change])
                except IllegalEdge:
                    refused.add((before, after))
        assert refused == {(b, a) for b in (None, *Status) for a in Status} - EDGES
        assert len(run(history)) == len(EDGES)

    def test_one_illegal_edge_refuses_all(self, run: Run) -> None:
        """A group with an illegal edge writes nothing at all."""
        changes = [
            NewTransition(entity="d", from_status=None, to_status=Status.PENDING, reason_code=Reason.ENQUEUED),
            NewTransition(entity="d", from_status=Status.ACKED, to_status=Status.PENDING, reason_code=Reason.RELEASED),
        ]
        with pytest.raises(IllegalEdge):
            run(transitions.record, changes)
        assert run(history) == []

    def test_a_stale_reason_excuses_no_change(self, run: Run) -> None:
        """What came in late is recorded on any status, but never as a change."""
        late = NewTransition(entity="d", from_status=Status.ACKED, to_status=Status.ACKED, reason_code=Reason.STALE_OK)
        run(transitions.record, [late])
        with pytest.raises(IllegalEdge):
            run(transitions.record, [msgspec.structs.replace(late, to_status=Status.PENDING)])

    @pytest.mark.parametrize("number", [1, 2, 3])
    def test_a_claim_is_all_or_nothing(self, run: Run, clock: FakeClock, number: int) -> None:
        """The tables refuse a token without a claim, a claim without a token, and one without a lease's end."""
        enqueue(run, dispatch(1))
        if number == 1:
            with pytest.raises(IntegrityError):
                run(lambda conn: _BREAK_CLAIM(conn, token="t", due_at=1))
            return
        claim(run)
        with pytest.raises(IntegrityError):
            if number == 2:
                run(lambda conn: _BREAK_CLAIM(conn, token="t1", due_at=None))
            else:
                run(lambda conn: _BREAK_STATUS(conn, status="pending"))
