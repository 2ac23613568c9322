"""Group commit: what waits together is one transaction, and nobody can tell but by the clock.

What it cannot catch: what only two processes at once show.
"""

import asyncio
import inspect
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
import pytest
from sqlalchemy import Connection, event, select

from postroad.engine.records import BEGIN, Content, Records, Sending, TimerRecord, When, Written
from postroad.model import failpoints
from postroad.model.clock import FakeClock
from postroad.model.dispatches import Accepted, Withdrawn
from postroad.model.errors import (
    ConcurrencyConflict,
    DuplicateEntry,
    DuplicateKey,
    KeyConflict,
    StaleClaim,
    StreamDeleted,
    TimerConflict,
)
from postroad.model.payload import content_hash
from postroad.model.rows import NewEvent, Published, TimerChange, TurnClaim, TurnCommit, TurnCommitted
from postroad.store import outbox, schema, timers, turns
from postroad.store.database import Database
from postroad.store.executor import Lane, Threads
from postroad.store.groups import Verb
from postroad.store.statements import SCHEMA_OPTION
from postroad.testing.contracts import streams
from postroad.testing.contracts.dispatches import dispatch
from postroad.testing.contracts.streams import Uses, append_next, decided, delete_stream, entry
from postroad.testing.contracts.streams import event as note

R = TypeVar("R")
Run = Callable[..., Any]


class HeldLane(Threads):
    """An executor whose groups wait until they are let go: what was put in till then is one group."""

    def __init__(self) -> None:
        super().__init__(plain=2, group=1)
        self._held: list[tuple[Callable[[], Any], Future[Any]]] | None = []

    def submit(self, call: Callable[[], R], *, lane: Lane = "plain") -> Future[R]:
        if lane != "group" or self._held is None:
            return super().submit(call, lane=lane)
        self._held.append((call, Future()))
        return self._held[-1][1]

    def hold(self) -> None:
        """Hold what is put in from now on."""
        self._held = []

    def go(self) -> None:
        """Let groups run, until they are held again."""
        held, self._held = self._held or [], None
        for call, _ in held:
            super().submit(call, lane="group")

    def close(self) -> None:
        self.go()
        super().close()


def block(
    *events: NewEvent, sends: Sequence[Sending] = (), withdraw: Sequence[str] = (), timers: Sequence[TimerRecord] = ()
) -> Records:
    """What a block outside of turns has recorded."""
    return Records(
        publishes=[(each, Accepted()) for each in events],
        sends=list(sends),
        timers=list(timers),
        withdrawals=[(key, Withdrawn()) for key in withdraw],
    )


def sending(number: int, key: str = "", body: str = '{"n":1}', *, keep: bool = False) -> Sending:
    """A dispatch as a block records it."""
    digest = content_hash("mail", body)
    return Sending(
        id=f"{number:032x}", key=key, content=Content(kind="mail", version=1, destination="", body=body, digest=digest),
        on_failure="event", max_attempts=None, when=When(at=None, after=0, given=False), expires=None, origin="{}",
        keep=keep, accepted=Accepted(),
    )  # fmt: skip


def timer(verb: Any, key: str, data: str = "{}", stream: str = "load/t") -> TimerRecord:
    """A change of a timer as a block records it."""
    return TimerRecord(verb=verb, stream=stream, key=key, at=None if verb == "cancel" else 7, data=data)


def written(database: Database, lane: HeldLane, verb: Verb[Any, Any], items: Sequence[Any]) -> list[tuple[int, Any]]:
    """Hand these in together; (place, answer or refusal) in the order in which they were answered."""
    answered: list[tuple[int, Any]] = []

    async def ask(place: int) -> None:
        try:
            answered.append((place, await database.agroup(verb, items[place])))
        except Exception as error:
            answered.append((place, error))

    async def ask_all() -> None:
        lane.hold()
        asked = [asyncio.ensure_future(ask(place)) for place in range(len(items))]
        await asyncio.sleep(0)  # each of them has put its item in
        lane.go()
        await asyncio.gather(*asked)

    asyncio.run(ask_all())
    return answered


def answers(found: Sequence[tuple[int, Any]]) -> list[Any]:
    """The answers in the order of the items."""
    return [answer for _, answer in sorted(found, key=lambda each: each[0])]


@contextmanager
def counted(database: Database) -> Iterator[list[Connection]]:
    """Every COMMIT over the database's engine."""
    commits: list[Connection] = []

    def committed(conn: Connection) -> None:
        commits.append(conn)

    event.listen(database.engine, "commit", committed)
    yield commits
    event.remove(database.engine, "commit", committed)


def tables(conn: Connection) -> dict[str, list[str]]:
    """All rows of all tables without the numbers that the database gives out; within a stream they keep their order."""
    conn = _translated(conn)
    found: dict[str, list[str]] = {}
    for table in schema.metadata.sorted_tables:
        numbers = [column for column in table.c if column.identity is not None]
        rows = [dict(row._mapping) for row in conn.execute(select(table).order_by(*numbers))]
        for row in rows:
            for column in numbers:
                del row[column.name]
            for name in row.keys() & {"picked", "alone"}:  # such numbers too
                row[name] = row[name] and len(msgspec.json.decode(row[name]))
        if numbers and "stream" in table.c:
            rows.sort(key=lambda row: str(row["stream"]))
            found[table.name] = list(map(repr, rows))
        else:
            found[table.name] = sorted(map(repr, rows))
    return found


def emptied(conn: Connection) -> None:
    """Remove every row."""
    for table in reversed(schema.metadata.sorted_tables):
        _translated(conn).execute(table.delete())


def _translated(conn: Connection) -> Connection:
    return conn.execution_options(schema_translate_map={None: conn.get_execution_options().get(SCHEMA_OPTION)})


def comparable(answer: object) -> object:
    """An answer without positions; a refusal as its class and text."""
    match answer:
        case Exception():
            return type(answer), str(answer)
        case Written():
            return [_placed(each) for each in answer.published], answer.enqueued, sorted(answer.withdrawn)
        case TurnCommitted():
            return msgspec.structs.replace(answer, published=[_placed(each) for each in answer.published])
    raise AssertionError(answer)


def _placed(each: Published) -> Published:
    return Published(each.event_id, None if each.position is None else 0, each.created)


class GroupContract(Uses):
    """What a group is."""

    @pytest.fixture(autouse=True)
    def disarm(self) -> Iterator[None]:
        yield
        failpoints.arm(None)

    @pytest.fixture
    def lane(self) -> HeldLane:
        """The executor of `grouping`."""
        return HeldLane()

    @pytest.fixture
    def grouping(self, database: Database, clock: FakeClock, lane: HeldLane) -> Iterator[Database]:
        """The database over an executor whose groups a test lets go."""
        made = Database(database.engine, schema=database.schema, clock=clock, executor=lane)
        yield made
        made.close()

    @pytest.fixture
    def run(self, database: Database) -> Run:
        """`run(fn, *args, **kwargs)`: the result of `fn(conn, *args, now=..., **kwargs)`, committed by itself."""

        def run(fn: Run, *args: Any, **kwargs: Any) -> Any:
            if "now" in inspect.signature(fn).parameters:
                kwargs["now"] = database.clock.wall()
            with database.engine.begin() as conn:
                return fn(database.bind(conn), *args, **kwargs)

        return run

    def turns(self, run: Run, many: int, token: str = "t1") -> list[TurnClaim]:
        """Claims of the streams `load/0`, `load/1` and so on with the events e0 and e1 each, in their order."""
        self.publish(run, *(note(n, f"load/{place:02}") for place in range(many) for n in range(2)))
        return sorted(self.claim(run, token, limit=many), key=lambda held: held.stream)


class OneCommitContract(GroupContract):
    """One transaction, and the answers after it."""

    def test_turns_that_wait_together(self, database: Database, grouping: Database, lane: HeldLane, run: Run) -> None:
        """They are one COMMIT, and each caller hears of its own turn."""
        held = self.turns(run, 12)
        items = [decided(claim, "a", publishes=[note(5, f"room/{claim.stream[5:]}")]) for claim in reversed(held)]
        with counted(database) as commits:
            found = answers(written(grouping, lane, turns.COMMIT, items))
        assert len(commits) == 1
        assert [(one.stream, one.version, one.published[0].created) for one in found] == [
            (item.claim.stream, 3, True) for item in items
        ]

    def test_blocks_that_wait_together(self, database: Database, grouping: Database, lane: HeldLane) -> None:
        """They are one COMMIT, and each caller gets back its own keys, events and withdrawals."""
        answers(written(grouping, lane, BEGIN, [block(sends=[sending(99, "old")])]))
        items = [block(note(n, "chat/1"), sends=[sending(n, f"k{n}"), sending(50 + n)]) for n in range(9, 0, -1)]
        items.append(block(withdraw=["old"]))
        with counted(database) as commits:
            found = answers(written(grouping, lane, BEGIN, items))
        assert len(commits) == 1
        for n, one in zip(range(9, 0, -1), found, strict=False):
            assert [each.event_id for each in one.published] == [f"e{n}"]
            assert [each.key for each in one.enqueued] == [f"k{n}", f"{50 + n:032x}"]
        assert found[-1].withdrawn == ["old"]

    @pytest.mark.parametrize("place", ["commit.before", "group.committed"])
    async def test_answers_come_after_it(
        self, database: Database, grouping: Database, lane: HeldLane, place: str
    ) -> None:
        """While its COMMIT is held up nobody has an answer, a refusal neither, and after it all do."""
        loop = asyncio.get_running_loop()
        reached, go_on = asyncio.Event(), Future[None]()

        def stop(name: str) -> None:
            if name == place and not reached.is_set():
                loop.call_soon_threadsafe(reached.set)
                go_on.result(30)

        await database.agroup(BEGIN, block(note(0)))
        items = [block(note(n)) for n in range(1, 6)] + [block(note(0, data='"other"'))]
        asked = [asyncio.ensure_future(grouping.agroup(BEGIN, item)) for item in items]
        await asyncio.sleep(0)
        failpoints.arm(stop)
        lane.go()
        await reached.wait()
        done, _ = await asyncio.wait(asked, timeout=0.05)
        assert not done
        seen = await database.aread(streams.waits)
        assert len(seen) == (1 if place == "commit.before" else 6)
        go_on.set_result(None)
        *good, refused = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(one, Written) for one in good)
        assert isinstance(refused, KeyConflict)


class RefusalContract(GroupContract):
    """A refusal leaves nothing behind, and stops nobody."""

    def test_turns(self, database: Database, grouping: Database, lane: HeldLane, run: Run, clock: FakeClock) -> None:
        """Of every kind of refusal the caller hears, nobody else; the rows are those of the others alone."""

        def items() -> tuple[list[TurnCommit], list[type[Exception] | None]]:
            held = self.turns(run, 12)
            run(outbox.insert, [dispatch(1)], source="test", actor="ann", in_turn=False)
            run(timers.apply, [TimerChange(verb="set", stream="load/00", key="tmr")])
            self.publish(run, note(1, "chat/1"))
            run(delete_stream, "load/08")
            run(delete_stream, "chat/gone")
            run(append_next, "load/06", entry("x"))
            run(append_next, "load/07", entry("e1"))
            rows = [dispatch(20 + place, key=f"mine/{place}") for place in range(12)]
            bad: dict[int, tuple[type[Exception], dict[str, Any]]] = {
                1: (DuplicateKey, {"dispatches": [rows[1], dispatch(2, key="key/1")]}),
                2: (KeyConflict, {"dispatches": [rows[2]], "publishes": [note(1, "chat/1", data="2")]}),
                3: (TimerConflict, {"timers": [TimerChange(verb="set", stream="load/00", key="tmr", data="2")]}),
                4: (StreamDeleted, {"dispatches": [rows[4]], "publishes": [note(2, "chat/gone")]}),
                5: (StaleClaim, {"claim": msgspec.structs.replace(held[5], token="lost")}),
                6: (ConcurrencyConflict, {}),
                7: (DuplicateEntry, {}),
                8: (StreamDeleted, {}),
            }
            made = [
                msgspec.structs.replace(
                    decided(claim, "a"), **{"dispatches": [rows[place]], **bad.get(place, (None, {}))[1]}
                )
                for place, claim in enumerate(held)
            ]
            return made, [bad[place][0] if place in bad else None for place in range(12)]

        asked, refused = items()
        with counted(database) as commits:
            found = answers(written(grouping, lane, turns.COMMIT, asked))
        assert len(commits) == 1
        assert [type(one) if isinstance(one, Exception) else None for one in found] == refused
        after = run(tables)
        run(emptied)
        again, _ = items()
        run(turns.commit, [item for item, error in zip(again, refused, strict=True) if error is None])
        assert run(tables) == after

    def test_blocks(self, database: Database, grouping: Database, lane: HeldLane, run: Run) -> None:
        """Likewise outside of turns."""
        items = {
            "good": block(note(1), sends=[sending(1, "a")], timers=[timer("set", "t1")]),
            "key": block(note(2), sends=[sending(2, "taken", '{"n":2}')]),
            "event": block(note(0, data='"other"'), sends=[sending(3, "b")]),
            "timer": block(note(3), sends=[sending(4, "c")], timers=[timer("set", "armed", '{"n":2}')]),
            "deleted": block(note(4, "load/gone"), sends=[sending(5, "d")], withdraw=["pending"]),
            "twice": block(note(6), sends=[sending(6, "e"), sending(7, "e", '{"n":2}')]),
            "same": block(note(8), sends=[sending(8, "kept", '{"n":2}', keep=True)]),
        }

        def before() -> None:
            run(delete_stream, "load/gone")
            kept = [sending(number, key) for number, key in enumerate(("taken", "pending", "kept"), 90)]
            run(BEGIN.run, [block(note(0), sends=kept, timers=[timer("set", "armed")])])

        before()
        with counted(database) as commits:
            found = answers(written(grouping, lane, BEGIN, list(items.values())))
        assert len(commits) == 1
        assert [type(one) for one in found] == [
            Written, KeyConflict, KeyConflict, TimerConflict, StreamDeleted, KeyConflict, Written,
        ]  # fmt: skip
        after = run(tables)
        run(emptied)
        before()
        run(BEGIN.run, [items["good"], items["same"]])
        assert run(tables) == after
