"""Zombies over both databases; that a loop counts each of them; and that the suites notice a fence that is gone."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from sqlalchemy import Connection

from postroad import Dispatch, GiveUp, Kind, OutcomeUnknown, Postroad, RetryLater, Turn
from postroad.model.clock import SECOND, FakeClock
from postroad.model.lifecycle import Reason
from postroad.model.rows import DispatchClaim, Hold, NewEntry, Settlement, TurnClaim
from postroad.store import dispatch_claims, log, moves, queues, runs, settle, status, timers, turns
from postroad.store.database import Database
from postroad.store.statements import Statement
from postroad.surfaces import dispatch_reading
from postroad.testing import Harness
from postroad.testing.contracts.dispatches import another
from postroad.testing.contracts.streams import decided
from postroad.testing.zombies import DispatchZombies, StreamZombies, TimerZombies
from postroad.testing.zombies import dispatches as dispatch_suite
from postroad.testing.zombies import streams as stream_suite
from postroad.testing.zombies import timers as timer_suite
from tests.contracts.conftest import create_tables, run_directly
from tests.engine.conftest import Open, harness, place

__all__ = ["harness", "place"]


class TestStreamZombies(StreamZombies):
    """Workers."""


class TestDispatchZombies(DispatchZombies):
    """Dispatchers."""


class TestTimerZombies(TimerZombies):
    """Pumps."""


MAIL = Kind("mail", dict[str, Any])
LONG = 3_600
HELD = 10_000 * SECOND


def take_stream(h: Harness) -> TurnClaim:
    """Another process finds the lease of the stream over, and claims it for good."""
    h.clock.advance(LONG)
    claimed = h.post.database.transact(queues.claim, stream_type="load", token="other", limit=1, batch=9, lease=HELD)
    (claim,) = claimed.claims
    return claim


def commit_stream(h: Harness) -> None:
    """Another process finds the lease of the stream over, and decides in its own way."""
    h.post.database.transact(turns.commit, [decided(take_stream(h), "other")])


def give_up(turn: Turn) -> None:
    """Bury the event."""
    raise GiveUp("late")


def fail(turn: Turn) -> None:
    """Back off, or split the set."""
    raise RetryLater("late")


def never(conn: Connection) -> None:
    """A user's own rows, in the commit."""
    raise AssertionError("user code ran under a claim that was over")


def decide(turn: Turn) -> None:
    """Commit something of everything."""
    turn.record("note", {})
    turn.send(MAIL, {}, key="late")
    turn.set_timer("late", after=0)
    turn.write(never)


def ends_of(post: Postroad) -> list[str]:
    """How the runs of the test's stream ended, in the order of their beginning."""
    return [str(run.end) for run in reversed(post.database.read(runs.of_stream, "load/1"))]


@pytest.mark.parametrize("attempts", [1, 3])
@pytest.mark.parametrize("late", [decide, fail, give_up])
def test_a_turn_that_comes_too_late_is_counted(harness: Open, late: Callable[[Turn], None], attempts: int) -> None:
    """However a turn ends after its claim was over: it is counted, its run ends as stale, nothing else is there."""
    post = Postroad()
    told: list[Mapping[str, Any]] = []
    post.observe(lambda name, values: told.append(values) if name == "turn.ended" else None)
    post.sender(MAIL)(lambda d: None)

    @post.turn("load", attempts=attempts)
    def load(turn: Turn) -> None:
        commit_stream(h)
        late(turn)

    h = harness(post)
    with post.begin() as tx:
        tx.publish("load/1", "ping", {})
        tx.publish("load/1", "ping", {"n": 2})
    drained = h.drain()
    assert (drained.stale, drained.turns, drained.attempted, drained.waiting) == (1, 0, 0, 0)
    assert ends_of(post) == ["stale", "committed"]
    assert [one["end"] for one in told] == ["stale"]
    assert [entry.kind for entry in h.entries("load/1")] == ["ping", "ping", "note"]


def test_answers_that_come_too_late_are_counted(harness: Open) -> None:
    """Streams that are only recorded are committed together: the one that was lost is counted, the other committed."""
    post = Postroad()
    post.recorded("load")
    h = harness(post)
    with post.begin() as tx:
        tx.publish("load/1", "ping", {})
        tx.publish("load/2", "ping", {})

    # One of the two streams that were claimed.
    with timer_suite.at_failpoint("turn.after_claim_commit", lambda: commit_stream(h)):
        drained = h.drain()
    assert (drained.stale, drained.turns, drained.waiting) == (1, 1, 0)
    assert ends_of(post) == ["stale", "committed"]


def test_an_answer_that_is_lost_between_two_looks_is_counted(harness: Open) -> None:
    """An event that had landed is dropped by whoever holds the stream: one who lost it meanwhile hinders no other."""
    post = Postroad()
    post.recorded("load")
    h = harness(post)
    with post.begin() as tx:
        tx.publish("load/1", "ping", {}, key="e")
        tx.publish("load/1", "ping", {})
        tx.publish("load/2", "ping", {})
    drop = turns.drop_landed

    def overtaken(conn: Connection, hold: Hold, *, now: int) -> int:
        (claimed,) = queues.claim(
            conn, stream_type="load", token="other", limit=1, batch=9, lease=HELD, now=now + LONG * SECOND
        ).claims
        assert claimed.stream == hold.subject
        return drop(conn, hold, now=now)

    entry = NewEntry(entry_id="e", kind="ping", data="{}")
    with patch.object(turns, "drop_landed", overtaken):
        with timer_suite.at_failpoint("turn.after_claim_commit", lambda: append(h, entry)):
            drained = h.drain()
    assert (drained.stale, drained.turns) == (1, 1)
    assert [entry.kind for entry in h.entries("load/2")] == ["ping"]


def append(h: Harness, entry: NewEntry) -> None:
    """Let an entry land as no turn would."""
    h.post.database.transact(log.append, "load/1", [entry], expected_version=0)


def returns(d: Dispatch[Any]) -> str:
    """Sent."""
    return "late"


def retries(d: Dispatch[Any]) -> None:
    """Not sent."""
    raise RetryLater("late")


def gives_up(d: Dispatch[Any]) -> None:
    """Never to be sent."""
    raise GiveUp("late")


def knows_nothing(d: Dispatch[Any]) -> None:
    """Perhaps sent."""
    raise OutcomeUnknown("late")


def take_dispatch(h: Harness) -> DispatchClaim:
    """Another process finds the lease of the dispatch over, and claims it."""
    h.clock.advance(LONG)
    policy = h.post._registry.senders["mail"].policy
    won = h.post.database.transact(dispatch_claims.claim, policy, names=["mail"], token="other", limit=1)
    (claim,) = won.claims
    return claim


@pytest.mark.parametrize("late", [returns, retries, gives_up, knows_nothing])
def test_a_send_that_comes_too_late_is_counted(harness: Open, late: Callable[[Dispatch[Any]], Any]) -> None:
    """However a send ends after its claim was over: it is counted, and `show` tells of it beside the rest."""
    post = Postroad()

    @post.sender(MAIL)
    def mail(d: Dispatch[Any]) -> Any:
        claim = take_dispatch(h)
        policy = h.post._registry.senders["mail"].policy
        post.database.transact(
            settle.settle, [Settlement(id=claim.id, token=claim.token, attempt=2, result="ok", policy=policy)]
        )
        return late(d)

    h = harness(post, senders="run")
    with post.begin() as tx:
        tx.send(MAIL, {}, key="k")
    drained = h.drain()
    assert (drained.attempted, drained.stale, drained.delivered, drained.waiting) == (1, 1, 0, 0)
    seen = post.database.read(dispatch_reading.dispatch, "k", whole=False, known=None, now=h.clock.wall())
    found, why = seen.row, seen.why
    assert (found.status, found.reason) == ("delivered", Reason.TRANSPORT_OK)
    assert found.history[-1]["reason_code"] == (Reason.STALE_OK if late is returns else Reason.STALE_FAILED)
    assert found.history[-1]["summary"].startswith("attempt 1 ")
    assert "over" in found.history[-1]["summary"]
    assert why.startswith("Finished: delivered")
    assert post.database.read(status.snapshot, now=h.clock.wall()).stale_settles_lately == 1


def test_a_send_that_was_lost_before_it_began_is_counted(harness: Open) -> None:
    """What was claimed, and lost before its sender was called, is not sent, and is counted."""
    post = Postroad()
    post.sender(MAIL)(returns)
    h = harness(post)
    with post.begin() as tx:
        tx.send(MAIL, {}, key="k")
    with timer_suite.at_failpoint("dispatch.after_claim_commit", lambda: take_dispatch(h)):
        drained = h.drain()
    assert (drained.stale, drained.waiting) == (1, 1)
    assert h.sent(MAIL) == []


def any_token_will_do() -> Any:
    """Whoever asks is taken for the stream's claimant."""
    return patch.object(queues, "owned", lambda conn, holds: {row.stream: row for row in _rows(conn, holds)})


def _rows(conn: Connection, holds: Any) -> Any:
    return queues._LOCK(conn, streams=msgspec.json.encode([hold.subject for hold in holds]).decode())


def leaves_whatever_the_token() -> Any:
    """A stream is given back, backed off or parked by its name alone."""
    sql = queues._LEAVE._sql.replace(" AND claim_token = :token", " AND claim_token IS NOT NULL")
    return patch.object(queues, "_LEAVE", Statement(sql + " AND (:token = :token)"))


def renews_by_name() -> Any:
    """A stream is renewed for whoever names it, and the loss is still told."""
    real = queues.renew

    def renew(conn: Connection, holds: Any, *, lease: int, now: int) -> Any:
        queues._RENEW(conn, streams=msgspec.json.encode([hold.subject for hold in holds]).decode(), until=now + lease)
        return real(conn, holds, lease=lease, now=now)

    return patch.object(queues, "renew", renew)


def checks_the_fence_last() -> Any:
    """A commit writes first, and looks then whether it may."""
    real = turns.commit

    def commit(conn: Connection, decisions: Any, *, write: Any = None, now: int, **more: Any) -> Any:
        if write is not None:
            write(conn)
        return real(conn, decisions, now=now, **more)

    return patch.object(turns, "commit", commit)


def hides_the_stale_run() -> Any:
    """A run that came back late is not told apart."""
    return patch.object(queues, "end_stale", lambda conn, hold, *, now: None)


def ends_every_run() -> Any:
    """A late claimant's end overwrites the end that its run has."""
    sql = runs._END._sql.partition(" AND (end_reason IS NULL")[0]
    return patch.object(runs, "_END", Statement(sql))


def settles_whatever_the_token() -> Any:
    """Whoever settles a dispatch is taken for its claimant."""
    real = settle.settle

    def settles(conn: Connection, settlements: Any, *, now: int) -> Any:
        standing = moves.lock(conn, [each.id for each in settlements])
        tokens = {id: row.claim_token for id, row in standing.items()}
        return real(conn, [msgspec.structs.replace(s, token=tokens.get(s.id) or s.token) for s in settlements], now=now)

    return patch.object(BUILT_IN, "settle", staticmethod(settles))


def settles_by_attempt() -> Any:
    """The number of the attempt is taken for the proof of the claim."""
    real = settle.settle

    def settles(conn: Connection, settlements: Any, *, now: int) -> Any:
        standing = moves.lock(conn, [each.id for each in settlements])
        tokens = {(id, row.attempt): row.claim_token for id, row in standing.items()}
        taken = [msgspec.structs.replace(s, token=tokens.get((s.id, s.attempt)) or s.token) for s in settlements]
        return real(conn, taken, now=now)

    return patch.object(BUILT_IN, "settle", staticmethod(settles))


def forgets_late_successes() -> Any:
    """A late success is not told to its stream."""
    return _late(lambda move: msgspec.structs.replace(move, told=None))


def keeps_a_late_error() -> Any:
    """A late result's attempt is written down as the newest one's."""
    return _late(lambda move: msgspec.structs.replace(move, attempt=move.row.attempt))


def _late(change: Callable[[moves.Move], moves.Move]) -> Any:
    real = settle._late
    return patch.object(settle, "_late", lambda row, each: change(real(row, each)))


def releases_whatever_the_token() -> Any:
    """A dispatch is given back by its id alone."""

    def release(conn: Connection, holds: Any, *, now: int) -> list[str]:
        standing = moves.lock(conn, [hold.subject for hold in holds])
        held = [row for row in standing.values() if row.claim_token]
        moves.apply(conn, [settle.released(row, now=now) for row in held], now=now)
        return [row.id for row in held]

    return patch.object(BUILT_IN, "release", staticmethod(release))


def rechecks_by_id() -> Any:
    """A dispatch that anybody holds may be sent."""
    sql = dispatch_claims._CURRENT._sql.replace("AND o.claim_token = holds.token", "AND o.claim_token IS NOT NULL")
    return patch.object(dispatch_claims, "_CURRENT", Statement(sql))


def fires_again() -> Any:
    """A pump fires what has fired."""
    return patch.object(timers, "_DUE", Statement(timers._DUE._sql.replace("status = 'armed' AND ", "")))


BUILT_IN = dispatch_suite.BuiltIn
Suite = tuple[type, Mapping[str, tuple[str, ...]]]
STREAMS: Suite = (StreamZombies, {"fate": stream_suite.FATES, "verb": stream_suite.VERBS})
DISPATCHES: Suite = (DispatchZombies, {"fate": dispatch_suite.FATES})
TIMERS: Suite = (TimerZombies, {"verb": timer_suite.VERBS})
MUTANTS: list[tuple[Callable[[], AbstractContextManager[Any]], Suite]] = [
    (any_token_will_do, STREAMS),
    (leaves_whatever_the_token, STREAMS),
    (renews_by_name, STREAMS),
    (checks_the_fence_last, STREAMS),
    (hides_the_stale_run, STREAMS),
    (ends_every_run, STREAMS),
    (settles_whatever_the_token, DISPATCHES),
    (settles_by_attempt, DISPATCHES),
    (forgets_late_successes, DISPATCHES),
    (keeps_a_late_error, DISPATCHES),
    (releases_whatever_the_token, DISPATCHES),
    (rechecks_by_id, DISPATCHES),
    (fires_again, TIMERS),
]


def cases(suite: Suite) -> Iterator[tuple[str, dict[str, str]]]:
    """Every test of a suite, with each of its parameters."""
    cls, options = suite
    for name in vars(cls):
        if name.startswith("test_"):
            asked = [option for option in inspect.signature(getattr(cls, name)).parameters if option in options]
            for values in product(*(options[option] for option in asked)):
                yield name, dict(zip(asked, values, strict=True))


def fails(suite: Suite, name: str, given: Mapping[str, str], path: Path) -> bool:
    """Whether a test of a suite fails, on a database of its own."""
    test = getattr(suite[0](), name)
    clock = FakeClock()
    database = Database(f"sqlite:///{path}", clock=clock)
    create_tables(database)
    other = another(database, clock)
    fixtures = {"run": run_directly(database), "clock": clock, "database": database, "other": other, **given}
    try:
        test(**{name: fixtures[name] for name in inspect.signature(test).parameters})
    except AssertionError:
        return True
    finally:
        other.close()
        database.close()
    return False


@pytest.mark.parametrize(("mutant", "suite"), MUTANTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_fence_that_is_gone_is_noticed(
    mutant: Callable[[], AbstractContextManager[Any]], suite: Suite, tmp_path: Path
) -> None:
    """A store with this fault does not pass: some test of the suite fails."""
    with mutant():
        assert any(fails(suite, *case, tmp_path / f"{number}.db") for number, case in enumerate(cases(suite)))


def test_the_suites_pass_without_a_fault(tmp_path: Path) -> None:
    """It is the faults that are noticed: played in the same way, no test of the suites fails without one."""
    played = [(suite, *case) for suite in (STREAMS, DISPATCHES, TIMERS) for case in cases(suite)]
    assert [case for number, case in enumerate(played) if fails(*case, tmp_path / f"{number}.db")] == []
    assert len(played) > 50


@pytest.mark.parametrize("database", ["postgres"], indirect=True)  # SQLite has one writer
def test_pumps_that_lock_nothing_are_noticed(database: Database, clock: FakeClock) -> None:
    """On Postgres pumps that both select a timer, since neither locks it, do not pass."""
    other = another(database, clock)
    unlocked = Statement(timers._DUE._sql.replace("{skip_locked}", ""))
    with patch.object(timers, "_DUE", unlocked), pytest.raises(AssertionError):
        TimerZombies().test_a_pump_that_another_has_overtaken(database, other, clock)
    other.close()
