"""What an operator sees of streams: states, what waits and what it says, and lists by name.

It cannot catch what a list costs; the plans show that.
"""

from collections.abc import Callable
from typing import Any

from postroad.model.clock import SECOND, FakeClock
from postroad.model.rows import NewAlert
from postroad.store import queues, stopping, stream_views
from postroad.testing.contracts.deletion import OTHER, delete
from postroad.testing.contracts.streams import LEASE, STREAM, Uses, commit, decided, event, hold

Run = Callable[..., Any]


class StreamViewsContract(Uses):
    """A stream as its operators see it."""

    def test_its_states(self, run: Run, clock: FakeClock) -> None:
        """Idle, waiting, running until its claim is over, backing off until it is due, parked."""

        def state(stream: str = STREAM) -> tuple[str, int, bool]:
            found = run(stream_views.row, stream, now=clock.wall())
            return found.state, found.attempts, found.until is not None

        assert run(stream_views.row, STREAM, now=clock.wall()) is None
        self.publish(run, event(1))
        assert state() == ("waiting", 0, False)
        held = self.claim_one(run)
        assert state() == ("running", 1, True)
        run(queues.back_off, hold(held), delay=60 * SECOND, error="e")
        assert state() == ("backing_off", 1, True)
        clock.advance(60)
        assert state() == ("waiting", 1, False)
        held = self.claim_one(run, "t2")
        clock.advance(30)
        assert state() == ("waiting", 2, False)
        run(queues.park, hold(held), error="e", alert=NewAlert(code="turn.parked", subject=STREAM))
        assert state() == ("parked", 2, False)
        self.publish(run, event(1, OTHER))
        commit(run, decided(self.claim_one(run, "t3")))
        assert state(OTHER) == ("idle", 0, False)

    def test_what_waits(self, run: Run, clock: FakeClock) -> None:
        """Each event by its place in the line, its key and since when; the dead ones are counted."""
        self.publish(run, event(1), event(2))
        held = self.claim_one(run, batch=1)
        commit(run, decided(held, consumed=[], dead=held.events, dead_reason="poison"))
        clock.advance(5)
        self.publish(run, event(3))
        found = run(stream_views.row, STREAM, now=clock.wall())
        assert [(one.position, one.key, one.kind) for one in found.waiting] == [(0, "e2", "ping"), (1, "e3", "ping")]
        assert (found.waiting[1].received_at - found.waiting[0].received_at).total_seconds() == 5
        assert (found.dead, found.why.startswith("Events have waited since")) == (1, True)

    def test_a_withdrawn_event_is_no_dead_one(self, run: Run, clock: FakeClock) -> None:
        """What a stop has withdrawn and what was dropped with its stream is not counted as dead, but can be seen."""
        self.publish(run, event(1))
        held = self.claim_one(run)
        commit(run, decided(held, consumed=[], dead=held.events, dead_reason="poison"))
        self.publish(run, event(2), stopping.event(STREAM, "s"))
        commit(run, decided(self.claim_one(run, "t2")))
        self.publish(run, event(3))
        delete(run, STREAM)
        assert self.claim(run, "t3") == []
        assert run(stream_views.row, STREAM, now=clock.wall()).dead == 1
        found = run(stream_views.events, STREAM, dead_ones=True, after=None, limit=9)
        assert [(one.key, one.reason) for one in found] == [
            ("e3", queues.STREAM_DELETED), ("e2", stopping.WITHDRAWN), ("e1", "poison"),
        ]  # fmt: skip

    def test_a_worker_that_falls_silent(self, run: Run, clock: FakeClock) -> None:
        """After half a lease without a word it is said since when; a renewal ends that, and so does the claim's end."""

        def silent() -> tuple[str, float | None]:
            found = run(stream_views.row, STREAM, now=clock.wall())
            assert (found.silent_since is None) == ("last heard of at" not in found.why)
            since = None if found.silent_since is None else (clock.now - found.silent_since).total_seconds()
            return found.state, since

        self.publish(run, event(1))
        held = self.claim_one(run)
        clock.advance(LEASE / SECOND / 2)
        assert silent() == ("running", None)
        clock.advance(1)
        assert silent() == ("running", LEASE / SECOND / 2 + 1)
        run(queues.renew, [hold(held)], lease=LEASE)
        assert silent() == ("running", None)
        clock.advance(LEASE / SECOND - 1)
        assert silent() == ("running", LEASE / SECOND - 1)
        clock.advance(1)
        assert silent() == ("waiting", None)
        again = self.claim_one(run, "t2")
        clock.advance(LEASE / SECOND - 1)
        run(queues.back_off, hold(again), delay=60 * SECOND, error="e")
        assert silent() == ("backing_off", None)

    def test_what_its_events_say(self, run: Run, clock: FakeClock) -> None:
        """Those that wait, oldest first, and those that are dead, newest first, page by page with their payloads."""

        def page(**how: Any) -> list[Any]:
            given = {"dead_ones": False, "after": None, "limit": 2, **how}
            found: list[Any] = run(stream_views.events, STREAM, **given)
            return found

        self.publish(run, *(event(n, data=f'{{"n":{n}}}') for n in (1, 2, 3)), event(1, OTHER))
        held = next(one for one in self.claim(run, batch=2) if one.stream == STREAM)
        clock.advance(5)
        commit(run, decided(held, consumed=[], dead=held.events, dead_reason="poison"))
        self.publish(run, *(event(n, data=f'{{"n":{n}}}') for n in (4, 5)))
        first = page()
        assert [(one.key, one.data, one.reason, one.ended_at) for one in first] == [
            ("e3", {"n": 3}, None, None), ("e4", {"n": 4}, None, None),
        ]  # fmt: skip
        assert [one.key for one in page(after=first[-1].cursor)] == ["e5"]
        (last,) = page(dead_ones=True, limit=1)
        assert (last.key, last.data, last.reason) == ("e2", {"n": 2}, "poison")
        assert (last.ended_at, (last.ended_at - last.received_at).total_seconds()) == (clock.now, 5)
        assert [one.key for one in page(dead_ones=True, after=last.cursor)] == ["e1"]
        assert page(dead_ones=True, after=0) == page(after=10**9) == []

    def test_lists(self, run: Run, clock: FakeClock) -> None:
        """By name, by type and by state, page by page; a deleted stream only as long as something waits in it."""

        def names(limit: int = 10, **wanted: Any) -> list[str]:
            found = run(stream_views.list_, stream_views.Wanted(**wanted), limit=limit, now=clock.wall())
            return [one.stream for one in found]

        assert names() == []
        self.publish(run, event(1, "load/0"), event(1, "load/1"))
        commit(run, *(decided(one) for one in self.claim(run)))
        self.publish(run, event(1, "load/2"))
        held = self.claim_one(run, "t2")
        self.publish(run, *(event(1, stream) for stream in ("load/3", "load/4", "loads/1", "a/1")))
        delete(run, "load/0", "load/4")
        assert names() == ["a/1", "load/1", "load/2", "load/3", "load/4", "loads/1"]
        assert names(type="load", limit=2) == ["load/1", "load/2"]
        assert names(type="load", limit=2, after="load/2") == ["load/3", "load/4"]
        assert names(state="idle") == ["load/1"]
        assert names(state="running") == [held.stream] == ["load/2"]
        assert names(state="waiting", limit=2) == ["a/1", "load/3"]
        assert names(state="parked") == names(type="none") == names(after="z") == []

    def test_every_state_is_found_by_name(self, run: Run, clock: FakeClock) -> None:
        """Among many that are in other states too, behind a name and page by page."""
        names = [f"load/{n:03}" for n in range(0, 250, 25)]
        self.publish(run, *(event(1, name) for name in names))
        for held in self.claim(run):
            match stream_views.STATES[int(held.stream[-3:]) // 25 % 5]:
                case "idle":
                    commit(run, decided(held))
                case "waiting":
                    run(queues.release, hold(held))
                case "backing_off":
                    run(queues.back_off, hold(held), delay=60 * SECOND, error="e")
                case "parked":
                    alert = NewAlert(code="turn.parked", subject=held.stream)
                    run(queues.park, hold(held), error="e", alert=alert)
        for number, state in enumerate(stream_views.STATES):
            for after, limit, found in (("", 9, 2), (names[number], 9, 1), ("", 1, 1), (names[number + 5], 9, 0)):
                wanted = stream_views.Wanted(state=state, after=after)
                seen = run(stream_views.list_, wanted, limit=limit, now=clock.wall())
                assert [one.state for one in seen] == [state] * found, (state, after)
                assert [one.stream for one in seen] == [
                    name for name in names if name > after and names.index(name) % 5 == number
                ][:limit]
