"""What ordered lanes promise: one dispatch at a time, in the order of sending, whatever becomes of each.

It cannot catch what only other isolation levels show.
"""

import random
import threading
from collections import defaultdict
from typing import Any

import msgspec
import pytest
from sqlalchemy import Connection

from postroad.model.clock import SECOND, FakeClock
from postroad.model.lifecycle import Status
from postroad.model.rows import DispatchClaim, NewDispatch
from postroad.store import dispatch_claims, lanes, operators, outbox, settle
from postroad.store.audit import Operator
from postroad.store.database import Database
from postroad.store.operators import Due, Orders
from postroad.store.statements import Statement
from postroad.testing.contracts.dispatches import (
    LEASE,
    POLICY,
    Run,
    Waiting,
    another,
    claim,
    dispatch,
    enqueue,
    hold,
    outbox_rows,
    settlement,
)

ENQUEUEING: dict[str, Any] = {"source": "test", "actor": "ann", "in_turn": False}
BY = Orders(by=Operator(actor="ann", reason="test"), force=True)
SKIPPING = msgspec.structs.replace(POLICY, on_dead="skip")
_LANES = Statement("SELECT lane, head FROM {p}lanes ORDER BY lane")
_MEMBERS = Statement("SELECT dispatch FROM {p}lane_members ORDER BY number")


def member(number: int, lane: str = "a", **changes: Any) -> NewDispatch:
    """A dispatch of a lane."""
    return dispatch(number, lane=lane, **changes)


def promoted(run: Run) -> int:
    """What dispatchers do about new members."""
    seen: int = run(lanes.promote, ["mail"], limit=100)
    return seen


def due(run: Run, **how: Any) -> list[DispatchClaim]:
    """What can be claimed once the lanes have been looked at."""
    promoted(run)
    return claim(run, **how)


def keys(claims: list[DispatchClaim]) -> list[str]:
    return sorted(each.key for each in claims)


def settled(run: Run, held: DispatchClaim, result: Any = "ok", **more: Any) -> None:
    run(settle.settle, [settlement(held, result, lane=held.lane, **more)])


def left(run: Run) -> tuple[list[Any], list[str]]:
    """The lanes and their members that are left."""

    def look(conn: Connection) -> tuple[list[Any], list[str]]:
        return [tuple(row) for row in _LANES(conn)], _MEMBERS(conn).scalars()

    found: tuple[list[Any], list[str]] = run(look)
    return found


class LaneContract:
    """One at a time, in order."""

    def test_only_the_head_can_be_claimed(self, run: Run) -> None:
        """Of each lane one dispatch is due, in the order of sending; what is in no lane doesn't wait."""
        enqueue(run, member(3), member(1), member(2, "b"), dispatch(4))
        for expected in (["key/2", "key/3", "key/4"], ["key/1"], []):
            found = due(run)
            assert keys(found) == expected
            assert due(run) == []
            for held in found:
                settled(run, held)
        assert left(run) == ([], [])

    def test_nothing_is_due_before_a_dispatcher_has_looked(self, run: Run) -> None:
        """A new member waits for a dispatcher, which is told so beside what it claims, or when it claims nothing."""
        enqueue(run, member(1), dispatch(2))
        assert run(lanes.unseen, ["mail"])
        found = run(dispatch_claims.claim, POLICY, names=["mail"], token="t1", limit=9)
        assert (keys(found.claims), found.unseen) == (["key/2"], True)
        assert promoted(run) == 1
        assert not run(lanes.unseen, ["mail"])
        assert not run(lanes.unseen, [])
        assert promoted(run) == 0

    def test_others_kinds_are_left_alone(self, run: Run) -> None:
        """A dispatcher looks at its own kinds; a head of another kind is due for its own dispatchers."""
        enqueue(run, member(1, kind="sms"), member(2))
        assert promoted(run) == 1
        assert claim(run) == []
        held = run(dispatch_claims.claim, POLICY, names=["sms"], token="t1", limit=9).claims
        assert keys(held) == ["key/1"]
        settled(run, held[0])
        assert keys(due(run)) == ["key/2"]

    def test_a_head_that_backs_off_holds_its_lane(self, run: Run, clock: FakeClock) -> None:
        """A failed attempt, or one that is given back, leaves the head where it is."""
        enqueue(run, member(1), member(2))
        settled(run, due(run)[0], "failed")
        assert due(run) == []
        clock.advance(60)
        (held,) = due(run)
        assert (held.key, held.attempt) == ("key/1", 2)
        run(dispatch_claims.release, [hold(held)])
        assert keys(due(run)) == ["key/1"]

    def test_a_head_waits_for_its_own_time(self, run: Run, clock: FakeClock) -> None:
        """A member that is to be sent later is sent then, and holds up those behind it."""
        enqueue(run, member(1), member(2, due_at=clock.wall() + 9 * SECOND), member(3))
        settled(run, due(run)[0])
        assert due(run) == []
        clock.advance(9)
        settled(run, due(run)[0])
        assert keys(due(run)) == ["key/3"]

    def test_a_lost_lease_is_the_same_head(self, run: Run, clock: FakeClock) -> None:
        """Whoever takes over takes the same dispatch; the late settle of the first changes nothing."""
        enqueue(run, member(1), member(2))
        (first,) = due(run)
        clock.advance(LEASE / SECOND)
        (second,) = due(run, token="t2")
        settled(run, first)
        assert due(run) == []
        settled(run, second)
        assert keys(due(run)) == ["key/2"]

    @pytest.mark.parametrize(("policy", "expected"), [(POLICY, []), (SKIPPING, ["key/2"])], ids=["block", "skip"])
    def test_a_dead_head(self, run: Run, policy: Any, expected: list[str]) -> None:
        """It holds up its lane until a person decides, or the next one goes, as its sender says."""
        enqueue(run, member(1), member(2))
        settled(run, due(run)[0], "permanent", policy=policy)
        assert keys(due(run)) == expected

    @pytest.mark.parametrize("verb", ["purge", "discard", "sent"])
    def test_a_person_lets_a_lane_go_on(self, run: Run, verb: str) -> None:
        """Purged, discarded or said to have arrived, a dead head holds up nothing any more."""
        enqueue(run, member(1), member(2))
        (held,) = due(run)
        settled(run, held, "unknown")
        if verb == "purge":
            run(operators.purge, [held.id], orders=BY)
        else:
            run(operators.resolve, held.id, verb, orders=BY, due=Due())
        assert keys(due(run)) == ["key/2"]

    def test_a_retried_head_goes_first(self, run: Run) -> None:
        """A dead head that is retried is still the first of its lane."""
        enqueue(run, member(1), member(2))
        (held,) = due(run)
        settled(run, held, "permanent")
        run(operators.retry, [held.id], orders=BY, due=Due())
        for key in ("key/1", "key/2"):
            (held,) = due(run)
            assert held.key == key
            settled(run, held)
        assert left(run) == ([], [])

    def test_what_was_skipped_comes_last(self, run: Run) -> None:
        """One that has left its lane and is retried is sent after those that are in it."""
        enqueue(run, member(1), member(2), member(3))
        (held,) = due(run)
        settled(run, held, "permanent", policy=SKIPPING)
        run(operators.retry, [held.id], orders=BY, due=Due())
        for key in ("key/2", "key/3", "key/1"):
            (held,) = due(run)
            assert held.key == key
            settled(run, held)

    @pytest.mark.parametrize("number", [1, 2, 3])
    def test_one_is_withdrawn(self, run: Run, number: int) -> None:
        """The head, one in the middle or the last: the others keep their order."""
        enqueue(run, member(1), member(2), member(3))
        promoted(run)
        assert run(outbox.withdraw, [f"key/{number}"], actor="ann") == [f"key/{number}"]
        for key in (f"key/{n}" for n in (1, 2, 3) if n != number):
            (held,) = due(run)
            assert held.key == key
            settled(run, held)
        assert left(run) == ([], [])

    @pytest.mark.parametrize("number", [1, 2])
    def test_one_expires(self, run: Run, clock: FakeClock, number: int) -> None:
        """The pump ends a member whose deadline has passed, first or not, and the next one goes."""
        late: dict[int, dict[str, Any]] = {number: {"expires_at": clock.wall()}}
        enqueue(run, *(member(n, **late.get(n, {})) for n in (1, 2, 3)))
        promoted(run)
        assert run(settle.expire, limit=9) == 1
        for key in (f"key/{n}" for n in (1, 2, 3) if n != number):
            (held,) = due(run)
            assert held.key == key
            settled(run, held)

    def test_a_claim_that_ends_a_head(self, run: Run, clock: FakeClock) -> None:
        """A head that may be sent no more is ended by the claim, and the next one is due."""
        enqueue(run, member(1, expires_at=clock.wall()), member(2))
        promoted(run)
        ended = run(dispatch_claims.claim, POLICY, names=["mail"], token="t1", limit=9).ended
        assert [one.status for one in ended] == [Status.EXPIRED]
        assert keys(claim(run)) == ["key/2"]

    def test_a_key_that_is_taken_joins_no_lane(self, run: Run) -> None:
        """What was there before is not put into a lane once more."""
        enqueue(run, member(1), member(1, "b"))
        enqueue(run, member(1))
        assert len(left(run)[1]) == 1

    def test_many_behind_one_head_are_not_looked_at(self, run: Run) -> None:
        """What waits in a lane is not due, and not claimed past."""
        enqueue(run, *(member(n) for n in range(1, 301)))
        while promoted(run):
            pass
        assert keys(claim(run)) == ["key/1"]
        assert sum(row.due_at is not None for row in run(outbox_rows)) == 1


class LaneRaceContract:
    """Whoever meets in a lane."""

    def test_a_claim_passes_by_a_lane_that_is_held(self, database: Database, clock: FakeClock) -> None:
        """A row is not ended while its lane is somebody else's; nobody waits in a circle."""
        now = clock.wall()
        database.transact(outbox.insert, [member(1, expires_at=now), member(2)], **ENQUEUEING)
        database.transact(lanes.promote, ["mail"], limit=9)
        other = another(database, clock)
        with database.engine.connect() as conn:
            lanes.lock(database.bind(conn), ["a"])
            if not database.is_sqlite:  # there one lock is held by one transaction
                assert other.transact(settle.expire, limit=9) == 0
                found = other.transact(dispatch_claims.claim, POLICY, names=["mail"], token="t", limit=9)
                assert (found.claims, found.ended) == ([], [])
            conn.rollback()
        assert other.transact(settle.expire, limit=9) == 1
        other.close()

    def test_an_insert_that_is_not_committed_holds_up_nobody(self, database: Database, clock: FakeClock) -> None:
        """A lane's head is settled beside an open insert into it; what is committed afterwards is found."""
        if database.is_sqlite:
            pytest.skip("SQLite has one writer")
        database.transact(outbox.insert, [member(1)], **ENQUEUEING)
        database.transact(lanes.promote, ["mail"], limit=9)
        (held,) = database.transact(dispatch_claims.claim, POLICY, names=["mail"], token="t", limit=9).claims
        other = another(database, clock)
        with database.engine.connect() as conn:
            outbox.insert(database.bind(conn), [member(2)], **ENQUEUEING, now=clock.wall())
            other.transact(settle.settle, [settlement(held, lane="a")])
            conn.commit()
        assert other.read(lanes.unseen, ["mail"])
        other.transact(lanes.promote, ["mail"], limit=9)
        (held,) = other.transact(dispatch_claims.claim, POLICY, names=["mail"], token="t", limit=9).claims
        assert held.key == "key/2"
        other.close()

    def test_two_ends_of_one_lane_follow_each_other(self, database: Database, clock: FakeClock) -> None:
        """A withdrawal waits for the settle of the head before it, and then finds its own the head."""
        database.transact(outbox.insert, [member(1), member(2), member(3)], **ENQUEUEING)
        database.transact(lanes.promote, ["mail"], limit=9)
        (held,) = database.transact(dispatch_claims.claim, POLICY, names=["mail"], token="t", limit=9).claims
        other = another(database, clock)
        with database.engine.connect() as conn:
            bound = database.bind(conn)
            settle.settle(bound, [settlement(held, lane="a")], now=clock.wall())
            waiting = Waiting(other, lambda: other.transact(outbox.withdraw, ["key/2"], actor="t"))
            waiting.blocked()
            conn.commit()
        assert waiting.result() == ["key/2"]
        (held,) = database.transact(dispatch_claims.claim, POLICY, names=["mail"], token="t", limit=9).claims
        assert held.key == "key/3"
        other.close()

    def test_many_at_once(self, database: Database, clock: FakeClock) -> None:
        """Senders, dispatchers and people at work in a few lanes: each is sent once, in order, one at a time."""
        stage = _Stage(database, clock)
        threads = [threading.Thread(target=stage.send, args=(n,)) for n in range(3)]
        threads += [threading.Thread(target=stage.carry_out, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert stage.errors == []
        assert len(stage.ended) == len(set(stage.ended)) == 3 * _Stage.EACH
        for lane, done in stage.order.items():
            for sender in range(3):
                assert [n for who, n in done if who == sender] == sorted(n for who, n in done if who == sender), lane


class _Stage:
    """Threads that send into three lanes, and threads that carry out."""

    EACH = 40
    LANES = 3

    def __init__(self, database: Database, clock: FakeClock) -> None:
        self.database = database
        self.clock = clock
        self.errors: list[BaseException] = []
        self.ended: list[str] = []
        self.order: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self._busy: set[str] = set()
        self._lock = threading.Lock()

    def send(self, who: int) -> None:
        random_ = random.Random(who)
        for n in range(self.EACH):
            one = member(1000 * (who + 1) + n, f"lane {random_.randrange(self.LANES)}")
            self._guarded(self.database.transact, outbox.insert, [one], **ENQUEUEING)

    def carry_out(self, who: int) -> None:
        own = another(self.database, self.clock)
        n = 0
        while len(self.ended) < 3 * self.EACH and not self.errors:
            n += 1
            self._guarded(own.transact, lanes.promote, ["mail"], limit=7)
            found = self._guarded(
                own.transact, dispatch_claims.claim, POLICY, names=["mail"], token=f"{who}/{n}", limit=2
            )
            if found is not None:
                self._settle(own, found.claims, who + n)
        own.close()

    def _settle(self, own: Database, claims: list[DispatchClaim], draw: int) -> None:
        with self._lock:
            for each in claims:
                assert each.lane is not None
                if each.lane in self._busy:
                    self.errors.append(AssertionError(f"two of {each.lane} are under way"))
                self._busy.add(each.lane)
                number = int(each.key.partition("/")[2])
                self.order[each.lane].append((number // 1000 - 1, number % 1000))
                self._busy.discard(each.lane)
                self.ended.append(each.key)
        result = "permanent" if draw % 5 == 0 else "ok"
        done = [settlement(each, result, lane=each.lane, policy=SKIPPING) for each in claims]
        if done:
            self._guarded(own.transact, settle.settle, done)

    def _guarded(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except BaseException as error:
            self.errors.append(error)
            return None
