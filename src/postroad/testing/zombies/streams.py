"""Zombies among the workers: whoever lost a stream commits nothing and moves nothing of it any more."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import ClassVar, Protocol

import pytest
from sqlalchemy import Connection

from postroad.model.clock import SECOND, FakeClock
from postroad.model.errors import StaleClaim
from postroad.model.lifecycle import RunEnd
from postroad.model.operations import CallStatus, OperationRow
from postroad.model.rows import Hold, NewAlert, TimerChange, TurnClaim, TurnCommit, TurnCommitted
from postroad.store import alerts, operations, runs, turns
from postroad.store.database import Database
from postroad.testing.contracts.dispatches import Waiting, another, dispatch, enqueue
from postroad.testing.contracts.streams import LEASE, STREAM, Uses, decided, delete_stream, event, hold, take_away
from postroad.testing.zombies.traces import Late, Run, Zombies, about, added, is_told, over

OTHER = "load/2"
NEVER = 10**16
VERBS = (
    "commit", "bury", "drop_landed", "back_off", "conflict", "release", "split", "park", "renew", "start_tool",
    "end_tool",
)  # fmt: skip
# Of the claim's events none has landed, so that there is nothing to drop; and no tool has been started.
IDLE = ("drop_landed", "end_tool")
# What has become of a stream, by the verb that made it so: the new owner's, or the zombie's own before it fell asleep.
BY_ITS_OWNER = {
    "committed": "commit",
    "committed, more waits": "commit",
    "dead": "bury",
    "backed off": "back_off",
    "released": "release",
    "split": "split",
    "parked": "park",
}
BY_ITSELF = {"given back by itself": "release", "committed by itself": "commit"}
FATES = ("claimed", *BY_ITS_OWNER, "put back", "lost again", "deleted", "purged", *BY_ITSELF)


class Turns(Protocol):
    """How turns are committed; `postroad.store.turns` is the one that is built in."""

    def commit(
        self,
        conn: Connection,
        turns: Sequence[TurnCommit],
        *,
        source: str = "turn",
        write: Callable[[Connection], object] | None = None,
        now: int,
    ) -> list[TurnCommitted]:
        """Commit turns together. Raises StaleClaim if the claim of one is over."""

    def drop_landed(self, conn: Connection, hold: Hold, *, now: int) -> int:
        """Take events that are in the log already off a claimed set. Raises StaleClaim."""


class Tools(Protocol):
    """How tool calls are recorded; `postroad.store.operations` is the one that is built in."""

    def start(self, conn: Connection, starts: Sequence[operations.Start], *, now: int) -> list[None]:
        """Write that calls begin. Raises StaleClaim if the claim of one is over."""

    def finish(self, conn: Connection, ends: Sequence[operations.Finish], *, now: int) -> list[None]:
        """Write how calls ended. Raises StaleClaim if the claim of one is over."""


class StreamZombies(Uses, Zombies):
    """A worker whose stream somebody else has claimed since."""

    turns: ClassVar[Turns] = turns
    tools: ClassVar[Tools] = operations

    @pytest.fixture(params=FATES)
    def fate(self, request: pytest.FixtureRequest) -> str:
        """What became of the stream while the zombie slept."""
        fate: str = request.param
        return fate

    @pytest.fixture(params=VERBS)
    def verb(self, request: pytest.FixtureRequest) -> str:
        """What the zombie does."""
        verb: str = request.param
        return verb

    def test_whoever_lost_a_stream(self, run: Run, clock: FakeClock, fate: str) -> None:
        """Whatever has become of its stream, a zombie changes nothing of it, is told, and its run ends as stale."""
        zombie = self.asleep(run)
        self.befall(fate, run, clock, zombie)
        clock.advance(1)
        before = run(self.everything)
        for name, late in self.verbs(zombie).items():
            assert run(is_told, late), f"{name} was accepted"
            assert run(self.everything) == before, f"{name} left a trace"
        self.answers_nothing(run, zombie)
        assert run(self.everything) == before
        self.is_visible(run, zombie, {"release": "released", "commit": "committed"}.get(BY_ITSELF.get(fate, "")))

    def answers_nothing(self, run: Run, zombie: TurnClaim) -> None:
        """What a claimant may do without an answer."""
        run(self.queue.lock, [hold(zombie)])
        run(self.queue.put_back, [hold(zombie)])

    def is_visible(self, run: Run, zombie: TurnClaim, own: str | None) -> None:
        """A run that has not ended by itself is ended as stale, and nothing else is changed."""
        before = run(self.everything)
        run(self.queue.end_stale, hold(zombie))
        after = run(self.everything)
        assert [name for name in before if before[name] != after[name]] == ([] if own else ["runs"])
        ended = {one.run_id: one.end for one in run(runs.of_stream, STREAM)}
        assert ended.pop(zombie.run_id) == (own or "stale")
        assert "stale" not in ended.values()

    def test_it_is_no_zombie_before_somebody_came(self, run: Run, clock: FakeClock, verb: str) -> None:
        """A lease that is over harms nobody: while nobody has claimed the stream, each verb does what it does."""
        late = self.asleep(run)
        clock.advance(LEASE / SECOND)
        before = run(self.everything)
        assert not run(is_told, self.verbs(late)[verb])
        assert (run(self.everything) != before) == (verb not in IDLE)

    def test_one_zombie_among_the_living(self, run: Run, clock: FakeClock) -> None:
        """A pass has lost one of its streams: what it does to both touches only the one that it holds, or neither."""
        self.publish(run, event(1), event(1, OTHER))
        zombie, alive = sorted(self.claim(run), key=lambda one: one.stream)
        both = [hold(alive), hold(zombie)]
        clock.advance(LEASE / SECOND - 1)
        assert run(self.queue.renew, both, lease=LEASE) == []
        clock.advance(1)
        run(self.queue.back_off, hold(zombie), delay=0, error="")
        self.claim_one(run, "t2")

        before = run(self.everything)
        assert run(is_told, lambda conn, now: self.turns.commit(conn, [decided(alive), decided(zombie)], now=now))
        assert run(self.everything) == before
        assert run(self.queue.renew, both, lease=LEASE) == [hold(zombie)]
        run(self.queue.put_back, both)
        after = run(self.everything)
        assert about(after, STREAM) == about(before, STREAM)
        assert about(after, OTHER) != about(before, OTHER)
        run(self.turns.commit, [decided(alive)])

    def test_it_wakes_during_the_takeover(self, database: Database, clock: FakeClock, verb: str) -> None:
        """What begins while somebody else's claim is under way waits for it, changes nothing and is told."""
        zombie = self.asleep(database.transact)
        clock.advance(LEASE / SECOND)
        other = another(database, clock)
        with database.engine.connect() as conn, conn.begin() as takeover:
            self.claim_one(over(database.bind(conn), clock), "t2")
            before = self.everything(conn)
            late = Waiting(database, partial(other.transact, is_told, self.verbs(zombie)[verb]))
            late.blocked()
            takeover.commit()
        assert late.result()
        other.close()
        assert added(before, database.read(self.everything)) == {}

    def asleep(self, run: Run) -> TurnClaim:
        """A claim of two events whose holder sleeps; what its decision would withdraw waits, too."""
        enqueue(run, dispatch(2, due_at=NEVER))
        self.publish(run, event(1), event(2))
        return self.claim_one(run)

    def befall(self, fate: str, run: Run, clock: FakeClock, zombie: TurnClaim) -> None:
        """Have this become of the stream of a sleeping claimant."""
        if fate in BY_ITSELF:
            run(self.verbs(zombie)[BY_ITSELF[fate]])
            self.claim_one(run, "t2")
            return
        clock.advance(LEASE / SECOND)
        owner = self.claim_one(run, "t2")
        if fate.endswith("more waits"):
            self.publish(run, event(3))
        if fate in BY_ITS_OWNER:
            run(self.verbs(owner)[BY_ITS_OWNER[fate]])
        elif fate == "put back":
            run(self.queue.put_back, [hold(owner)])
        elif fate != "claimed":
            self._pass_by(fate, run, clock, owner)

    def _pass_by(self, fate: str, run: Run, clock: FakeClock, owner: TurnClaim) -> None:
        """The owner is lost, too, and somebody else looks at the stream, or at what is left of it."""
        if fate == "deleted":
            run(delete_stream, STREAM)
        elif fate == "purged":
            run(take_away, owner.events)
        clock.advance(LEASE / SECOND)
        self.claim(run, "t3")

    def verbs(self, claim: TurnClaim) -> Mapping[str, Late]:
        """All that the holder of a claim can do to it."""
        queue, mine = self.queue, hold(claim)
        buried = decided(claim, consumed=[], dead=claim.events, dead_reason="poison")
        parked = NewAlert(code="turn.parked", subject=claim.stream)
        start = operations.Start(hold=mine, row=tool_call(claim))
        finish = operations.Finish(
            hold=mine, turn_id=claim.turn_id, ordinal=1, status=CallStatus.FINISHED, result="null"
        )
        return {
            "commit": lambda conn, now: self.turns.commit(conn, [whole(claim)], write=write, now=now),
            "bury": lambda conn, now: self.turns.commit(conn, [buried], now=now),
            "drop_landed": lambda conn, now: self.turns.drop_landed(conn, mine, now=now),
            "back_off": lambda conn, now: queue.back_off(conn, mine, delay=SECOND, error="", now=now),
            "conflict": lambda conn, now: queue.back_off(conn, mine, delay=0, error="", end=RunEnd.CONFLICT, now=now),
            "release": lambda conn, now: queue.release(conn, mine, now=now),
            "split": lambda conn, now: queue.split(conn, mine, error="", now=now),
            "park": lambda conn, now: queue.park(conn, mine, error="", alert=parked, now=now),
            "start_tool": lambda conn, now: self.tools.start(conn, [start], now=now),
            "end_tool": lambda conn, now: self.tools.finish(conn, [finish], now=now),
            "renew": lambda conn, now: _all_kept(mine, queue.renew(conn, [mine], lease=LEASE, now=now)),
        }


def whole(claim: TurnClaim) -> TurnCommit:
    """A decision that causes something of everything."""
    return decided(
        claim,
        "note",
        dispatches=[dispatch(1, stream=claim.stream)],
        timers=[TimerChange(verb="set", stream=claim.stream, key="late", fire_at=1)],
        publishes=[event(8, claim.stream), event(9, "chat/9")],
        withdrawals=["key/2"],
        alerts=[NewAlert(code="zombie", subject=claim.stream)],
    )


def tool_call(claim: TurnClaim) -> OperationRow:
    """A call of an unsafe tool that begins."""
    return OperationRow(
        turn_id=claim.turn_id, ordinal=1, run_id=claim.run_id, stream=claim.stream, tool="mail", version=1,
        effect="unsafe", arguments="{}",
    )  # fmt: skip


def write(conn: Connection) -> None:
    """A user's own rows; here some that `everything` sees."""
    alerts.raise_alerts(conn, [NewAlert(code="written", subject="by the user")], now=0)


def _all_kept(mine: Hold, lost: Sequence[Hold]) -> None:
    # The one verb that tells by its answer.
    if lost == [mine]:
        raise StaleClaim(mine.subject, stream=mine.subject)
