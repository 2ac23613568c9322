"""What a queue promises: each stream with one holder, exact sets that a retry keeps, no event stranded.

It cannot catch what depends on several hosts' clocks; `now` is given.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Connection

from postroad.model import ids
from postroad.model.clock import SECOND, FakeClock
from postroad.model.errors import StreamDeleted
from postroad.model.lifecycle import RunEnd
from postroad.store import log, runs
from postroad.store.database import Database
from postroad.testing.contracts.dispatches import another, in_threads
from postroad.testing.contracts.streams import (
    LEASE,
    STREAM,
    Run,
    Uses,
    append_next,
    commit,
    decided,
    delete_stream,
    entry,
    event,
    fronts,
    hold,
    logged,
    names,
    queue_rows,
    waits,
)


class ClaimContract(Uses):
    """Who gets which events."""

    def test_a_claim_is_the_exact_set(self, run: Run, clock: FakeClock) -> None:
        """A claim carries the stream's first events in order, its version, and ids that its cause gives."""
        run(log.append, STREAM, [entry("a"), entry("b")], expected_version=0)
        self.publish(run, *(event(n) for n in range(5)))
        held = self.claim_one(run, "t1", batch=3)
        assert names(held.events) == ["e0", "e1", "e2"]
        assert (held.stream, held.token, held.attempt, held.version) == (STREAM, "t1", 1, 2)
        assert held.until == clock.wall() + LEASE
        assert held.turn_id == ids.turn_id(STREAM, ["e0", "e1", "e2"])
        assert held.run_id == ids.run_id("t1", STREAM)
        assert not held.interrupted
        assert not held.alone

    def test_a_claim_starts_a_run(self, run: Run, clock: FakeClock) -> None:
        """Each claimed turn has its run from the same transaction on, and the commit ends it."""
        self.publish(run, event(1))
        held = self.claim_one(run)
        (started,) = run(runs.of_stream, STREAM)
        assert (started.run_id, started.turn_id, started.attempt) == (held.run_id, held.turn_id, 1)
        assert (started.started_at, started.ended_at, started.end) == (clock.wall(), None, None)
        clock.advance(1)
        commit(run, decided(held))
        (ended,) = run(runs.of_stream, STREAM)
        assert (ended.ended_at, ended.end) == (clock.wall(), RunEnd.COMMITTED)

    def test_a_claimed_stream_is_not_claimed(self, run: Run) -> None:
        """While a claim runs nobody else gets the stream, whatever arrives; the next turn gets that."""
        self.publish(run, event(1))
        held = self.claim_one(run)
        self.publish(run, event(2))
        assert self.claim(run, "t2") == []
        commit(run, decided(held))
        following = self.claim_one(run, "t2")
        assert names(following.events) == ["e2"]
        assert (following.version, following.attempt) == (1, 1)
        commit(run, decided(following))
        assert run(queue_rows) == []

    def test_only_the_type_that_was_asked_for(self, run: Run) -> None:
        """A claim looks at streams of its type alone, also when it walks."""
        self.publish(run, event(1, "chat/1"), event(1, "loads/1"), *(event(n, "a/1") for n in range(9)))
        assert self.claim(run) == []
        assert [one.stream for one in self.claim(run, stream_type="chat")] == ["chat/1"]

    def test_the_oldest_streams_come_first(self, run: Run, clock: FakeClock) -> None:
        """A claim takes no more than its limit, the streams that have waited longest."""
        for number in (3, 1, 2):
            self.publish(run, event(1, f"load/{number}"))
            clock.advance(1)
        assert [one.stream for one in self.claim(run, "t1", limit=2)] == ["load/3", "load/1"]
        assert [one.stream for one in self.claim(run, "t2", limit=2)] == ["load/2"]

    def test_known_and_new_streams_are_mixed_by_age(self, run: Run, clock: FakeClock) -> None:
        """A stream that was freed with events left waits its turn behind older new ones, and before younger."""
        self.publish(run, event(1), event(2))
        held = self.claim_one(run, batch=1)
        clock.advance(1)
        self.publish(run, event(1, "load/2"))
        clock.advance(1)
        commit(run, decided(held))
        clock.advance(1)
        self.publish(run, event(1, "load/3"))
        order = [self.claim_one(run, f"c{n}", limit=1).stream for n in range(3)]
        assert order == ["load/2", STREAM, "load/3"]

    def test_ready_at_says_when_not_which(self, run: Run, clock: FakeClock) -> None:
        """A stream is looked at when its first event is ready; the set is what waits by then, by position."""
        later = clock.wall() + 60 * SECOND
        self.publish(run, event(1, ready_at=later), event(1, "load/2", ready_at=later))
        assert self.claim(run) == []
        self.publish(run, event(2))
        assert names(self.claim_one(run).events) == ["e1", "e2"]
        clock.advance(60)
        assert self.claim_one(run, "t2", takeover=False).stream == "load/2"

    def test_an_event_that_landed_is_dropped(self, run: Run) -> None:
        """An inbox row whose event is in the log already never reaches a turn, new or tried again."""
        self.publish(run, event(1), event(2), event(3))
        run(append_next, STREAM, entry("e1"))
        held = self.claim_one(run)
        assert names(held.events) == ["e2", "e3"]
        run(self.queue.back_off, hold(held), delay=0, error="")
        run(append_next, STREAM, entry("e3"))
        again = self.claim_one(run, "t2")
        assert names(again.events) == ["e2"]
        assert again.turn_id == ids.turn_id(STREAM, ["e2"])
        commit(run, decided(again))
        assert run(waits) == []
        assert run(queue_rows) == []

    def test_a_deleted_stream_ends_its_events(self, run: Run) -> None:
        """What waits in a deleted stream, claimed before or not, ends with its reason and is never decided."""
        self.publish(run, event(1), event(2), event(1, "load/2"))
        held = next(one for one in self.claim(run, batch=1) if one.stream == STREAM)
        run(delete_stream, STREAM)
        run(delete_stream, "load/3")
        with pytest.raises(StreamDeleted):
            commit(run, decided(held))
        run(self.queue.release, hold(held))
        assert self.claim(run, "t2") == []
        assert [row for row in run(waits) if row[0] == STREAM] == [
            (STREAM, "e1", "stream_deleted"),
            (STREAM, "e2", "stream_deleted"),
        ]
        assert [row.stream for row in run(queue_rows)] == ["load/2"]
        assert run(logged) == []

    def test_a_stream_deleted_before_its_first_claim(self, run: Run) -> None:
        """A new stream that was deleted while events were on their way ends them too."""
        self.publish(run, event(1))
        run(delete_stream, STREAM)
        assert self.claim(run) == []
        assert run(waits) == [(STREAM, "e1", "stream_deleted")]
        assert run(queue_rows) == []


class FrontContract(Uses):
    """Many events of few streams."""

    def test_a_deep_stream_hides_nobody(self, run: Run) -> None:
        """Events of a claimed stream that fill the front are walked around, and adopted off the front."""
        self.publish(run, *(event(n) for n in range(30)))
        deep = self.claim_one(run, batch=2)
        self.publish(run, event(1, "load/2"), event(1, "load/3"))
        found = self.look(run, "t2", limit=2)
        assert found.clogged
        assert [one.stream for one in found.claims] == ["load/2", "load/3"]
        assert run(self.queue.adopt, stream_type="load") == 32
        assert run(fronts) == [0] * 32
        self.publish(run, event(1, "load/4"))
        found = self.look(run, "t3", limit=2)
        assert not found.clogged
        assert [one.stream for one in found.claims] == ["load/4"]
        commit(run, decided(deep))
        self.drain(run)
        assert [name for _, name in run(logged)] == [f"e{n}" for n in range(30)]

    def test_what_is_off_the_front_keeps_its_row(self, run: Run) -> None:
        """A freed stream whose events are off the front stays known until the last of them is gone."""
        self.publish(run, event(1), event(2))
        held = self.claim_one(run, batch=1)
        run(self.queue.adopt, stream_type="load")
        assert commit(run, decided(held))[0].events_left
        assert [row.state for row in run(queue_rows)] == ["ready"]
        held = self.claim_one(run, "t2")
        assert not commit(run, decided(held))[0].events_left
        assert run(queue_rows) == []

    def test_only_known_streams_are_adopted(self, run: Run) -> None:
        """Events of a stream without a queues row stay at the front; they could be found nowhere else."""
        self.publish(run, event(1), event(1, "chat/1"))
        assert run(self.queue.adopt, stream_type="load") == 0
        assert run(fronts) == [1, 1]

    def test_the_walk_goes_on_from_its_cursor(self, run: Run) -> None:
        """A walk is bounded; from its cursor the next one goes on until it has come round."""
        for number in range(8):
            self.publish(run, *(event(n, f"load/{number}") for n in range(3)))
        assert len(self.claim(run)) == 8
        self.publish(run, event(1, "load/8"), event(1, "load/9"))
        cursors = [""]
        won = []
        for token in "abcde":
            found = self.look(run, token, limit=1, cursor=cursors[-1])
            assert found.clogged
            won += [one.stream for one in found.claims]
            cursors.append(found.cursor)
        assert won == ["load/8", "load/9"]
        assert cursors == ["", "load/3", "load/7", "load/8", "", "load/3"]


class QueueRaces(Uses):
    """Several claimants. They need a database of their own, not a way to run."""

    def test_claimants_share_streams(self, database: Database, clock: FakeClock) -> None:
        """Claimants that look at the same time get different streams, and together all of them."""
        self.publish(database.transact, *(event(1, f"load/{n}") for n in range(40)))
        others = [another(database, clock) for _ in range(4)]

        def work(place: int) -> list[str]:
            run, cursor, mine = others[place].transact, "", list[str]()
            for number in range(40):
                found = self.look(run, f"t{place}.{number}", limit=3, cursor=cursor)
                mine += [one.stream for one in found.claims]
                cursor = found.cursor
                if found.clogged:
                    run(self.queue.adopt, stream_type="load")
            return mine

        results = in_threads(*(partial(work, place) for place in range(4)))
        for other in others:
            other.close()
        assert sorted(name for names in results for name in names) == sorted(f"load/{n}" for n in range(40))

    @pytest.mark.parametrize("known", [False, True])
    def test_a_claim_under_way_is_passed_by(self, database: Database, clock: FakeClock, known: bool) -> None:
        """A claimant doesn't wait for another one that has not committed yet: it takes other streams."""
        if database.is_sqlite:
            pytest.skip("SQLite's transactions are serial")
        run = database.transact
        self.publish(run, event(1))
        clock.advance(1)
        self.publish(run, event(1, "load/2"))
        if known:
            for held in self.claim(run, "t0"):
                run(self.queue.release, hold(held))

        with database.engine.connect() as conn, conn.begin() as transaction:
            first = self.claim_one(partial(self.over, database.bind(conn), clock), "t1", limit=1)
            assert self.claim_one(run, "t2").stream != first.stream
            transaction.rollback()
        assert self.claim_one(run, "t3").stream == first.stream

    @staticmethod
    def over(conn: Connection, clock: FakeClock, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run on a connection that stays open."""
        return fn(conn, *args, now=clock.wall(), **kwargs)
