"""Deletions of streams beside everything else that meets the same rows.

Two transactions on connections of their own: the first is run up to one of its statements, then the second until it is
blocked or done, then the first to its end. A deadlock is an error of the database, and every other error than a refusal
is a failure too. A deletion is stopped before each of its statements, another one before some, which are drawn by a
seed; POSTROAD_TEST_RACES=all: before each. Then many transactions are drawn and interleaved. It cannot catch what takes
three that wait for each other.
"""

import os
import random
import secrets
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Connection, make_url

from postroad.engine.records import BEGIN, Records, TimerRecord
from postroad.model.clock import SECOND, FakeClock, SystemClock
from postroad.model.dispatches import Accepted, Withdrawn
from postroad.model.errors import PostroadError, StaleClaim, StreamDeleted
from postroad.model.retention import Retention
from postroad.model.rows import TimerChange, TurnClaim
from postroad.store import audit, dispatch_claims, inbox, migrations, outbox, queues, retention, settle, streams, turns
from postroad.store import timers as timer_store
from postroad.store.database import Database
from postroad.store.retention import Place, Tally
from postroad.store.schema import metadata
from postroad.testing.contracts.deletion import armed, deleted, left
from postroad.testing.contracts.dispatches import POLICY, dispatch, settlement
from postroad.testing.contracts.retention import sweep
from postroad.testing.contracts.streams import LEASE, Uses, decided, event, hold, logged, queue_rows, waits
from tests.contracts.test_interleavings import Actor, call, giving_way, interleave, quick
from tests.races.actors import Race, racing

__all__ = ["quick"]
ROUNDS = 80
TO_ITS_END = 200
DRAWN = 5  # what is no deletion is stopped before so many of its statements
ASKED = os.environ.get("POSTROAD_TEST_RACES", "1")
AT_ONCE = Retention(deleted=0)
Work = Callable[[Connection], Any]


class Scene:
    """Two streams of which turns are under way, one that there is not yet, and what else is about them."""

    one, two, new = "gone/1", "gone/2", "fresh/1"

    def __init__(self, database: Database) -> None:
        self.now = SystemClock().wall()
        with database.engine.begin() as conn:
            tables = (f'DELETE FROM "{database.schema}".{table.name}' for table in metadata.sorted_tables)
            conn.exec_driver_sql("; ".join(tables))
            self._fill(database.bind(conn))

    def _fill(self, conn: Connection) -> None:
        inbox.publish(conn, [event(n, stream) for stream in (self.one, self.two) for n in (1, 2)], now=self.now)
        won = self._claim(conn, "before", batch=1)
        turns.commit(conn, [decided(one) for one in won], now=self.now)
        self.held = {one.stream: one for one in self._claim(conn, "held")}
        given = [self.mail(n, stream) for n, stream in enumerate((self.one, self.two))]
        outbox.insert(conn, given, source="test", actor="", in_turn=False, now=self.now)
        sent = dispatch_claims.claim(conn, POLICY, names=["mail"], token="sent", limit=1, now=self.now)
        self.sent = sent.claims[0]
        timer_store.apply(conn, [armed(f"t{n}", self.one, at=self.now - n) for n in range(2)], now=self.now)
        timer_store.apply(conn, [armed("t", self.two, at=self.now + 9 * SECOND)], now=self.now)

    def _claim(self, conn: Connection, token: str, batch: int = 10) -> list[TurnClaim]:
        return queues.claim(
            conn, stream_type="gone", token=token, limit=9, batch=batch, lease=LEASE, now=self.now
        ).claims

    def mail(self, number: int, stream: str) -> Any:
        """A dispatch of one of the streams."""
        return dispatch(number, stream=stream)

    def works(self) -> dict[str, Work]:
        """What may meet a deletion, by name."""
        now, one, two, held = self.now, self.one, self.two, self.held
        return {
            "delete": partial(self._block, deletions=[one]),
            "delete both": partial(self._block, deletions=[two, one]),
            "delete a new one": partial(self._block, deletions=[one, self.new]),
            "delete as an operator": lambda conn: streams.delete_by(
                conn, two, by=audit.Operator(actor="ann"), now=now
            ),
            "delete and more": partial(
                self._block, deletions=[one], publishes=[(event(7, two), Accepted())],
                timers=[TimerRecord(verb="rearm", stream=two, key="t", at=now)],
                withdrawals=[("key/1", Withdrawn())],
            ),
            "commit": lambda conn: turns.commit(conn, [decided(
                held[one], "n", dispatches=[self.mail(2, one)], publishes=[event(7, two), event(8, self.new)],
                timers=[armed("new", one, at=now), *(
                    TimerChange(verb="rearm", stream=s, key=key, fire_at=now) for s, key in ((two, "t"), (one, "t1"))
                )], withdrawals=["key/1"],
            )], now=now),
            "commit both": lambda conn: turns.commit(conn, [decided(held[two]), decided(held[one])], now=now),
            "commit the other": lambda conn: turns.commit(
                conn, [decided(held[two], publishes=[event(9, one)], timers=[armed("x", one, at=now)])], now=now
            ),
            "commit that deletes": lambda conn: turns.commit(conn, [decided(held[two], deletions=[one])], now=now),
            "commit that deletes back": lambda conn: turns.commit(
                conn, [decided(held[one], deletions=[two, self.new, one])], now=now
            ),
            "publish": partial(
                self._block, publishes=[(event(n, s), Accepted()) for n, s in ((5, two), (5, one), (5, self.new))]
            ),
            "publish again": partial(self._block, publishes=[(event(2, one), Accepted())]),
            "arm": partial(self._block, timers=[
                TimerRecord(verb="rearm", stream=s, key=key, at=now) for s, key in ((two, "t"), (one, "t1"), (one, "y"))
            ]),
            "fire": lambda conn: timer_store.fire(conn, limit=9, now=now),
            "settle": self._settle,
            "withdraw": partial(self._block, withdrawals=[(f"key/{n}", Withdrawn()) for n in (1, 0)]),
            "release": lambda conn: queues.release(conn, hold(held[one]), now=now),
            "renew": lambda conn: queues.renew(conn, [hold(each) for each in held.values()], lease=LEASE, now=now),
            "claim": lambda conn: self._claim(conn, "again"),
            "sweep": self._sweep,
        }  # fmt: skip

    def _block(self, conn: Connection, **recorded: Any) -> Any:
        return BEGIN.run(conn, [Records(**recorded)], now=self.now)

    def _settle(self, conn: Connection) -> Any:
        results = [settlement(self.sent)]
        settle.lock(conn, results)
        return settle.settle(conn, results, now=self.now)

    def _sweep(self, conn: Connection) -> Any:
        """All stages of a pass in one transaction: no lock is waited for in it for long."""
        place: Place | None = Place()
        tally, later = Tally(), self.now + 2
        while place is not None:
            found = retention.look(conn, place, retention=AT_ONCE, now=later)
            place, tally = retention.end(conn, found, tally, retention=AT_ONCE, now=later)
        return tally.counts


DELETIONS = ("delete", "delete both", "delete a new one", "delete as an operator", "delete and more")
OTHERS = (
    *DELETIONS, "commit", "commit both", "commit the other", "commit that deletes", "commit that deletes back",
    "publish", "publish again", "arm", "fire", "settle",
    "withdraw", "release", "renew", "claim", "sweep",
)  # fmt: skip


@pytest.fixture(scope="module")
def race(postgres_url: str) -> Iterator[Race]:
    """A race track over a Postgres schema of its own."""
    url, schema = make_url(postgres_url), f"test_races_{secrets.token_hex(4)}"
    made = Database(url, schema=schema)
    migrations.migrate(made)
    with racing(url, schema) as track:
        yield track
    with made.engine.begin() as conn:
        conn.exec_driver_sql(f'DROP SCHEMA IF EXISTS "{schema}" CASCADE')
    made.close()


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("deletion", ["delete both", "delete a new one", "delete and more", "commit that deletes"])
def test_a_deletion_and(race: Race, deletion: str, other: str) -> None:
    """Stopped before any statement of either, neither a deadlock nor a word in the stream afterwards."""
    draw = random.Random(f"{ASKED} {deletion} {other}")
    for names in ((deletion, other), (other, deletion)):
        steps = range(play(race, names, TO_ITS_END))
        every = "delete" in names[0] or ASKED == "all"
        stops = list(steps) if every else sorted(draw.sample(steps, min(DRAWN, len(steps))))
        print(f"{names} stopped before {stops} of {len(steps)}")
        for stop in stops:
            play(race, names, stop)


def play(race: Race, names: tuple[str, str], stop: int) -> int:
    """Run the first one up to a statement, then the second, then the first to its end; how many steps there were."""
    scene = Scene(race.database)
    works = scene.works()
    answers, steps = race.run((works[names[0]], works[names[1]]), [0] * stop + [1] * TO_ITS_END)
    for answer in answers:
        refused = isinstance(answer, PostroadError)
        assert refused or not isinstance(answer, Exception), f"{names} stopped at {stop}: {answer!r}"
    _check(race.database, scene, names, answers)
    return steps


def _check(database: Database, scene: Scene, names: tuple[str, str], answers: list[Any]) -> None:
    """The deletion has succeeded; whatever came before it, nothing is left to be done in the stream, or undone."""
    with database.engine.begin() as conn:
        conn = database.bind(conn)
        gone = {name for name, _, at in deleted(conn) if at is not None} & {scene.one, scene.two, scene.new}
        assert gone or any(isinstance(answer, StaleClaim) for answer in answers), "two turns by one claim: one commits"
        for name, answer in zip(names, answers, strict=True):
            assert name not in DELETIONS or not isinstance(answer, Exception) or _may_be_refused(name, answer)
        later = scene.now + LEASE + 2
        logs = {name: logged(conn, name) for name in gone}
        timer_store.fire(conn, limit=99, now=later)
        for kind in ("gone", "fresh"):
            won = queues.claim(
                conn, stream_type=kind, token=f"after {kind}", limit=99, batch=9, lease=LEASE, now=later
            ).claims
            assert not {one.stream for one in won} & gone
            for one in won:
                turns.commit(conn, [decided(one)], now=later)
        assert {name: logged(conn, name) for name in gone} == logs
        assert {(stream, why) for stream, _, why in waits(conn) if stream in gone} <= {
            (stream, "stream_deleted") for stream in gone
        }
        assert not {row.stream for row in queue_rows(conn)} & gone
        for version, name in ((version, name) for name, version, _ in deleted(conn) if name in gone and name in logs):
            assert not logs[name] or len(logs[name]) == version


def _may_be_refused(name: str, answer: Exception) -> bool:
    """Only a block that does more than delete may be refused: by the other's deletion of what it publishes to."""
    return name == "delete and more" and isinstance(answer, StreamDeleted)


class TestInterleavings(Uses):
    """Many at once, drawn."""

    @pytest.mark.timeout(400)
    def test_a_deleted_stream_stays_empty(self, database: Database, quick: Database, clock: FakeClock) -> None:
        """Whoever comes between whom: once it is swept nothing of a deleted stream is left, its neighbour is whole."""
        draw = random.Random(0)
        run = database.transact
        for number in range(ROUNDS):
            stream, beside = f"load/{number}", f"load/{number}b"
            self.publish(run, event(0, stream), event(1, stream), event(0, beside))
            held = {one.stream: one for one in self.claim(run, f"first{number}", batch=draw.choice([1, 2]))}
            run(timer_store.apply, [armed("t", stream, at=clock.wall())])
            decision = decided(held[stream], "note", publishes=[event(1, beside)])
            programs: list[Callable[[Any], Any]] = [
                partial(call, partial(BEGIN.run, batch=[Records(deletions=[stream])])),
                partial(_tolerant, partial(turns.commit, turns=[decision])),
                partial(_tolerant, partial(self.inbox.publish, events=[event(5, stream)])),
                partial(call, partial(timer_store.fire, limit=9)),
                partial(call, partial(queues.adopt, stream_type="load")),
                partial(self._work, f"look{number}"),
                partial(self._swept),
            ]
            actors = [Actor(quick, clock, program) for program in programs]
            with giving_way(quick):
                interleave(draw, actors)
            clock.advance(31)
            self.drain(run, f"drain{number}.")
            clock.advance_to(clock.wall() + 1)
            sweep(run, AT_ONCE)
            assert database.read(left, stream) == {}, (number, held)
            assert database.read(logged, beside)[0] == (1, "e0")
        assert database.read(queue_rows) == []

    def _work(self, token: str, run: Any) -> None:
        for held in run(self.queue.claim, stream_type="load", token=token, limit=9, batch=9, lease=LEASE).claims:
            _tolerant(partial(turns.commit, turns=[decided(held)]), run)

    def _swept(self, run: Any) -> None:
        place: Place | None = Place()
        tally = Tally()
        while place is not None:
            found = run(retention.look, place, retention=AT_ONCE)
            place, tally = run(retention.end, found, tally, retention=AT_ONCE)


def _tolerant(fn: Callable[..., Any], run: Any) -> Any:
    """A transaction that may be refused."""
    try:
        return run(fn)
    except PostroadError as error:
        return error
