"""Group commit over both databases, and what threatens it: locks, lost answers, errors, an end in the middle."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as NoConnectionFree

from postroad.engine.records import BEGIN, Records, Written
from postroad.model import failpoints
from postroad.model.clock import FakeClock
from postroad.model.errors import CommitUnknown, DatabaseBusy, KeyConflict
from postroad.store import dialects, groups, inbox, outbox, queues, turns
from postroad.store.database import Database
from postroad.store.executor import Lane, Threads
from postroad.store.groups import Member, Name, Verb, Waiting
from postroad.testing.contracts import group_orders
from postroad.testing.contracts import groups as contracts
from postroad.testing.contracts.dispatches import dispatch
from postroad.testing.contracts.groups import GroupContract, HeldLane, Run, answers, block, counted, sending, written
from postroad.testing.contracts.streams import decided, hold, waits
from postroad.testing.contracts.streams import event as note
from tests.contracts.conftest import create_tables
from tests.lost_answers import lose_answers
from tests.postgres_server import Own

on_postgres = pytest.mark.parametrize("database", ["postgres"], indirect=True)
on_sqlite = pytest.mark.parametrize("database", ["sqlite"], indirect=True)
SECONDS = 30


class TestOneCommit(contracts.OneCommitContract):
    """One transaction."""


class TestRefusals(contracts.RefusalContract):
    """They leave nothing behind."""


class TestEquivalence(group_orders.EquivalenceContract):
    """One after the other."""


def waiting_events(database: Database) -> list[str]:
    """The ids of the events in the inbox, sorted."""
    return sorted(name for _, name, _ in database.read(waits))


# Who is in a group


def verb() -> Verb[Sequence[str], str]:
    """A verb whose items are the names of what they are about."""

    def run(conn: Connection, items: Sequence[Any], *, now: int) -> list[str]:
        return ["" for _ in items]

    def names(item: Sequence[str]) -> list[Name]:
        return [(name,) for name in item]

    return Verb(run=run, names=names)


def put(waiting: Waiting, *items: str, of: Verb[Any, Any]) -> None:
    """Put items in whose names are their letters."""
    for item in items:
        waiting.add(Member(of, item))


def taken(waiting: Waiting, most: int = groups.GROUP_MAX) -> list[str]:
    """The items of the next group."""
    return [member.item for member in waiting.take(most)]


def test_a_group_is_in_the_order_of_its_names() -> None:
    """So that two groups meet what they share in one order, whoever came first."""
    one, waiting = verb(), Waiting()
    put(waiting, "dx", "b", "zc", "a", of=one)
    assert taken(waiting) == ["a", "b", "zc", "dx"]
    assert taken(waiting) == []


def test_those_with_a_name_in_common_are_written_one_after_the_other() -> None:
    """In the order in which they came, also if the one in between had to be left itself."""
    one, waiting = verb(), Waiting()
    put(waiting, "ab", "bc", "c", "d", of=one)
    assert [taken(waiting) for _ in range(4)] == [["ab", "d"], ["bc"], ["c"], []]


def test_members_of_one_verb_only() -> None:
    """Two verbs are two groups; what they name in common keeps its order over both."""
    one, other, waiting = verb(), verb(), Waiting()
    put(waiting, "a", of=one)
    put(waiting, "b", of=other)
    put(waiting, "b", "c", of=one)
    assert [taken(waiting) for _ in range(4)] == [["a", "c"], ["b"], ["b"], []]


def test_nobody_is_passed_over_for_ever() -> None:
    """Whoever is left comes first at last, however many keep coming that fit better."""
    one, other, waiting = verb(), verb(), Waiting()
    put(waiting, "a", "a", "a", of=one)
    put(waiting, "rare", of=other)
    groups_taken = []
    for number in range(4):
        put(waiting, *(chr(200 + 10 * number + n) for n in range(10)), of=one)
        groups_taken.append(taken(waiting, 10))
    assert ["rare"] in groups_taken
    assert sum(group.count("a") for group in groups_taken) == 3


def test_a_group_and_the_look_for_it_are_bounded() -> None:
    """At most 64 members, looked for among the first 256 that wait; those left are in their places."""
    one, waiting = verb(), Waiting()
    put(waiting, *(chr(1000 + n) for n in range(100)), of=one)
    assert (len(taken(waiting)), len(taken(waiting))) == (groups.GROUP_MAX, 36)
    put(waiting, *["a"] * groups.LOOK_MAX, "b", "c", of=one)
    assert taken(waiting) == ["a"]
    assert taken(waiting) == ["a", "b"]
    assert taken(waiting) == ["a", "c"]
    assert len(waiting) == groups.LOOK_MAX - 3


def test_a_name_that_cannot_be_told_is_the_callers_own_error(database: Database) -> None:
    """It comes out where the item was handed in, and nothing waits."""

    def names(item: object) -> list[Name]:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        database.group(Verb(run=BEGIN.run, names=names), block())
    database.group(BEGIN, block(note(1)))


# Errors

_SQLITE_TRIGGER = """
CREATE TRIGGER refuse BEFORE INSERT ON postroad_inbox WHEN NEW.event_id = 'e3'
BEGIN SELECT RAISE(ABORT, 'not this one'); END
"""
_POSTGRES_TRIGGER = """
CREATE FUNCTION "{schema}".refuse() RETURNS trigger LANGUAGE plpgsql AS
$$BEGIN IF NEW.event_id = 'e3' THEN RAISE 'not this one'; END IF; RETURN NEW; END$$;
CREATE TRIGGER refuse BEFORE INSERT ON "{schema}".postroad_inbox
FOR EACH ROW EXECUTE FUNCTION "{schema}".refuse()
"""


def refuse_e3(database: Database) -> None:
    """Have the database fail whoever inserts the event e3, in a way that no verb expects."""
    with database.engine.begin() as conn:
        conn.exec_driver_sql(
            _SQLITE_TRIGGER if database.is_sqlite else _POSTGRES_TRIGGER.format(schema=database.schema)
        )


class TestErrors(GroupContract):
    """What is nobody's refusal."""

    def test_an_unexpected_error_is_one_members(self, database: Database, grouping: Database, lane: HeldLane) -> None:
        """The group is written one by one, and only the member that the database fails hears of it."""
        refuse_e3(database)
        with counted(database) as commits:
            found = answers(written(grouping, lane, BEGIN, [block(note(n)) for n in range(8)]))
        assert [n for n, one in enumerate(found) if isinstance(one, DBAPIError)] == [3]
        assert len(commits) == 7
        assert waiting_events(database) == [f"e{n}" for n in range(8) if n != 3]

    def test_beside_a_refusal(self, database: Database, grouping: Database, lane: HeldLane) -> None:
        """Unexpected or refused, each hears its own, and the others are written."""
        refuse_e3(database)
        items = [*(block(note(n)) for n in range(5)), block(note(5), note(5, data="2"))]
        found = answers(written(grouping, lane, BEGIN, items))
        assert [type(one) for one in found] == [*[Written] * 3, type(found[3]), Written, KeyConflict]
        assert isinstance(found[3], DBAPIError)

    @pytest.mark.parametrize("many", [1, 5])
    @pytest.mark.parametrize("place", ["accept.after_insert", "commit.before", "commit.after", "group.committed"])
    def test_what_ends_a_thread_is_told_to_every_member(
        self, database: Database, grouping: Database, many: int, place: str
    ) -> None:
        """Whatever is raised wherever: everybody hears it, nobody is left waiting, and none is written again."""

        def reached(name: str) -> None:
            if name == place:
                raise SystemExit(place)

        items = [block(note(n)) for n in range(many)]
        failpoints.arm(reached)
        with counted(database) as commits:
            for each in self.handed_in(grouping, items):
                assert isinstance(each.exception(SECONDS), SystemExit)
        failpoints.arm(None)
        assert len(waiting_events(database)) == (0 if place in ("accept.after_insert", "commit.before") else many)
        assert len(commits) <= 1

    def handed_in(self, grouping: Database, items: Sequence[Records]) -> list[Future[Any]]:
        """The answers to items of as many callers, whose group is let go once all of them wait."""
        lane: Any = grouping._executor
        lane.hold()
        pool = ThreadPoolExecutor(len(items))
        pending = [pool.submit(grouping.group, BEGIN, item) for item in items]
        until(lambda: len(lane._held) == len(items))
        lane.go()
        pool.shutdown(wait=False)
        return pending

    @on_postgres
    def test_a_connection_that_broke_before_commit(
        self, database: Database, grouping: Database, lane: HeldLane
    ) -> None:
        """Nothing was written, so the group is written over another connection; nobody hears of it."""
        pids: list[int] = []

        def reached(name: str) -> None:
            if name == "inbox.publish" and not pids:
                with database.engine.connect() as conn:
                    pids.extend(conn.execute(_WRITING, {"schema": database.schema}).scalars())
                    conn.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": pids[0]})

        failpoints.arm(reached)
        found = answers(written(grouping, lane, BEGIN, [block(note(n), sends=[sending(n)]) for n in range(5)]))
        assert len(pids) == 1
        assert [one.published[0].created for one in found] == [True] * 5

    @on_postgres
    def test_a_statement_that_is_cancelled_is_one_members(
        self, database: Database, grouping: Database, lane: HeldLane
    ) -> None:
        """A member whose statements take longer than the role may use fails alone."""
        with database.engine.begin() as conn:
            slow = _POSTGRES_TRIGGER.format(schema=database.schema).replace(
                "RAISE 'not this one'", "PERFORM pg_sleep(9)"
            )
            conn.exec_driver_sql(slow)
        bounded = Database(
            database.engine.url.update_query_dict({"options": "-c statement_timeout=300"}),
            schema=database.schema, clock=database.clock, executor=lane,
        )  # fmt: skip
        found = answers(written(bounded, lane, BEGIN, [block(note(n)) for n in range(5)]))
        assert [n for n, one in enumerate(found) if isinstance(one, Exception)] == [3]
        assert dialects.is_cancelled(found[3])
        bounded.close()

    def test_lost_answers(
        self, database: Database, grouping: Database, lane: HeldLane, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whether the COMMIT had happened or not, each member hears that it is unknown; none is written again."""
        for number, happened in enumerate((True, False)):
            lost = lose_answers(database, monkeypatch, happened=happened)
            items = [block(note(n, f"load/{number}")) for n in range(5)]
            found = answers(written(grouping, lane, BEGIN, items))
            monkeypatch.undo()
            assert [type(one) for one in found] == [CommitUnknown] * 5
            assert len({id(one) for one in found}) == 5
            assert len(lost) == 1
            assert len([stream for stream, _, _ in database.read(waits) if stream == f"load/{number}"]) == 5 * happened

    @on_sqlite
    def test_a_write_lock_that_cannot_be_had(
        self, database: Database, lane: HeldLane, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """All of a group hear after the two waits of one, not after those of each."""
        monkeypatch.setattr(dialects, "BUSY_MILLISECONDS", 20)
        quick = Database(f"sqlite:///{database.engine.url.database}", clock=database.clock, executor=lane)
        begun: list[float] = []
        once: Any = quick._once
        monkeypatch.setattr(quick, "_once", lambda *args, **kw: (begun.append(time.monotonic()), once(*args, **kw)))
        with database.engine.begin():
            found = answers(written(quick, lane, BEGIN, [block(note(n)) for n in range(10)]))
        assert [type(one) for one in found] == [DatabaseBusy] * 10
        assert len(begun) == 2
        quick.close()

    @on_postgres
    def test_a_pool_without_a_free_connection(self, database: Database, lane: HeldLane) -> None:
        """All of a group hear after the wait of one; the engine then knows that nothing was decided against it."""
        engine = create_engine(database.engine.url, pool_size=1, max_overflow=0, pool_timeout=0.05)
        small = Database(engine, schema=database.schema, clock=database.clock, executor=lane)
        with engine.connect():
            found = answers(written(small, lane, BEGIN, [block(note(n)) for n in range(10)]))
        assert [type(one) for one in found] == [NoConnectionFree] * 10
        assert len({id(one) for one in found}) == 1
        assert dialects.is_away(found[0])
        small.close()
        engine.dispose()


def test_a_database_that_goes_away_in_the_middle(own_postgres: Own) -> None:
    """Every member hears it once, nobody hangs; when it is back it takes groups again."""
    lane = HeldLane()
    database = Database(own_postgres.url, clock=FakeClock(), executor=lane)
    create_tables(database)
    crashed: list[str] = []

    def reached(name: str) -> None:
        if name == "inbox.publish" and not crashed:
            crashed.append(name)
            own_postgres.crash()

    failpoints.arm(reached)
    found = answers(written(database, lane, BEGIN, [block(note(n)) for n in range(20)]))
    failpoints.arm(None)
    assert crashed
    assert all(isinstance(one, DBAPIError) and dialects.is_away(one) for one in found)
    own_postgres.start()
    found = answers(written(database, lane, BEGIN, [block(note(n)) for n in range(20)]))
    assert [one.published[0].created for one in found] == [True] * 20
    database.close()


# By the test's own tables: other tests' sessions are on the same server.
_WRITING = text(
    "SELECT DISTINCT l.pid FROM pg_locks l JOIN pg_class c ON c.oid = l.relation "
    "JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = :schema AND l.mode = 'RowExclusiveLock'"
)


def until(condition: Callable[[], bool]) -> None:
    """Ask until it is so; the suite's timeout ends a wait that has no end."""
    while not condition():
        time.sleep(0.002)


# Locks that others hold


class Foreign:
    """A transaction of somebody else's that is open and knows who waits for it."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._plain = database.engine.connect()
        self.conn = database.bind(self._plain)
        self._pid: int = self._plain.execute(text("SELECT pg_backend_pid()")).scalar_one()

    def blocked(self) -> int:
        """How many wait for it."""
        with self._database.engine.connect() as conn:
            count = text("SELECT count(*) FROM pg_stat_activity WHERE :pid = ANY(pg_blocking_pids(pid))")
            found: int = conn.execute(count, {"pid": self._pid}).scalar_one()
            return found

    def end(self, *, commits: bool) -> None:
        self._plain.commit() if commits else self._plain.rollback()

    def close(self) -> None:
        self._plain.close()


@on_postgres
class TestLocks(GroupContract):
    """Rows that a transaction outside of the group has locked."""

    @pytest.fixture
    def foreign(self, database: Database) -> Iterator[Foreign]:
        made = Foreign(database)
        yield made
        made.close()

    async def waits_alone(
        self, foreign: Foreign, slow: list[asyncio.Future[Any]], others: list[asyncio.Future[Any]], *, commits: bool
    ) -> tuple[list[Any], list[Any]]:
        """The answers of the others, got while the slow ones wait for the foreign transaction, and then of those."""
        begun = time.monotonic()
        first = await asyncio.wait_for(asyncio.gather(*others), SECONDS)
        took = time.monotonic() - begun
        print(f"{len(others)} members answered after {took:.3f} s beside {len(slow)} that wait")
        assert took < 20 * dialects.LOCK_WAIT_MILLISECONDS / 1000
        while foreign.blocked() < min(len(slow), 2):  # as many as the plain lane of HeldLane has threads
            await asyncio.sleep(0.005)
        assert not any(each.done() for each in slow)
        foreign.end(commits=commits)
        return first, await asyncio.gather(*slow)

    @pytest.mark.parametrize("commits", [True, False])
    async def test_a_member_that_waits_for_a_slow_transaction(
        self, database: Database, grouping: Database, lane: HeldLane, foreign: Foreign, commits: bool
    ) -> None:
        """It goes on alone and hears the truth once the other has ended; the others of its group are answered."""
        inbox.publish(foreign.conn, [note(1)], now=1)
        outbox.insert(foreign.conn, [dispatch(7, key="k")], source="x", actor="x", in_turn=False, now=1)
        slow = self.ask(grouping, [block(note(1)), block(sends=[sending(1, "k")])])
        others = self.ask(grouping, [block(note(n), sends=[sending(n, f"k{n}")]) for n in range(10, 30)])
        await asyncio.sleep(0)
        with counted(database) as commits_seen:
            lane.go()
            first, then = await self.waits_alone(foreign, slow, others, commits=commits)
        assert all(one.published[0].created and one.enqueued[0].created for one in first)
        assert then[0].published[0].created is not commits
        assert then[1].enqueued[0].created is not commits
        assert len(commits_seen) == 1 + 2 + commits

    async def test_many_that_wait_for_it(self, grouping: Database, lane: HeldLane, foreign: Foreign) -> None:
        """The others wait once, not once for each of those."""
        inbox.publish(foreign.conn, [note(n) for n in range(40)], now=1)
        slow = self.ask(grouping, [block(note(n)) for n in range(40)])
        others = self.ask(grouping, [block(note(n, "load/z")) for n in range(20)])
        await asyncio.sleep(0)
        lane.go()
        first, then = await self.waits_alone(foreign, slow, others, commits=True)
        assert all(one.published[0].created for one in first)
        assert not any(one.published[0].created for one in then)

    @pytest.mark.parametrize("commits", [True, False])
    async def test_a_turn_whose_stream_is_locked(
        self, grouping: Database, lane: HeldLane, run: Run, foreign: Foreign, commits: bool
    ) -> None:
        """It waits by itself for whoever has its row in `queues`; the turns of other streams are committed."""
        held = self.turns(run, 8)
        queues.lock(foreign.conn, [hold(held[3])])
        asked = [asyncio.ensure_future(grouping.agroup(turns.COMMIT, decided(claim, "a"))) for claim in held]
        await asyncio.sleep(0)
        lane.go()
        slow = asked.pop(3)
        first, then = await self.waits_alone(foreign, [slow], asked, commits=commits)
        assert {one.version for one in (*first, *then)} == {3}

    async def test_those_that_come_one_by_one(self, database: Database, foreign: Foreign) -> None:
        """Members that wait, each of them a group by itself, do not keep the lane of groups from others."""
        inbox.publish(foreign.conn, [note(n) for n in range(4)], now=1)
        slow = []
        for number in range(4):
            slow += self.ask(database, [block(note(number))])
            while foreign.blocked() <= number:
                await asyncio.sleep(0.005)
        other = self.ask(database, [block(note(9))])
        (first,), then = await self.waits_alone(foreign, slow, other, commits=True)
        assert first.published[0].created
        assert not any(one.published[0].created for one in then)

    def ask(self, database: Database, items: list[Records]) -> list[asyncio.Future[Any]]:
        return [asyncio.ensure_future(database.agroup(BEGIN, item)) for item in items]


# Callers that give up


class TestCancelled(GroupContract):
    """Law 6 and law 11: what was handed in is written, and its answer awaited."""

    async def test_while_it_waits(self, database: Database, grouping: Database, lane: HeldLane) -> None:
        """A member is not taken back: its caller is cancelled once it is committed, the others notice nothing."""
        asked = [asyncio.ensure_future(grouping.agroup(BEGIN, block(note(n)))) for n in range(5)]
        await asyncio.sleep(0)
        asked[2].cancel()
        asked[3].cancel()
        done, _ = await asyncio.wait(asked, timeout=0.05)
        assert not done
        lane.go()
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert [n for n, one in enumerate(found) if isinstance(one, asyncio.CancelledError)] == [2, 3]
        assert waiting_events(database) == [f"e{n}" for n in range(5)]

    async def test_while_it_is_written(self, database: Database, grouping: Database, lane: HeldLane) -> None:
        """The transaction ends first, refused or committed; only then does the cancellation come out."""
        loop = asyncio.get_running_loop()
        reached, go_on = asyncio.Event(), Future[None]()

        def stop(name: str) -> None:
            if name == "commit.before" and not reached.is_set():
                loop.call_soon_threadsafe(reached.set)
                go_on.result(SECONDS)

        await database.agroup(BEGIN, block(note(0)))
        items = [block(note(n)) for n in range(1, 5)] + [block(note(0, data='"other"'))]
        asked = [asyncio.ensure_future(grouping.agroup(BEGIN, item)) for item in items]
        await asyncio.sleep(0)
        failpoints.arm(stop)
        lane.go()
        await reached.wait()
        for _ in range(2):
            asked[1].cancel()
            asked[4].cancel()
            done, _ = await asyncio.wait(asked, timeout=0.03)
            assert not done
        go_on.set_result(None)
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert [n for n, one in enumerate(found) if isinstance(one, asyncio.CancelledError)] == [1, 4]
        assert waiting_events(database) == [f"e{n}" for n in range(5)]


# Who is called


def test_a_call_that_has_not_begun_stands_for_those_after_it() -> None:
    """In the lane of groups, and nowhere else; one that has begun may have missed what came after."""
    threads, go_on, began = Threads(plain=1), threading.Event(), threading.Event()
    calls: list[str] = []

    def first() -> None:
        calls.append("first")
        began.set()
        go_on.wait(SECONDS)

    one = threads.submit(first, lane="group")
    began.wait(SECONDS)
    others = [threads.submit(lambda: calls.append("again"), lane="group") for _ in range(3)]
    for _ in range(2):
        threads.submit(lambda: calls.append("plain"))
    go_on.set()
    threads.close()
    assert calls == ["first", "again", "plain", "plain"]
    assert one not in others
    assert len(set(others)) == 1


class TestCalls(GroupContract):
    """Members without a call of their own."""

    @pytest.mark.parametrize("lanes", [{"plain": 1}, {"plain": 2, "group": 2}], ids=["one lane", "two threads"])
    def test_more_than_a_group_is_written_to_the_last(self, database: Database, lanes: dict[str, int]) -> None:
        """Whoever takes a group sees to what it leaves, while the writers of others are held up too."""
        executor = Threads(**lanes)
        busy = Database(database.engine, schema=database.schema, clock=database.clock, executor=executor)
        held = threading.Event()
        for _ in range(2):
            executor._lanes.get("group", executor._plain).submit(held.wait, SECONDS)
        waiting = [busy._join(BEGIN, block(note(n))) for n in range(3 * groups.GROUP_MAX + 1)]
        with counted(database) as commits:
            held.set()
            assert all(each.result(SECONDS).published[0].created for each in waiting)
        assert len(commits) == 4
        busy.close()


# The end


class Ending(Threads):
    """An executor that counts what it was handed, and tells when it is asked to end."""

    def __init__(self, **lanes: int) -> None:
        super().__init__(**{"plain": 1, **lanes})
        self.handed, self.ending = 0, threading.Event()

    def submit(self, call: Callable[[], Any], *, lane: Lane = "plain") -> Future[Any]:
        submitted = super().submit(call, lane=lane)
        self.handed += 1
        return submitted

    def close(self) -> None:
        self.ending.set()
        super().close()


class TestClosing(GroupContract):
    """`close` while members wait."""

    @pytest.mark.parametrize("lanes", [{}, {"plain": 2, "group": 1}], ids=["one lane", "a lane of its own"])
    def test_what_was_handed_in_is_answered(self, database: Database, lanes: dict[str, int]) -> None:
        """Also what cannot be written in a group; what comes later is refused, and not written."""
        refuse_e3(database)
        executor = Ending(**lanes)
        closing = Database(database.engine, schema=database.schema, clock=database.clock, executor=executor)
        reached, go_on = threading.Event(), threading.Event()

        def stop(name: str) -> None:
            if name == "accept.before_insert" and not reached.is_set():
                reached.set()
                go_on.wait(SECONDS)

        with ThreadPoolExecutor(10) as pool:
            failpoints.arm(stop)
            asked = [pool.submit(closing.group, BEGIN, block(note(0)))]
            reached.wait(SECONDS)
            asked += [pool.submit(closing.group, BEGIN, block(note(n))) for n in range(1, 6)]
            until(lambda: executor.handed == 6)
            end = pool.submit(closing.close)
            executor.ending.wait(SECONDS)
            go_on.set()
            errors = [each.exception(SECONDS) for each in asked]
            end.result(SECONDS)
        assert [n for n, error in enumerate(errors) if error is not None] == [3]
        assert isinstance(errors[3], DBAPIError)
        with pytest.raises(RuntimeError, match="shutdown"):
            closing.group(BEGIN, block(note(9)))
        closing.close()
        assert waiting_events(database) == ["e0", "e1", "e2", "e4", "e5"]

    def test_a_caller_that_comes_as_it_ends(self, database: Database) -> None:
        """One whom an earlier call has taken along is answered, and whoever is left without a call is too."""
        executor = LastMoment()
        closing = Database(database.engine, schema=database.schema, clock=database.clock, executor=executor)
        with ThreadPoolExecutor(3) as pool:

            def ask(number: int) -> Future[Any]:
                return pool.submit(closing.group, BEGIN, block(note(number)))

            asked = [ask(1)]
            until(lambda: len(executor.calls) == 1)
            executor.meanwhile = lambda: asked.append(ask(2))
            refused = ask(2)  # and yet it is taken, so that the one that came meanwhile must wait for its turn
            assert refused.result(SECONDS).published[0].created
            closing.close()
            assert [each.result(SECONDS).published[0].created for each in asked] == [True, False]


class LastMoment(Threads):
    """An executor that ends while a call is being handed in: those before it are run, it is refused."""

    def __init__(self) -> None:
        super().__init__(plain=1)
        self.calls: list[Callable[[], Any]] = []
        self.meanwhile: Callable[[], None] | None = None

    def submit(self, call: Callable[[], Any], *, lane: Lane = "plain") -> Future[Any]:
        if lane != "group":
            return super().submit(call)
        if self.meanwhile is None:
            self.calls.append(call)
            return Future()
        meanwhile, self.meanwhile = self.meanwhile, None
        meanwhile()
        until(lambda: len(self.calls) == 2)
        for taken_on in self.calls:
            taken_on()
        raise RuntimeError("cannot schedule new futures after shutdown")
