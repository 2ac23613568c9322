"""The commit of a turn: all of it or nothing, under a claim that is still current."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy import Connection

from postroad.model import failpoints
from postroad.model.clock import FakeClock
from postroad.model.errors import (
    ConcurrencyConflict,
    DuplicateEntry,
    DuplicateKey,
    InvalidInput,
    KeyConflict,
    StaleClaim,
    StreamDeleted,
)
from postroad.model.lifecycle import RunEnd
from postroad.model.rows import NewAlert, NewEvent, Published, TimerChange, TurnClaim, TurnCommit
from postroad.store import log, outbox, queues, runs, turns
from postroad.store.database import Database
from postroad.store.statements import Statement
from postroad.testing.contracts.dispatches import Waiting, another, dispatch, in_threads, outbox_rows
from postroad.testing.contracts.streams import (
    STREAM,
    Run,
    Uses,
    append_next,
    commit,
    decided,
    delete_stream,
    ends,
    entry,
    event,
    everything,
    hold,
    logged,
    names,
    take_away,
    waits,
)

ALL = [Statement(f"SELECT * FROM {{p}}{name} ORDER BY 1, 2") for name in ("outbox", "timers", "alerts", "runs")]
COUNT = Statement("SELECT count(*) FROM {p}outbox")
BY_HAND = Statement("INSERT INTO {p}alerts (severity, code, subject, detail, raised_at) VALUES ('a','b','c','d',1)")


def world(conn: Connection) -> Any:
    """All that a turn can write."""
    return everything(conn), [[tuple(row) for row in statement(conn)] for statement in ALL]


def rich(held: TurnClaim, **more: Any) -> TurnCommit:
    """A turn that does everything at once: two events consumed, a third one is dead."""
    given = {
        "consumed": held.events[:2],
        "dead": held.events[2:],
        "dead_reason": "poison",
        "dispatches": [dispatch(1, stream=STREAM), dispatch(2, stream=STREAM)],
        "timers": [TimerChange(verb="set", stream=STREAM, key="tmr", fire_at=9)],
        "withdrawals": ["key/7", "key/9"],
        "publishes": [event(9), event(1, "chat/1"), event(1)],
        "alerts": [NewAlert(code="x", subject="y")],
        **more,
    }
    return decided(held, "a", "b", **given)


class TestCommit(Uses):
    """What one commit writes."""

    def claimed(self, run: Run, many: int = 3) -> TurnClaim:
        """A claim of a few events."""
        self.publish(run, *(event(n) for n in range(many)))
        return self.claim_one(run)

    def test_everything_in_one_transaction(self, run: Run, clock: FakeClock) -> None:
        """Log, inbox, outbox, timers, withdrawals, events, alerts and the run change together."""
        run(outbox.insert, [dispatch(7)], source="test", actor="ann", in_turn=False)
        held = self.claimed(run)
        accepted = clock.wall()
        clock.advance(1)
        (done,) = commit(run, rich(held))
        assert (done.stream, done.version, done.events_left) == (STREAM, 4, True)
        assert [(one.event_id, one.created) for one in done.published] == [
            ("e9", True),
            ("e1", True),
            ("e1", False),
        ]
        assert done.published[2] == Published("e1", None, False)
        assert [(one.key, one.created) for one in done.enqueued] == [("key/1", True), ("key/2", True)]
        assert done.withdrawn == ["key/7"]
        entries = run(log.read, STREAM)
        assert [one.key for one in entries] == ["e0", "e1", f"{held.turn_id}/a", f"{held.turn_id}/b"]
        assert [one.cause for one in entries] == [None, None, held.turn_id, held.turn_id]
        assert entries[0].received_at.timestamp() == accepted / 1e6
        assert entries[0].recorded_at == entries[2].received_at == clock.now
        assert run(waits) == [(STREAM, "e2", "poison"), ("chat/1", "e1", None), (STREAM, "e9", None)]
        assert [row.key for row in run(outbox_rows)] == ["key/1", "key/2", "key/7"]
        assert run(ends) == ["committed"]

    def test_every_place_is_before_the_commit(self, run: Run) -> None:
        """A transaction that dies at any of the commit's places has written nothing."""
        held = self.claimed(run)
        before = run(world)
        places = [name for name in failpoints.FAILPOINTS if name.startswith(("turns.", "inbox."))]
        assert len(places) >= 12
        for place in places:
            with dying_at(place), pytest.raises(Died):
                commit(run, rich(held))
            assert run(world) == before
        commit(run, rich(held))

    def test_a_part_of_the_set(self, run: Run) -> None:
        """A turn may consume a part of its set; the rest is the next turn's."""
        held = self.claimed(run)
        (done,) = commit(run, decided(held, consumed=held.events[:1]))
        assert done.events_left
        assert names(self.claim_one(run, "t2").events) == ["e1", "e2"]

    def test_nothing_consumed_nothing_recorded(self, run: Run) -> None:
        """A turn whose events all ended dead leaves the log as it was."""
        held = self.claimed(run)
        (done,) = commit(run, decided(held, consumed=[], dead=held.events, dead_reason="poison"))
        assert (done.version, done.events_left) == (0, False)
        assert run(logged) == []
        assert run(log.version, STREAM) == 0

    def test_the_run_ends_as_said(self, run: Run) -> None:
        """The end of the run and its error are the commit's."""
        held = self.claimed(run)
        commit(run, decided(held, end=RunEnd.FAILED, error="poison"))
        (row,) = run(runs.of_stream, STREAM)
        assert (row.end, row.error) == ("failed", "poison")

    def test_several_turns(self, run: Run) -> None:
        """Turns of several streams commit together, each answered with its own."""
        self.publish(run, event(1), event(1, "load/2"), event(2, "load/2"))
        claims = self.claim(run)
        made = [
            decided(
                held,
                publishes=[event(5, held.stream), event(6, held.stream)][place:],
                dispatches=[dispatch(place + 1, stream=held.stream)],
            )
            for place, held in enumerate(claims)
        ]
        answers = commit(run, *made)
        assert [one.stream for one in answers] == [held.stream for held in claims]
        assert [names_of(one.published) for one in answers] == [["e5", "e6"], ["e6"]]
        assert [names_of(one.enqueued, "key") for one in answers] == [["key/1"], ["key/2"]]
        assert [one.version for one in answers] == [len(held.events) for held in claims]
        assert commit(run) == []

    def test_one_that_is_refused_takes_the_others_along(self, run: Run) -> None:
        """If one turn of several is refused none of them is committed."""
        self.publish(run, event(1), event(1, "load/2"))
        claims = self.claim(run)
        run(append_next, "load/2", entry("x"))
        before = run(world)
        with pytest.raises(ConcurrencyConflict) as refused:
            commit(run, *(decided(held) for held in claims))
        assert refused.value.stream == "load/2"
        assert run(world) == before

    def test_the_users_own_rows(self, run: Run) -> None:
        """`write` runs on the turn's connection, once the claim is known to be current; one turn alone has it."""
        held = self.claimed(run)
        assert held.version == 0
        seen: list[int] = []

        def write(conn: Connection) -> None:
            BY_HAND(conn)
            seen.append(log.version(conn, STREAM))

        with pytest.raises(InvalidInput):
            commit(run, write=write)
        commit(run, decided(held), write=write)
        assert seen == [0]
        with pytest.raises(StaleClaim):
            commit(run, decided(held), write=write)
        assert seen == [0]

    def test_writing_is_undone_with_the_turn(self, run: Run) -> None:
        """What `write` wrote is gone if the turn is refused afterwards."""
        held = self.claimed(run)
        run(append_next, STREAM, entry("x"))
        before = run(world)
        with pytest.raises(ConcurrencyConflict):
            commit(run, decided(held), write=BY_HAND)
        assert run(world) == before


class TestRefusals(Uses):
    """What a commit is refused for, and what is left then."""

    def test_a_stale_commit_changes_nothing(self, run: Run, clock: FakeClock) -> None:
        """Whoever lost the claim commits nothing, and does not disturb the one who has it."""
        self.publish(run, event(1), event(2), event(3))
        held = self.claim_one(run)
        clock.advance(30)
        again = self.claim_one(run, "t2")
        before = run(world)
        with pytest.raises(StaleClaim) as refused:
            commit(run, rich(held))
        assert refused.value.about["stream"] == STREAM
        assert run(world) == before
        commit(run, rich(again))
        with pytest.raises(StaleClaim):
            commit(run, rich(again))

    @pytest.mark.parametrize("part", ["consumed", "dead"])
    def test_an_event_that_is_gone(self, run: Run, part: str) -> None:
        """A turn whose event was taken away meanwhile commits nothing."""
        self.publish(run, event(1), event(2))
        held = self.claim_one(run)
        run(take_away, held.events[1:])
        before = run(world)
        with pytest.raises(StaleClaim):
            commit(run, decided(held, **{"consumed": [], part: held.events}, dead_reason="poison"))
        assert run(world) == before

    def test_a_stream_that_moved_on(self, run: Run) -> None:
        """A conflict writes nothing; the same set is then decided again at the new version."""
        self.publish(run, event(1))
        held = self.claim_one(run)
        run(append_next, STREAM, entry("x"))
        before = run(world)
        with pytest.raises(ConcurrencyConflict) as refused:
            commit(run, rich(held))
        assert refused.value.stream == STREAM
        assert run(world) == before
        run(queues.back_off, hold(held), delay=0, error="", end=RunEnd.CONFLICT)
        again = self.claim_one(run, "t2")
        assert (again.turn_id, again.version) == (held.turn_id, 1)
        commit(run, decided(again))
        assert run(logged) == [(1, "x"), (2, "e1")]

    def test_a_stream_that_was_deleted(self, run: Run) -> None:
        """A turn of a deleted stream commits nothing and begins nothing again."""
        self.publish(run, event(1))
        held = self.claim_one(run)
        run(delete_stream, STREAM)
        before = run(world)
        with pytest.raises(StreamDeleted):
            commit(run, rich(held))
        assert run(world) == before

    def test_a_duplicate_entry_removes_one_event_not_the_set(self, run: Run) -> None:
        """An event that landed already is dropped from the set, and the others are decided."""
        self.publish(run, event(1), event(2), event(3))
        held = self.claim_one(run)
        run(append_next, STREAM, entry("e2"))
        before = run(world)
        with pytest.raises(DuplicateEntry) as refused:
            commit(run, decided(held))
        assert (refused.value.stream, refused.value.entry_ids) == (STREAM, ("e2",))
        assert run(world) == before
        assert run(turns.drop_landed, hold(held)) == 1
        assert run(ends) == ["conflict"]
        again = self.claim_one(run, "t2")
        assert names(again.events) == ["e1", "e3"]
        assert again.attempt == 1
        commit(run, decided(again))
        assert [name for _, name in run(logged)] == ["e2", "e1", "e3"]

    def test_an_entry_of_the_decision_that_is_there(self, run: Run) -> None:
        """If it is the decision's own entry that was there before, no event is dropped and nothing changes."""
        self.publish(run, event(1))
        held = self.claim_one(run)
        run(append_next, STREAM, entry(f"{held.turn_id}/a"))
        with pytest.raises(DuplicateEntry):
            commit(run, decided(held, "a"))
        before = run(world)
        assert run(turns.drop_landed, hold(held)) == 0
        assert run(world) == before

    def test_dropping_needs_the_claim(self, run: Run, clock: FakeClock) -> None:
        """Only the holder of the claim may drop events of its set."""
        self.publish(run, event(1))
        held = self.claim_one(run)
        run(append_next, STREAM, entry("e1"))
        clock.advance(30)
        assert self.claim(run, "t2") == []
        with pytest.raises(StaleClaim):
            run(turns.drop_landed, hold(held))

    def test_a_duplicate_key_is_another_error(self, run: Run) -> None:
        """A dispatch key that exists is told apart from an entry that does, which is looked at first."""
        run(outbox.insert, [dispatch(1)], source="test", actor="ann", in_turn=False)
        self.publish(run, event(1), event(2))
        held = self.claim_one(run)
        before = run(world)
        with pytest.raises(DuplicateKey) as refused:
            commit(run, decided(held, dispatches=[dispatch(2), dispatch(3, key="key/1")]))
        assert refused.value.keys == ("key/1",)
        assert run(world) == before
        run(append_next, STREAM, entry("e2"))
        with pytest.raises(DuplicateEntry):
            commit(run, decided(held, dispatches=[dispatch(3, key="key/1")]))

    @pytest.mark.parametrize(
        ("publishes", "error"),
        [([event(1, data="2")], KeyConflict), ([event(1, "load/9")], StreamDeleted)],
    )
    def test_a_publish_that_is_refused(self, run: Run, publishes: list[NewEvent], error: type[Exception]) -> None:
        """A turn that publishes what cannot be is not committed."""
        run(delete_stream, "load/9")
        self.publish(run, event(1))
        held = self.claim_one(run)
        before = run(world)
        with pytest.raises(error):
            commit(run, decided(held, publishes=publishes))
        assert run(world) == before


class TestRaces(Uses):
    """Two workers on one stream."""

    def test_one_commits_and_one_is_stale(self, database: Database, clock: FakeClock) -> None:
        """Of two that believe they hold a stream the one whose token is current commits, whoever is first."""
        run, other = database.transact, another(database, clock)
        self.publish(run, event(1), event(2))
        lost = self.claim_one(run)
        clock.advance(30)

        def late() -> object:
            try:
                return commit(other.transact, decided(lost))
            except StaleClaim as stale:
                return type(stale)

        with database.engine.connect() as conn, conn.begin() as transaction:
            over = partial(on, database.bind(conn), clock)
            held = self.claim_one(over, "t2")
            waiting = Waiting(database, late)
            waiting.blocked()
            commit(over, decided(held))
            transaction.commit()
        assert waiting.result() is StaleClaim
        other.close()
        assert database.read(logged) == [(1, "e1"), (2, "e2")]

    def test_two_workers_forced_onto_one_stream(self, database: Database, clock: FakeClock) -> None:
        """Of two decisions for one version one commits; the other conflicts, decides again and then commits."""
        run, other = database.transact, another(database, clock)
        self.publish(run, event(1))
        held = self.claim_one(run)

        def decide() -> list[str]:
            try:
                commit(other.transact, decided(held))
            except ConcurrencyConflict:
                other.transact(queues.back_off, hold(held), delay=0, error="", end=RunEnd.CONFLICT)
                commit(other.transact, decided(self.claim_one(other.transact, "t2")))
                return ["conflict", "committed"]
            return ["committed"]

        with database.engine.connect() as conn, conn.begin() as transaction:
            log.append(database.bind(conn), STREAM, [entry("x")], expected_version=0, now=1)
            waiting = Waiting(database, decide)
            waiting.blocked()
            transaction.commit()
        assert waiting.result() == ["conflict", "committed"]
        other.close()
        assert database.read(logged) == [(1, "x"), (2, "e1")]

    def test_renewing_while_committing(self, database: Database, clock: FakeClock) -> None:
        """Renewals and grouped commits of the same streams, at the same time, never deadlock."""
        self.publish(database.transact, *(event(n, f"load/{m}") for m in range(8) for n in range(5)))
        others = [another(database, clock) for _ in range(3)]
        claims = self.claim(database.transact, batch=1)

        def commits() -> None:
            nonlocal claims
            for number in range(5):
                commit(others[0].transact, *(decided(held) for held in reversed(claims)))
                claims = self.claim(others[0].transact, f"c{number}", batch=1)

        def renews(place: int) -> None:
            for _ in range(20):
                holds = [hold(held) for held in claims]
                others[place].transact(queues.renew, holds, lease=1, urgent=True)

        retried: list[object] = []
        sqlalchemy.event.listen(database.engine, "handle_error", lambda context: retried.append(context))
        results = in_threads(commits, partial(renews, 1), partial(renews, 2))
        for one in others:
            one.close()
        assert results == [None] * 3
        assert retried == []
        if claims:
            commit(database.transact, *(decided(held) for held in claims))
        self.drain(database.transact)
        assert all(len(database.read(logged, f"load/{m}")) == 5 for m in range(8))


class Died(BaseException):
    """The process ended here."""


class dying_at:
    """Ends the transaction at a failpoint."""

    def __init__(self, place: str) -> None:
        self._place = place

    def __enter__(self) -> None:
        failpoints.arm(self._reached)

    def __exit__(self, *error: object) -> None:
        failpoints.arm(None)

    def _reached(self, name: str) -> None:
        if name == self._place:
            raise Died


def names_of(answers: Any, field: str = "event_id") -> list[str]:
    """The ids of answers."""
    return [getattr(one, field) for one in answers]


def on(conn: Connection, clock: FakeClock, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run on a connection that stays open."""
    return fn(conn, *args, now=clock.wall(), **kwargs)
