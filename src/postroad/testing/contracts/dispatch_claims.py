"""What claims of dispatches promise: the right ones, in order, never too many, each attempt counted once.

It cannot catch a server whose plans differ from those of the versions it was run on.
"""

from functools import partial
from typing import Any

import msgspec
import pytest
from sqlalchemy import Connection, text

from postroad.model.clock import SECOND, FakeClock
from postroad.model.retry import Retry
from postroad.model.rows import DispatchClaim, Settled
from postroad.store import dispatch_claims, outbox, settle
from postroad.store.database import Database
from postroad.testing.contracts.dispatches import (
    LEASE,
    POLICY,
    Run,
    alerts,
    another,
    claim,
    dispatch,
    enqueue,
    everything,
    history,
    hold,
    in_threads,
    last_change,
    outbox_rows,
    outcomes,
    settlement,
)

BUDGET = msgspec.structs.replace(POLICY, retry=Retry(attempts=8, budget=150, first=30, jitter=False))


class ClaimContract:
    """A claim is the start of an attempt."""

    def test_a_claim_carries_all_that_its_sender_needs(self, run: Run, clock: FakeClock) -> None:
        """A claim gives the row's content, the attempt's number, the bounds and the end of the lease."""
        enqueue(run, dispatch(1, stream="s/1", version=2, headers='{"a":"b"}', origin='{"c":"d"}', expires_at=10**17))
        created = clock.wall()
        clock.advance(5)
        now = clock.wall()
        assert claim(run) == [
            DispatchClaim(
                id=f"{1:032x}",
                key="key/1",
                stream="s/1",
                kind="mail",
                version=2,
                destination="ann@example.org",
                body='{"n":1}',
                headers='{"a":"b"}',
                origin='{"c":"d"}',
                attempt=1,
                max_attempts=3,
                epoch=0,
                token="t1",
                until=now + LEASE,
                created_at=created,
                first_attempt_at=now,
                expires_at=10**17,
                possible_duplicate=False,
            )
        ]
        row = run(outbox_rows)[0]
        assert (row.status, row.attempt, row.claim_token, row.due_at) == ("delivering", 1, "t1", now + LEASE)
        assert (row.max_attempts, row.first_attempt_at, row.updated_at) == (3, now, now)
        assert run(history)[-1] == ("pending", "delivering", "dispatch.delivering.attempt")
        assert run(last_change).summary == "attempt 1 of 3"

    def test_what_is_due_longest_comes_first(self, run: Run, clock: FakeClock) -> None:
        """Claims come in the order of their due times, up to the limit; what is not due or claimed stays."""
        later = dispatch(9, due_at=clock.wall() + 1)
        enqueue(run, dispatch(3), dispatch(1), later, dispatch(2), dispatch(0, kind="sms"))
        assert [held.key for held in claim(run, limit=2)] == ["key/1", "key/2"]
        assert [held.key for held in claim(run, token="t2")] == ["key/3"]
        assert claim(run) == []
        clock.advance(1)
        assert [held.key for held in claim(run)] == ["key/9"]

    def test_a_dispatch_s_own_bound_wins(self, run: Run) -> None:
        """A dispatch that was sent with its own number of attempts keeps it."""
        enqueue(run, dispatch(1, max_attempts=7))
        assert claim(run)[0].max_attempts == 7

    def test_former_names_are_claimed_too(self, run: Run) -> None:
        """Rows under a kind's former names are claimed with it, the name that waits longest first."""
        enqueue(run, *(dispatch(n, kind="letter" if n % 2 else "mail") for n in range(6)))
        names = ["mail", "letter", "post"]
        claimed = [held.key for _ in range(3) for held in claim(run, names=names, limit=2)]
        assert sorted(claimed) == [f"key/{n}" for n in range(6)]
        assert set(claimed[:2]) == {"key/0", "key/2"}
        assert "key/1" in claimed[2:4]

    def test_several_names_share_one_limit(self, run: Run) -> None:
        """The limit holds for all names together."""
        enqueue(run, dispatch(1), dispatch(2, kind="letter"), dispatch(3), dispatch(4, kind="letter"))
        assert len(claim(run, names=["mail", "letter"], limit=3)) == 3

    def test_kinds_with_something_due_are_found(self, run: Run, clock: FakeClock) -> None:
        """Only kinds with something due are named, the one that waits longest first; lost claims count on demand."""
        enqueue(run, dispatch(2), dispatch(1, kind="sms"), dispatch(3, kind="fax", due_at=clock.wall() + 1))
        kinds = ["mail", "fax", "sms", "none"]
        assert run(dispatch_claims.due_kinds, kinds, takeover=True) == ["sms", "mail"]
        claim(run)
        assert run(dispatch_claims.due_kinds, kinds, takeover=True) == ["sms"]
        clock.advance(15)
        assert run(dispatch_claims.due_kinds, kinds, takeover=False) == ["sms", "fax"]
        assert run(dispatch_claims.due_kinds, kinds, takeover=True) == ["sms", "fax", "mail"]

    def test_five_dispatchers_share_the_work(self, database: Database, clock: FakeClock) -> None:
        """Five dispatchers at the same instant claim 200 rows once each, none of them nothing."""
        given = [dispatch(n) for n in range(200)]
        database.transact(outbox.insert, given, source="test", actor="ann", in_turn=False)
        others = [another(database, clock) for _ in range(5)]

        def claim_ten(conn: Connection, *, now: int) -> Any:
            return dispatch_claims.claim(conn, POLICY, names=["mail"], token="t", limit=10, now=now)

        claimed: list[str] = []
        for _ in range(4):
            won = in_threads(*(partial(other.transact, claim_ten) for other in others))
            assert [len(each.claims) for each in won] == [10] * 5
            claimed.extend(held.key for each in won for held in each.claims)
        assert sorted(claimed) == sorted(each.key for each in given)
        for other in others:
            other.close()

    @pytest.mark.parametrize("knob", ["", "enable_hashjoin", "enable_mergejoin"])
    def test_the_limit_holds_with_untrue_statistics(self, database: Database, knob: str) -> None:
        """With the statistics of an empty table, and with nested loops forced, a claim keeps to its limit."""

        def fill(conn: Connection, *, now: int) -> None:
            if not database.is_sqlite:
                conn.execute(text(f'ANALYZE "{database.schema}".postroad_outbox'))
            given = [dispatch(n) for n in range(5_000)]
            outbox.insert(conn, given, source="test", actor="ann", in_turn=False, now=now)

        def claim_some(conn: Connection, *, now: int) -> Any:
            if knob and not database.is_sqlite:
                conn.execute(text(f"SET LOCAL {knob} = off"))
                conn.execute(text("SET LOCAL enable_material = off"))
            return dispatch_claims.claim(conn, POLICY, names=["mail"], token="t", limit=7, now=now)

        database.transact(fill)
        assert [held.key for held in database.transact(claim_some).claims] == [f"key/{n}" for n in range(7)]
        rows = database.transact(lambda conn, now: outbox_rows(conn))
        assert sum(row.status == "delivering" for row in rows) == 7


class TakeoverContract:
    """A claim whose lease is over is available; what may be sent no more is ended."""

    def test_a_lost_claim_is_taken_over(self, run: Run, clock: FakeClock) -> None:
        """When a lease is over the dispatch can be claimed again, as the next attempt, and history says why."""
        enqueue(run, dispatch(1))
        first = claim(run)[0]
        assert claim(run, token="t2") == []
        clock.advance(15)
        assert claim(run, token="t2", takeover=False) == []
        second = claim(run, token="t2")[0]
        assert (second.attempt, second.token, second.possible_duplicate) == (2, "t2", True)
        assert second.first_attempt_at == first.first_attempt_at
        assert run(history)[-1] == ("delivering", "delivering", "dispatch.delivering.attempt")
        assert run(last_change).summary == "attempt 2 of 3; the lease of attempt 1 was lost"

    def test_the_last_attempt_is_not_repeated(self, run: Run, clock: FakeClock) -> None:
        """When the last attempt's lease is lost the dispatch dies, with outcome, alert and reason."""
        enqueue(run, dispatch(1, stream="s/1", max_attempts=1), dispatch(2, max_attempts=1))
        claim(run)
        clock.advance(15)
        won = run(dispatch_claims.claim, POLICY, names=["mail"], token="t2", limit=9)
        assert won.claims == []
        assert won.ended == [
            Settled(f"{n:032x}", "dead_letter", "dispatch.dead_letter.lease_lost", False) for n in (1, 2)
        ]
        row = run(outbox_rows)[0]
        assert (row.status, row.due_at, row.claim_token) == ("dead_letter", None, None)
        assert row.last_error == "the lease of attempt 1 of 1 was lost"
        assert run(outcomes) == [("s/1", "out:key/1:dead_letter", "dead_letter", row.last_error)]
        assert run(alerts) == [("dispatch.dead_letter", "key/2")]

    def test_an_unknown_outcome_is_parked_on_demand(self, run: Run, clock: FakeClock) -> None:
        """A kind that must not be sent twice is never taken over: it waits for a person."""
        parking = msgspec.structs.replace(POLICY, park_unknown=True, on_failure="alert")
        enqueue(run, dispatch(1, stream="s/1"))
        claim(run, policy=parking)
        clock.advance(15)
        won = run(dispatch_claims.claim, parking, names=["mail"], token="t2", limit=9)
        assert [ended.reason for ended in won.ended] == ["dispatch.dead_letter.unknown_outcome"]
        assert run(alerts) == [("dispatch.dead_letter", "key/1")]
        assert [status for _, _, status, _ in run(outcomes)] == ["dead_letter"]

    def test_nothing_starts_after_its_deadline(self, run: Run, clock: FakeClock) -> None:
        """At its deadline a pending dispatch expires; one under way only when its lease is over."""
        now = clock.wall()
        enqueue(run, dispatch(1, expires_at=now + 10 * SECOND), dispatch(2, expires_at=now), dispatch(3))
        won = run(dispatch_claims.claim, POLICY, names=["mail"], token="t1", limit=9)
        assert [held.key for held in won.claims] == ["key/1", "key/3"]
        assert won.ended == [Settled(f"{2:032x}", "expired", "dispatch.expired.deadline", False)]
        clock.advance(12)
        assert claim(run) == []
        clock.advance(3)
        won = run(dispatch_claims.claim, POLICY, names=["mail"], token="t2", limit=9)
        assert [held.key for held in won.claims] == ["key/3"]
        assert [ended.reason for ended in won.ended] == ["dispatch.expired.deadline"]
        assert run(alerts) == [("dispatch.expired", "key/2"), ("dispatch.expired", "key/1")]

    def test_the_budget_counts_from_the_first_attempt(self, run: Run, clock: FakeClock) -> None:
        """Waiting before the first attempt spends no budget, and the first retry is always allowed."""
        enqueue(run, dispatch(1))
        clock.advance(10_000)
        held = claim(run, policy=BUDGET)[0]
        run(settle.settle, [settlement(held, "failed", policy=BUDGET)])
        clock.advance(10_000)
        assert claim(run, policy=BUDGET, token="t2")[0].attempt == 2

    @pytest.mark.parametrize("lost", [False, True])
    def test_nothing_starts_after_its_budget(self, run: Run, clock: FakeClock, lost: bool) -> None:
        """A second retry that could only start after the budget does not: the dispatch dies and says so."""
        enqueue(run, dispatch(1))
        for token in ("t1", "t2"):
            held = claim(run, policy=BUDGET, token=token)[0]
            if token == "t1" or not lost:
                run(settle.settle, [settlement(held, "failed", policy=BUDGET, fraction=0.0, error="busy")])
            clock.advance(60)
        clock.advance(60)
        won = run(dispatch_claims.claim, BUDGET, names=["mail"], token="t3", limit=9)
        assert [ended.reason for ended in won.ended] == ["dispatch.dead_letter.budget"]
        assert run(outbox_rows)[0].last_error == "busy"
        path = [step for step in run(history) if step[0] != step[1]]
        assert path[-2][1] == path[-1][0] == "delivering"
        assert "attempt 3 would start after the budget" in run(last_change).summary

    def test_what_is_ended_counts_towards_the_limit(self, run: Run, clock: FakeClock) -> None:
        """One pass never changes more dispatches than its limit, ended ones included."""
        enqueue(run, *(dispatch(n, expires_at=1) for n in range(5)), dispatch(7))
        won = run(dispatch_claims.claim, POLICY, names=["mail"], token="t1", limit=3)
        assert (len(won.claims), len(won.ended)) == (0, 3)
        assert sum(row.status != "pending" for row in run(outbox_rows)) == 3


class HoldContract:
    """What a claimant does with its claims besides settling them."""

    def test_what_never_began_is_given_back(self, run: Run, clock: FakeClock) -> None:
        """A released claim is as if it had not been: due at once, its attempt not counted, no duplicate possible."""
        enqueue(run, dispatch(1), dispatch(2))
        one, two = claim(run)
        clock.advance(1)
        assert run(dispatch_claims.release, [hold(two), hold(one)]) == [two.id, one.id]
        row = run(outbox_rows)[0]
        assert (row.status, row.attempt, row.first_attempt_at, row.due_at) == ("pending", 0, None, clock.wall())
        assert run(history)[-1] == ("delivering", "pending", "dispatch.pending.released")
        again = claim(run, token="t2")[0]
        assert (again.attempt, again.possible_duplicate) == (1, False)

    def test_a_retry_given_back_keeps_its_first_attempt(self, run: Run, clock: FakeClock) -> None:
        """Giving back a later attempt takes only that one off."""
        enqueue(run, dispatch(1))
        first = claim(run)[0]
        clock.advance(15)
        run(dispatch_claims.release, [hold(claim(run, token="t2")[0])])
        row = run(outbox_rows)[0]
        assert (row.attempt, row.first_attempt_at) == (1, first.first_attempt_at)

    def test_only_its_holder_gives_a_claim_back(self, run: Run, clock: FakeClock) -> None:
        """Under another token, or after the end, or for nothing, a release changes nothing."""
        enqueue(run, dispatch(1), dispatch(2))
        lost, sent = claim(run)
        clock.advance(15)
        again, _ = claim(run, token="t2")
        run(settle.settle, [settlement(sent)])
        before = run(everything)
        unknown = msgspec.structs.replace(hold(lost), subject="no such")
        assert run(dispatch_claims.release, [hold(lost), hold(sent), unknown]) == []
        assert run(everything) == before
        assert again.attempt == 2

    def test_a_claim_is_checked_again_before_a_send(self, run: Run, clock: FakeClock) -> None:
        """The check before sends names what is still held under a lease, in the given order."""
        enqueue(run, dispatch(1), dispatch(2), dispatch(3))
        one, two, three = claim(run)
        run(dispatch_claims.release, [hold(two)])
        stranger = msgspec.structs.replace(hold(one), token="other")
        holds = [hold(three), stranger, hold(two), hold(one)]
        assert run(dispatch_claims.recheck, holds) == [three.id, one.id]
        clock.advance(15)
        assert run(dispatch_claims.recheck, holds) == []

    def test_a_claim_can_be_looked_up(self, run: Run) -> None:
        """Whoever lost the answer to its COMMIT finds by its token exactly what it had claimed."""
        enqueue(run, *(dispatch(n) for n in range(4)))
        claims = claim(run, limit=3)
        claim(run, token="t2")
        assert run(dispatch_claims.lookup, "t1") == sorted(claims, key=lambda held: held.id)
        assert run(dispatch_claims.lookup, "never") == []
