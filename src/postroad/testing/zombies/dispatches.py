"""Zombies among the dispatchers: whoever lost a dispatch changes no status of it; what it did is written down."""

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Protocol, get_args

import msgspec
import pytest
from sqlalchemy import Connection

from postroad.model.clock import SECOND, FakeClock
from postroad.model.lifecycle import Reason, Result
from postroad.model.rows import ClaimedDispatches, DispatchClaim, Hold, NewDispatch, SendPolicy, Settled, Settlement
from postroad.store import dispatch_claims, outbox
from postroad.store import settle as settling
from postroad.store.database import Database
from postroad.store.statements import Statement
from postroad.testing.contracts.dispatches import LEASE, POLICY, Waiting, another, dispatch, hold, settlement
from postroad.testing.contracts.streams import delete_stream
from postroad.testing.zombies.traces import Run, Tables, Zombies, about, added, over

STREAM = "load/1"
TOLD = "out:key/1:delivered"
# What has become of a dispatch, by the result that its new owner has settled.
BY_ITS_OWNER: dict[str, Result] = {
    "delivered": "ok",
    "backs off": "failed",
    "dead": "permanent",
    "may have arrived": "unknown",
    "cut short": "cut_short",
}
FATES = (
    "claimed", *BY_ITS_OWNER, "released", "withdrawn", "lost again", "out of attempts", "expired",
    "retried by a person", "purged", "stream deleted", "given back by itself", "settled by itself",
)  # fmt: skip
# Here a late success is no news: its outcome is known, or nobody is left to hear it.
UNTOLD = ("delivered", "settled by itself", "stream deleted", "purged")
CHANGE = ("entity", "from_status", "to_status", "reason_code")
DAY_SECONDS = 86_400

_PURGE = Statement("DELETE FROM {p}outbox WHERE id = :id")
_RETRY = Statement(
    "UPDATE {p}outbox SET status = 'pending', epoch = epoch + 1, attempt = 0, due_at = 0, first_attempt_at = NULL "
    "WHERE id = :id AND status IN ('dead_letter', 'expired')"
)


class Dispatches(Protocol):
    """How dispatches are written, claimed and settled; `BuiltIn` is what is built in."""

    def insert(
        self, conn: Connection, dispatches: Sequence[NewDispatch], *, source: str, actor: str, in_turn: bool, now: int
    ) -> Any:
        """Write dispatches."""

    def withdraw(self, conn: Connection, keys: Sequence[str], *, actor: str, now: int) -> list[str]:
        """End pending dispatches; the keys that this ended."""

    def claim(
        self, conn: Connection, policy: SendPolicy, *, names: Sequence[str], token: str, limit: int, now: int
    ) -> ClaimedDispatches:
        """Claim due dispatches, those of lost claimants too."""

    def release(self, conn: Connection, holds: Sequence[Hold], *, now: int) -> list[str]:
        """Give back what never began; the ids that were still held."""

    def recheck(self, conn: Connection, holds: Sequence[Hold], *, now: int) -> list[str]:
        """The ids that are still held, just before they are sent."""

    def lookup(self, conn: Connection, token: str) -> list[DispatchClaim]:
        """What is held under a token."""

    def settle(self, conn: Connection, settlements: Sequence[Settlement], *, now: int) -> list[Settled]:
        """Write attempts' results, each under its token."""

    def expire(self, conn: Connection, *, limit: int, now: int) -> int:
        """End what is past its deadline."""


class BuiltIn:
    """The functions for dispatches in `postroad.store`."""

    insert = staticmethod(outbox.insert)
    withdraw = staticmethod(outbox.withdraw)
    claim = staticmethod(dispatch_claims.claim)
    release = staticmethod(dispatch_claims.release)
    recheck = staticmethod(dispatch_claims.recheck)
    lookup = staticmethod(dispatch_claims.lookup)
    settle = staticmethod(settling.settle)
    expire = staticmethod(settling.expire)


class DispatchZombies(Zombies):
    """A dispatcher whose dispatch somebody else has claimed since.

    The suite finds history in the table `transitions` of `everything`, outcomes in `inbox`.
    """

    dispatches: ClassVar[Dispatches] = BuiltIn()

    @pytest.fixture(params=FATES)
    def fate(self, request: pytest.FixtureRequest) -> str:
        """What became of the dispatch while the zombie slept."""
        fate: str = request.param
        return fate

    def test_whoever_lost_a_dispatch(self, run: Run, clock: FakeClock, fate: str) -> None:
        """Whatever has become of it, a zombie changes no row of it and is told; its results are history."""
        zombie = self.asleep(run, clock)
        self.befall(fate, run, clock, zombie)
        clock.advance(1)
        before = run(self.everything)
        assert run(self.dispatches.recheck, [hold(zombie)]) == []
        assert run(self.dispatches.lookup, zombie.token) == []
        assert run(self.dispatches.release, [hold(zombie)]) == []
        assert run(self.everything) == before
        for result in get_args(Result):
            self.is_history(run, zombie, result, fate)

    def is_history(self, run: Run, zombie: DispatchClaim, result: Result, fate: str) -> None:
        """A late result adds its history, a success its outcome, too, if that is news; no row is changed."""
        before = run(self.everything)
        status = self.status(before, zombie)
        reason = Reason.STALE_OK if result == "ok" else Reason.STALE_FAILED
        settled = run(self.dispatches.settle, [late_result(zombie, result)])
        assert settled == [Settled(zombie.id, status, reason, True)]
        come = added(before, run(self.everything))
        told = result == "ok" and fate not in UNTOLD
        assert [row["event_id"] for row in come.pop("inbox", [])] == [TOLD] * told
        history = [(zombie.id, status, status, reason)] if status else []
        assert [tuple(row[name] for name in CHANGE) for row in come.get("transitions", [])] == history
        for row in come.pop("transitions", []):
            about = msgspec.json.decode(row["metadata"])
            assert (about["attempt"], about["epoch"]) == (zombie.attempt, zombie.epoch)
            assert ("outcome" in about) == (fate == "stream deleted" and result == "ok")
        assert come == {}

    def test_a_success_is_told_once(self, run: Run, clock: FakeClock) -> None:
        """A zombie that settles again and again writes its history each time, and its outcome once."""
        zombie = self.asleep(run, clock)
        self.befall("dead", run, clock, zombie)
        before = run(self.everything)
        for _ in range(3):
            run(self.dispatches.settle, [late_result(zombie, "ok"), late_result(zombie, "failed")])
        come = added(before, run(self.everything))
        assert {name: len(rows) for name, rows in come.items()} == {"transitions": 6, "inbox": 1}

    def test_it_is_no_zombie_before_somebody_came(self, run: Run, clock: FakeClock) -> None:
        """A lease that is over harms nobody: while nobody else has claimed it, a late result is accepted."""
        late = self.asleep(run, clock)
        clock.advance(LEASE / SECOND)
        assert run(self.dispatches.lookup, late.token) == [late]
        (settled,) = run(self.dispatches.settle, [late_result(late, "ok")])
        assert (settled.status, settled.stale) == ("delivered", False)

    def test_one_zombie_among_the_living(self, run: Run, clock: FakeClock) -> None:
        """Of two dispatches settled together the one that is lost stays as it is, the other one is settled."""
        zombie, alive = self.asleep_on(run, clock, 2)
        clock.advance(LEASE / SECOND)
        self.take(run, "t2", limit=1)
        before = run(self.everything)
        assert run(self.dispatches.release, [hold(zombie)]) == []
        settled = run(self.dispatches.settle, [late_result(alive, "ok"), late_result(zombie, "permanent")])
        assert [(each.id, each.status, each.stale) for each in settled] == [
            (alive.id, "delivered", False),
            (zombie.id, "delivering", True),
        ]
        assert about(run(self.everything), zombie.key) == about(before, zombie.key)
        (row,) = [row for row in run(self.everything)["outbox"] if row["id"] == zombie.id]
        assert (row["status"], row["claim_token"]) == ("delivering", "t2")

    def test_it_wakes_during_the_takeover(self, database: Database, clock: FakeClock) -> None:
        """A settle that begins while somebody else's claim is under way waits for it, and is history only."""
        zombie = self.asleep(database.transact, clock)
        clock.advance(LEASE / SECOND)
        other = another(database, clock)
        with database.engine.connect() as conn, conn.begin() as takeover:
            self.take(over(database.bind(conn), clock), "t2")
            before = self.everything(conn)
            call = partial(other.transact, self.dispatches.settle, [late_result(zombie, "permanent")])
            late = Waiting(database, call)
            late.blocked()
            takeover.commit()
        assert [each.stale for each in late.result()] == [True]
        other.close()
        assert added(before, database.read(self.everything)).keys() == {"transitions"}

    def asleep(self, run: Run, clock: FakeClock) -> DispatchClaim:
        """The claim of a dispatch whose holder sleeps."""
        (zombie,) = self.asleep_on(run, clock, 1)
        return zombie

    def asleep_on(self, run: Run, clock: FakeClock, count: int) -> list[DispatchClaim]:
        """Claims of several dispatches of one pass."""
        expires_at = clock.wall() + DAY_SECONDS * SECOND
        given = [dispatch(n + 1, stream=STREAM, expires_at=expires_at) for n in range(count)]
        run(self.dispatches.insert, given, source="test", actor="ann", in_turn=False)
        return self.take(run, "t1")

    def take(self, run: Run, token: str, limit: int = 100) -> list[DispatchClaim]:
        """Claim what is due or whose claimant was lost."""
        won: ClaimedDispatches = run(self.dispatches.claim, POLICY, names=["mail"], token=token, limit=limit)
        return won.claims

    def befall(self, fate: str, run: Run, clock: FakeClock, zombie: DispatchClaim) -> None:
        """Have this become of the dispatch of a sleeping claimant."""
        match fate:
            case "given back by itself":
                run(self.dispatches.release, [hold(zombie)])
                assert [again.attempt for again in self.take(run, "t2")] == [zombie.attempt]
            case "settled by itself":
                run(self.dispatches.settle, [late_result(zombie, "ok")])
            case "out of attempts":
                for number in range(POLICY.retry.attempts):
                    clock.advance(LEASE / SECOND)
                    self.take(run, f"t{number + 2}")
            case "expired":
                clock.advance(DAY_SECONDS)
                assert run(self.dispatches.expire, limit=10) == 1
            case _:
                clock.advance(LEASE / SECOND)
                (owner,) = self.take(run, "t2")
                self._befall_owned(fate, run, clock, owner)

    def _befall_owned(self, fate: str, run: Run, clock: FakeClock, owner: DispatchClaim) -> None:
        if fate in BY_ITS_OWNER:
            run(self.dispatches.settle, [late_result(owner, BY_ITS_OWNER[fate])])
        elif fate in ("released", "withdrawn"):
            run(self.dispatches.release, [hold(owner)])
        match fate:
            case "withdrawn":
                assert run(self.dispatches.withdraw, [owner.key], actor="ann") == [owner.key]
            case "lost again":
                clock.advance(LEASE / SECOND)
                self.take(run, "t3")
            case "retried by a person":
                run(self.dispatches.settle, [late_result(owner, "permanent")])
                run(_RETRY, id=owner.id)
            case "purged":
                run(_PURGE, id=owner.id)
            case "stream deleted":
                run(delete_stream, STREAM)

    @staticmethod
    def status(tables: Tables, claim: DispatchClaim) -> str:
        """The status of a claimed dispatch; '' if there is none any more."""
        return next((row["status"] for row in tables["outbox"] if row["id"] == claim.id), "")


def late_result(claim: DispatchClaim, result: Result) -> Settlement:
    """An attempt's result, as its dispatcher settles it."""
    return settlement(claim, result, error="" if result == "ok" else "no luck", epoch=claim.epoch)
