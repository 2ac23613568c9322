"""What becomes of a claim: it is settled, lost, split or parked; and streams whose events keep coming.

It cannot catch what depends on several hosts' clocks; `now` is given.
"""

from typing import Any

import pytest

from postroad.model import ids
from postroad.model.clock import SECOND, FakeClock
from postroad.model.errors import StaleClaim
from postroad.model.lifecycle import RunEnd
from postroad.model.rows import Hold, NewAlert
from postroad.store import alerts, runs
from postroad.testing.contracts.streams import (
    LEASE,
    STREAM,
    Run,
    Uses,
    commit,
    decided,
    ends,
    event,
    everything,
    hold,
    logged,
    names,
    queue_rows,
    take_away,
)

PARKED = NewAlert(code="turn.parked", subject=STREAM)


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
        """A conflict is a reason of its own, may be tried again at once, and is no failed attempt."""
        self.publish(run, event(1))
        held = self.claim_one(run)
        run(self.queue.back_off, hold(held), delay=0, error="", end=RunEnd.CONFLICT)
        assert self.claim_one(run, "t2").attempt == 1
        assert sorted(map(str, run(ends))) == ["None", "conflict"]

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

    def test_a_takeover_is_put_back(self, run: Run, clock: FakeClock) -> None:
        """What was taken over and did not begin is taken over again, as the same attempt; a lost hold is left alone."""
        self.publish(run, event(1), event(1, "load/2"))
        self.claim(run)
        clock.advance(30)
        mine, other = sorted(self.claim(run, "t2"), key=lambda one: one.stream)
        run(self.queue.put_back, [hold(mine), Hold(other.stream, "t1")])
        again = self.claim_one(run, "t3")
        assert (again.stream, again.turn_id, again.attempt) == (mine.stream, mine.turn_id, mine.attempt)
        assert again.interrupted
        before = run(everything)
        run(self.queue.put_back, [])
        assert run(everything) == before

    def test_a_parked_stream_waits_for_a_person(self, run: Run, clock: FakeClock) -> None:
        """A parked stream is not claimed again by itself, ever, and others don't wait for it."""
        self.publish(run, event(1))
        held = self.claim_one(run)
        run(self.queue.park, hold(held), error="what now?", alert=PARKED)
        self.publish(run, event(2), event(1, "load/2"))
        clock.advance(10**8)
        assert self.claim_one(run, "t2").stream == "load/2"
        assert run(ends) == ["stopped"]
        assert run(runs.of_stream, STREAM)[0].error == "what now?"
        assert [one.code for one in run(alerts.list_)] == [PARKED.code]

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
        more = {
            "back_off": {"delay": 0, "error": ""},
            "release": {},
            "park": {"error": "", "alert": PARKED},
        }.get(verb, {"error": ""})
        before = run(everything), run(ends), run(alerts.list_)
        with pytest.raises(StaleClaim) as refused:
            run(getattr(self.queue, verb), hold(held), **more)
        assert refused.value.about["stream"] == STREAM
        assert (run(everything), run(ends), run(alerts.list_)) == before

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
