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
from postroad.model.errors import StaleClaim, StreamDeleted
from postroad.model.lifecycle import RunEnd
from postroad.model.rows import Hold
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
    ends,
    entry,
    event,
    everything,
    fronts,
    hold,
    logged,
    names,
    queue_rows,
    take_away,
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


class LifeContract(Uses):
    """What becomes of a claim."""

    def test_back_off_keeps_the_set(self, run: Run, clock: FakeClock) -> None:
        """A failed turn is tried again after its delay with the same events, whatever arrived meanwhile."""
        self.publish(run, event(1), event(2))
        held = self.claim_one(run)
        self.publish(run, event(3))
        run(self.queue.back_off, hold(held), delay=5 * SECOND, error="no luck")
        assert self.claim(run, "t2") == []
        clock.advance(5)
        again = self.claim_one(run, "t2")
        assert names(again.events) == ["e1", "e2"]
        assert (again.turn_id, again.attempt, again.interrupted) == (held.turn_id, 2, False)
        assert again.run_id != held.run_id
        assert run(ends) == [None, "failed"]
        assert run(runs.of_stream, STREAM)[1].error == "no luck"
        commit(run, decided(again))
        following = self.claim_one(run, "t3")
        assert (names(following.events), following.attempt) == (["e3"], 1)

    def test_back_off_says_why(self, run: Run) -> None:
        """A conflict is a reason of its own, and may be tried again at once."""
        self.publish(run, event(1))
        held = self.claim_one(run)
        run(self.queue.back_off, hold(held), delay=0, error="", end=RunEnd.CONFLICT)
        assert self.claim_one(run, "t2").attempt == 2
        assert run(ends)[1] == "conflict"

    def test_an_expired_claim_needs_no_reaper(self, run: Run, clock: FakeClock) -> None:
        """Once its lease is over a claim is anybody's, with its set; the lost run ends as interrupted."""
        self.publish(run, event(1))
        held = self.claim_one(run)
        self.publish(run, event(2))
        clock.advance(30)
        again = self.claim_one(run, "t2")
        assert names(again.events) == ["e1"]
        assert (again.turn_id, again.attempt, again.interrupted) == (held.turn_id, 2, True)
        assert run(ends) == [None, "interrupted"]
        run(self.queue.back_off, hold(again), delay=0, error="")
        assert not self.claim_one(run, "t3").interrupted

    def test_a_lease_holds_to_its_end(self, run: Run, clock: FakeClock) -> None:
        """Before its lease is over a claim is its holder's."""
        self.publish(run, event(1))
        self.claim_one(run)
        clock.advance(29.999999)
        assert self.claim(run, "t2") == []

    def test_a_late_commit_is_accepted_if_nobody_came(self, run: Run, clock: FakeClock) -> None:
        """A claim whose lease is over but whose token is still current commits and is renewed."""
        self.publish(run, event(1))
        held = self.claim_one(run)
        clock.advance(100)
        assert run(self.queue.renew, [hold(held)], lease=LEASE) == []
        assert self.claim(run, "t2") == []
        clock.advance(100)
        commit(run, decided(held))
        assert run(logged) == [(1, "e1")]

    def test_no_takeover(self, run: Run, clock: FakeClock) -> None:
        """Without takeover expired claims are left alone, and everything else is still taken."""
        self.publish(run, event(1), event(1, "load/2"), event(1, "load/3"))
        held = {one.stream: one for one in self.claim(run)}
        run(self.queue.back_off, hold(held["load/2"]), delay=0, error="")
        clock.advance(31)
        self.publish(run, event(1, "load/4"))
        taken = self.claim(run, "t2", takeover=False)
        assert sorted(one.stream for one in taken) == ["load/2", "load/4"]
        assert sorted(one.stream for one in self.claim(run, "t3")) == [STREAM, "load/3"]

    def test_renewing_tells_what_is_lost(self, run: Run, clock: FakeClock) -> None:
        """Renewed claims run for another lease; those of others, of nobody and freed ones are told."""
        self.publish(run, event(1), event(1, "load/2"))
        mine, freed = sorted(self.claim(run), key=lambda one: one.stream)
        commit(run, decided(freed))
        strange = [Hold(mine.stream, "t2"), Hold("load/9", "t1")]
        clock.advance(20)
        assert run(self.queue.renew, [hold(freed), hold(mine)], lease=LEASE) == [hold(freed)]
        assert run(self.queue.renew, strange, lease=LEASE) == strange
        assert run(self.queue.renew, [], lease=LEASE) == []
        clock.advance(20)
        assert self.claim(run, "t2") == []
        clock.advance(10)
        assert self.claim_one(run, "t2").interrupted

    def test_locking_changes_nothing(self, run: Run) -> None:
        """Locking claims, ours or not, changes nothing."""
        self.publish(run, event(1))
        held = self.claim_one(run)
        before = run(everything)
        run(self.queue.lock, [hold(held), Hold(STREAM, "t2"), Hold("load/9", "t1")])
        run(self.queue.lock, [])
        assert run(everything) == before

    def test_what_never_began_is_given_back(self, run: Run, clock: FakeClock) -> None:
        """A released claim is ready at once with its set, and its attempt does not count."""
        self.publish(run, event(1))
        held = self.claim_one(run)
        self.publish(run, event(2))
        run(self.queue.release, hold(held))
        clock.advance(1)
        again = self.claim_one(run, "t2")
        assert (names(again.events), again.attempt, again.interrupted) == (["e1"], 1, False)
        assert run(ends) == [None, "released"]

    def test_a_parked_stream_waits_for_a_person(self, run: Run, clock: FakeClock) -> None:
        """A parked stream is not claimed again by itself, ever, and others don't wait for it."""
        self.publish(run, event(1))
        held = self.claim_one(run)
        run(self.queue.park, hold(held), error="what now?")
        self.publish(run, event(2), event(1, "load/2"))
        clock.advance(10**8)
        assert self.claim_one(run, "t2").stream == "load/2"
        assert run(ends) == ["failed"]
        assert run(runs.of_stream, STREAM)[0].error == "what now?"

    def test_a_split_set_is_tried_one_by_one(self, run: Run) -> None:
        """After a split each event is a turn of its own, with attempts of its own, in order; then all is as ever."""
        self.publish(run, event(1), event(2), event(3))
        held = self.claim_one(run)
        self.publish(run, event(4), event(5))
        run(self.queue.back_off, hold(held), delay=0, error="")
        held = self.claim_one(run, "t2")
        run(self.queue.split, hold(held), error="at its cap")
        assert run(ends)[0] == "failed"

        first = self.claim_one(run, "t3")
        assert (names(first.events), first.attempt, first.alone) == (["e1"], 1, True)
        assert first.turn_id == ids.turn_id(STREAM, ["e1"])
        run(self.queue.back_off, hold(first), delay=0, error="")
        first = self.claim_one(run, "t4")
        assert (names(first.events), first.attempt, first.alone) == (["e1"], 2, True)
        committed = commit(run, decided(first, consumed=[], dead=first.events, dead_reason="poison"))
        assert committed[0].events_left

        second = self.claim_one(run, "t5")
        assert (names(second.events), second.attempt, second.alone) == (["e2"], 1, True)
        commit(run, decided(second))
        third = self.claim_one(run, "t6")
        assert (names(third.events), third.attempt, third.alone) == (["e3"], 1, True)
        commit(run, decided(third))
        rest = self.claim_one(run, "t7")
        assert (names(rest.events), rest.attempt, rest.alone) == (["e4", "e5"], 1, False)
        commit(run, decided(rest))
        assert [name for _, name in run(logged)] == ["e2", "e3", "e4", "e5"]
        assert run(queue_rows) == []

    def test_a_set_of_one_can_be_split(self, run: Run) -> None:
        """Splitting one event, or one that is alone already, starts its attempts again and loses nothing."""
        self.publish(run, event(1), event(2))
        for token in ("t1", "t2"):
            run(self.queue.split, hold(self.claim_one(run, token)), error="")
        alone = self.claim_one(run, "t3")
        assert (names(alone.events), alone.attempt, alone.alone) == (["e1"], 1, True)
        commit(run, decided(alone))
        assert names(self.claim_one(run, "t4").events) == ["e2"]

    def test_a_set_whose_events_went_away(self, run: Run) -> None:
        """A retried set is what is left of it; if nothing is, the stream is free again with what waits."""
        self.publish(run, event(1), event(2))
        held = self.claim_one(run)
        self.publish(run, event(3))
        run(self.queue.back_off, hold(held), delay=0, error="")
        run(take_away, held.events[:1])
        held = self.claim_one(run, "t2")
        assert names(held.events) == ["e2"]
        run(self.queue.back_off, hold(held), delay=0, error="")
        run(take_away, held.events)
        assert self.claim(run, "t3") == []
        assert names(self.claim_one(run, "t4").events) == ["e3"]

    def test_a_stream_that_nothing_is_left_of(self, run: Run, clock: FakeClock) -> None:
        """If all of a lost claim's events went away its run ends and the stream is forgotten."""
        self.publish(run, event(1))
        run(take_away, self.claim_one(run).events)
        clock.advance(30)
        assert self.claim(run, "t2") == []
        assert run(queue_rows) == []
        assert run(ends) == ["interrupted"]

    @pytest.mark.parametrize("verb", ["back_off", "release", "split", "park"])
    @pytest.mark.parametrize("lost", ["taken", "freed", "left"])
    def test_a_stale_settle_changes_nothing(self, run: Run, clock: FakeClock, verb: str, lost: str) -> None:
        """Whoever's claim is over changes nothing by settling it, and is told so."""
        self.publish(run, event(1))
        held = self.claim_one(run)
        if lost == "taken":
            clock.advance(30)
            self.claim_one(run, "t2")
        elif lost == "freed":
            commit(run, decided(held))
        else:
            run(self.queue.back_off, hold(held), delay=0, error="")
        more = {"back_off": {"delay": 0, "error": ""}, "release": {}}.get(verb, {"error": ""})
        before = run(everything), run(ends)
        with pytest.raises(StaleClaim) as refused:
            run(getattr(self.queue, verb), hold(held), **more)
        assert refused.value.about["stream"] == STREAM
        assert (run(everything), run(ends)) == before

    def test_a_stale_run_is_told_apart(self, run: Run, clock: FakeClock) -> None:
        """A run that was thought interrupted and came back ends as stale; one that ended keeps its end."""
        self.publish(run, event(1))
        held = self.claim_one(run)
        clock.advance(30)
        again = self.claim_one(run, "t2")
        run(self.queue.end_stale, hold(held))
        assert run(ends) == [None, "stale"]
        commit(run, decided(again))
        run(self.queue.end_stale, hold(again))
        assert run(ends) == ["committed", "stale"]


class DebounceContract(Uses):
    """A stream whose events keep coming."""

    QUIET: dict[str, Any] = {"debounce": 2 * SECOND, "debounce_max": 5 * SECOND}  # noqa: RUF012

    def test_a_new_stream_waits_until_it_is_quiet(self, run: Run, clock: FakeClock) -> None:
        """Events that come in quick succession are one turn, once nothing has come for the debounce."""
        for number in range(3):
            self.publish(run, event(number))
            clock.advance(1.5)
            assert self.claim(run, **self.QUIET) == []
        clock.advance(0.5)
        assert names(self.claim_one(run, **self.QUIET).events) == ["e0", "e1", "e2"]

    def test_no_longer_than_the_maximum(self, run: Run, clock: FakeClock) -> None:
        """A stream that is never quiet is taken when its oldest event has waited for the maximum."""
        for number in range(5):
            self.publish(run, event(number))
            assert self.claim(run, **self.QUIET) == []
            clock.advance(1)
        assert len(self.claim_one(run, **self.QUIET).events) == 5

    def test_a_maximum_below_the_debounce(self, run: Run, clock: FakeClock) -> None:
        """A maximum that is shorter than the debounce, or none, counts as the debounce."""
        self.publish(run, event(1))
        clock.advance(1.5)
        self.publish(run, event(2))
        clock.advance(0.4)
        assert self.claim(run, debounce=2 * SECOND) == []
        clock.advance(0.1)
        assert len(self.claim_one(run, debounce=2 * SECOND).events) == 2

    def test_a_freed_stream_waits_too(self, run: Run, clock: FakeClock) -> None:
        """What came during a turn waits for more like a new stream's, and blocks no other stream meanwhile."""
        self.publish(run, event(1))
        clock.advance(2)
        held = self.claim_one(run, limit=1, **self.QUIET)
        self.publish(run, event(2))
        commit(run, decided(held))
        self.publish(run, event(1, "load/2"))
        clock.advance(1)
        self.publish(run, event(3))
        clock.advance(1)
        assert self.claim_one(run, "t2", limit=1, **self.QUIET).stream == "load/2"
        assert self.claim(run, "t3", limit=1, **self.QUIET) == []
        clock.advance(1)
        assert names(self.claim_one(run, "t4", limit=1, **self.QUIET).events) == ["e2", "e3"]

    def test_a_retry_waits_for_nothing(self, run: Run, clock: FakeClock) -> None:
        """A set that is tried again is complete: new events don't delay it."""
        self.publish(run, event(1))
        clock.advance(2)
        held = self.claim_one(run, **self.QUIET)
        run(self.queue.back_off, hold(held), delay=0, error="")
        self.publish(run, event(2))
        assert names(self.claim_one(run, "t2", **self.QUIET).events) == ["e1"]

    def test_a_busy_stream_hides_no_quiet_one(self, run: Run, clock: FakeClock) -> None:
        """Streams that fill the front and wait for more don't keep a quiet one behind them waiting."""
        self.publish(run, *(event(n) for n in range(20)))
        clock.advance(1)
        self.publish(run, event(1, "load/2"))
        clock.advance(2)
        self.publish(run, event(99))
        assert self.claim_one(run, limit=2, **self.QUIET).stream == "load/2"


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
