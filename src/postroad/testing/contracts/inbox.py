"""What an inbox promises: each event once per stream, for ever, in the order accepted; other content is refused.

It cannot catch a publisher that lives in another database, nor SERIALIZABLE transactions.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace
from sqlalchemy import Connection, text

from postroad.model.clock import FakeClock
from postroad.model.errors import KeyConflict, StreamDeleted
from postroad.model.rows import NewEvent, Published
from postroad.store.database import Database
from postroad.testing.contracts.dispatches import Waiting, another
from postroad.testing.contracts.streams import (
    STREAM,
    Run,
    Uses,
    commit,
    decided,
    delete_stream,
    event,
    everything,
    logged,
    names,
    waits,
)

Fate = Callable[["InboxContract", Run], None]


def queued(suite: "InboxContract", run: Run) -> None:
    """The event still waits."""


def consumed(suite: "InboxContract", run: Run) -> None:
    """The event has moved into the log."""
    suite.drain(run)


def dead(suite: "InboxContract", run: Run) -> None:
    """The event has ended without a decision."""
    held = suite.claim_one(run)
    commit(run, decided(held, consumed=[], dead=held.events, dead_reason="poison"))


FATES = pytest.mark.parametrize("fate", [queued, consumed, dead])


class InboxContract(Uses):
    """Publishing, and counting what waits."""

    def test_answers_come_in_order(self, run: Run) -> None:
        """Each event is answered in the order given, and waits in that order in its stream."""
        answers = self.publish(run, event(2), event(1, "load/2"), event(1), event(3))
        assert [(one.event_id, one.created) for one in answers] == [
            ("e2", True),
            ("e1", True),
            ("e1", True),
            ("e3", True),
        ]
        of_stream = [one.position for one in (answers[0], answers[2], answers[3])]
        assert of_stream == sorted(of_stream, key=lambda position: position or 0)
        claims = {held.stream: held for held in self.claim(run)}
        assert names(claims[STREAM].events) == ["e2", "e1", "e3"]
        assert names(claims["load/2"].events) == ["e1"]

    def test_nothing_is_nothing(self, run: Run) -> None:
        """No events are fine, and write nothing."""
        before = run(everything)
        assert self.publish(run) == []
        assert run(everything) == before

    def test_what_is_claimed_is_what_was_published(self, run: Run, clock: FakeClock) -> None:
        """An event keeps its exact text, kind, version and the time at which it was accepted."""
        raw = '{ "ä": 1.50,"b":[]}'
        accepted = clock.wall()
        self.publish(run, replace(event(1, data=raw), version=3))
        clock.advance(60)
        (one,) = self.claim_one(run).events
        assert (one.event_id, one.kind, one.version, one.data) == ("e1", "ping", 3, raw)
        assert one.received_at == accepted

    @FATES
    def test_the_same_again_is_the_first_one(self, run: Run, fate: Fate) -> None:
        """The same id with the same content is answered with the first one, whatever became of it."""
        (first,) = self.publish(run, event(1))
        fate(self, run)
        before = run(everything)
        place = None if fate is consumed else first.position
        assert self.publish(run, event(1)) == [Published("e1", place, False)]
        assert run(everything) == before
        self.drain(run)
        assert run(logged) == ([] if fate is dead else [(1, "e1")])

    @FATES
    @pytest.mark.parametrize("other", [event(1, data='{"n":2}'), replace(event(1), kind="pong")], ids=["data", "kind"])
    def test_other_content_is_refused(self, run: Run, fate: Fate, other: NewEvent) -> None:
        """The same id with another kind or other data is an error, whatever became of the first one."""
        self.publish(run, event(1))
        fate(self, run)
        before = run(everything)
        with pytest.raises(KeyConflict) as refused:
            self.publish(run, event(2), other, event(3, "load/2"))
        assert (refused.value.key, refused.value.about["stream"]) == ("e1", STREAM)
        assert run(everything) == before

    @FATES
    def test_a_refusal_leaves_nothing(self, run: Run, fate: Fate) -> None:
        """A refused call has written nothing, even if its caller goes on and commits."""

        def go_on(conn: Connection, *, now: int) -> None:
            with pytest.raises(KeyConflict):
                self.inbox.publish(conn, [event(2), event(1, data="0"), event(3)], now=now)

        self.publish(run, event(1))
        fate(self, run)
        before = run(everything)
        run(go_on)
        assert run(everything) == before

    @FATES
    @pytest.mark.parametrize(
        ("first", "again"),
        [('{"a":1,"b":2.0}', '{ "b": 2, "a": 1.0 }'), ('"\\u00e9"', '"é"'), ("[1e2]", "[100]")],
    )
    def test_content_is_canonical_json(self, run: Run, fate: Fate, first: str, again: str) -> None:
        """Texts that mean the same JSON value are the same content; the first text is kept."""
        self.publish(run, event(1, data=first))
        fate(self, run)
        (answer,) = self.publish(run, event(1, data=again))
        assert not answer.created

    def test_twice_in_one_call(self, run: Run) -> None:
        """The same event twice in one call is one event; with other content it is refused."""
        first, again, other = self.publish(run, event(1), event(1, data='{"n":1.0}'), event(2))
        assert first.created
        assert again == Published("e1", first.position, False)
        assert other.created
        before = run(everything)
        with pytest.raises(KeyConflict):
            self.publish(run, event(3), event(3, data="2"))
        assert run(everything) == before

    def test_an_id_belongs_to_its_stream(self, run: Run) -> None:
        """Another stream may have an event of the same id, with other content."""
        self.publish(run, event(1))
        (answer,) = self.publish(run, event(1, "load/2", "2"))
        assert answer.created

    def test_a_deleted_stream_is_refused(self, run: Run) -> None:
        """Nothing is published to a deleted stream, and with it nothing else of the call."""
        run(delete_stream, "load/2")
        before = run(everything)
        with pytest.raises(StreamDeleted) as refused:
            self.publish(run, event(1), event(1, "load/2"))
        assert refused.value.stream == "load/2"
        assert run(everything) == before

    def test_waiting_events_are_counted(self, run: Run) -> None:
        """`waiting` and `before` count a stream's events that wait, claimed or not, but not the dead."""
        answers = self.publish(run, *(event(n) for n in range(4)), event(9, "load/2"))
        held = next(one for one in self.claim(run, batch=2) if one.stream == STREAM)
        assert run(self.inbox.waiting, STREAM) == 4
        assert run(self.inbox.before, STREAM, answers[2].position) == 2
        commit(run, decided(held, consumed=held.events[:1], dead=held.events[1:], dead_reason="poison"))
        assert run(self.inbox.waiting, STREAM) == 2
        assert run(self.inbox.before, STREAM, answers[2].position) == 0
        assert run(self.inbox.waiting, "load/3") == 0


class InboxRaces(Uses):
    """Publishers beside turns and beside each other. They need a database of their own, not a way to run."""

    @pytest.mark.parametrize("kept", [True, False])
    def test_two_publish_one_event(self, database: Database, clock: FakeClock, kept: bool) -> None:
        """The second publisher of an id waits for the first, and is answered by what became of it."""
        other = another(database, clock)
        with database.engine.connect() as conn, conn.begin() as transaction:
            (first,) = self.inbox.publish(database.bind(conn), [event(1)], now=1)
            waiting = Waiting(database, partial(other.transact, self.inbox.publish, [event(1)]))
            waiting.blocked()
            transaction.commit() if kept else transaction.rollback()
        (second,) = waiting.result()
        other.close()
        assert second.created is not kept
        assert not kept or second.position == first.position
        assert database.read(waits) == [(STREAM, "e1", None)]

    def test_publishing_again_while_it_lands(self, database: Database, clock: FakeClock) -> None:
        """A publisher that waited for the commit that consumed its event finds it in the log."""
        run, other = database.transact, another(database, clock)
        self.publish(run, event(1))
        held = self.claim_one(run)
        with database.engine.connect() as conn, conn.begin() as transaction:
            call = partial(commit, lambda fn, *args: fn(database.bind(conn), *args, now=clock.wall()))
            call(decided(held))
            waiting = Waiting(database, partial(other.transact, self.inbox.publish, [event(1)]))
            waiting.blocked()
            transaction.commit()
        assert waiting.result() == [Published("e1", None, False)]
        other.close()
        assert database.read(waits) == []

    def test_a_snapshot_that_is_too_old(self, database: Database) -> None:
        """A REPEATABLE READ publisher that cannot see its event in the log puts it back; no turn gets it."""
        if database.is_sqlite:
            pytest.skip("SQLite's transactions are serial")
        run = database.transact
        self.publish(run, event(1))
        with database.engine.connect() as conn:
            database.bind(conn.execution_options(isolation_level="REPEATABLE READ"))
            with conn.begin():
                conn.execute(text("SELECT 1 FROM pg_class"))
                self.drain(run)
                (answer,) = self.inbox.publish(conn, [event(1), event(2)], now=1)[:1]
                assert answer.created
        assert names(self.claim_one(run, "t2").events) == ["e2"]
        assert database.read(waits) == [(STREAM, "e2", None)]
        assert database.read(logged) == [(1, "e1")]

    def test_a_dropped_event_leaves_no_claim(self, database: Database) -> None:
        """If all that a too old snapshot put back is dropped, nothing is claimed and nothing stays."""
        if database.is_sqlite:
            pytest.skip("SQLite's transactions are serial")
        run = database.transact
        self.publish(run, event(1))
        with database.engine.connect() as conn:
            database.bind(conn.execution_options(isolation_level="REPEATABLE READ"))
            with conn.begin():
                conn.execute(text("SELECT 1 FROM pg_class"))
                self.drain(run)
                self.inbox.publish(conn, [event(1)], now=1)
        assert self.claim(run, "t2") == []
        assert database.read(everything)[:2] == [[], []]

    def test_an_open_publisher_blocks_nobody(self, database: Database, clock: FakeClock) -> None:
        """While a user's transaction that published is open, claims, commits and publishers go on at once."""
        if database.is_sqlite:
            pytest.skip("on SQLite an open transaction that wrote blocks every writer")

        def hurried(fn: Any, *args: Any, **kwargs: Any) -> Any:
            def inside(conn: Connection, *, now: int) -> Any:
                conn.execute(text("SET LOCAL lock_timeout = 1"))
                return fn(conn, *args, now=now, **kwargs)

            return database.transact(inside)

        self.publish(hurried, event(1), event(1, "load/2"))
        with database.engine.connect() as conn, conn.begin():
            self.inbox.publish(database.bind(conn), [event(2), event(2, "load/3")], now=clock.wall())
            self.publish(hurried, event(3), event(3, "load/3"))
            claims = self.claim(hurried)
            assert sorted((one.stream, *names(one.events)) for one in claims) == [
                (STREAM, "e1", "e3"),
                ("load/2", "e1"),
                ("load/3", "e3"),
            ]
            commit(hurried, *(decided(held) for held in claims))
            assert self.claim(hurried) == []
        # Accepted concurrently: in either order; skipped never.
        self.drain(hurried)
        assert [name for _, name in database.read(logged)] == ["e1", "e3", "e2"]
        assert [name for _, name in database.read(logged, "load/3")] == ["e3", "e2"]
