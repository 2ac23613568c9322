"""What an operator sees of streams: states, what waits, and lists by name.

It cannot catch what a list costs; the plans show that.
"""

from collections.abc import Callable
from typing import Any

from postroad.model.clock import SECOND, FakeClock
from postroad.model.rows import NewAlert
from postroad.store import queues, stream_views
from postroad.testing.contracts.deletion import OTHER, delete
from postroad.testing.contracts.streams import STREAM, Uses, commit, decided, event, hold

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
