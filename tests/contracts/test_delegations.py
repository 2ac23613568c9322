"""Delegations over both databases: one end and one report each, whoever dies or comes between whom.

It cannot catch what more than two transactions at once make of each other.
"""

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import Connection, make_url

from postroad.engine.records import BEGIN, Records
from postroad.model import ids
from postroad.model.clock import SECOND, FakeClock, SystemClock
from postroad.model.delegations import DelegationEnd, DelegationStatus, NewDelegation
from postroad.model.errors import KeyConflict, PostroadError, TurnStopped
from postroad.model.events import REPORT_NAME, STOP_NAME, TASK_NAME
from postroad.model.operations import OperationRow
from postroad.model.rows import NewEvent, TurnClaim, TurnCommit
from postroad.store import (
    audit,
    delegation_views,
    delegations,
    due,
    inbox,
    migrations,
    moments,
    operations,
    queues,
    stopping,
    stream_views,
    streams,
    turns,
)
from postroad.store.database import Database
from postroad.store.delegation_views import Wanted
from postroad.store.schema import metadata
from postroad.store.statements import Statement, as_json
from postroad.testing.contracts.streams import LEASE, Run, Uses, commit, decided, event, hold
from tests.contracts import striking
from tests.lost_answers import lose_answers
from tests.races.actors import Race, racing

PARENT, CHILD = "load/1", "load/2"
TIMEOUT = 100 * SECOND
TO_ITS_END = 200
ANN = audit.Operator(actor="ann")
_REPORTS = Statement(
    "SELECT stream, event_id, data FROM {p}inbox WHERE kind = :kind "
    "UNION ALL SELECT stream, entry_id, data FROM {p}log WHERE kind = :kind"
)


def made(*keys: str, stream: str = PARENT, child: str = CHILD) -> dict[str, Any]:
    """What the commit of a turn that delegates these holds."""
    new = [
        NewDelegation(
            stream=stream, key=key, child=child, event_id=ids.task_id(stream, key), depth=1, timeout=TIMEOUT
        )
        for key in keys
    ]  # fmt: skip
    task = as_json({"data": "do it"})
    events = [NewEvent(stream=child, event_id=one.event_id, kind=TASK_NAME, data=task) for one in new]
    return {"publishes": events, "delegated": new}


def ended(key: str, status: DelegationStatus = DelegationStatus.DONE, result: str = '"ok"') -> DelegationEnd:
    """The end of a delegation."""
    return DelegationEnd(stream=PARENT, key=key, status=status, result=result)


def told(conn: Connection) -> list[tuple[str, str]]:
    """(stream, key) of all reports there are, in inboxes and logs."""
    return sorted((row.stream, row.event_id) for row in _REPORTS(conn, kind=REPORT_NAME))


def call(held: TurnClaim) -> operations.Start:
    """The start of a tool call of a run."""
    row = OperationRow(
        turn_id=held.turn_id, ordinal=1, run_id=held.run_id, stream=held.stream, tool="find", version=1, effect="read",
        arguments="{}",
    )  # fmt: skip
    return operations.Start(hold=hold(held), row=row)


def reported(conn: Connection) -> dict[str, str]:
    """What the reports say how the delegations ended, by key."""
    said = [msgspec.json.decode(row.data)["data"] for row in _REPORTS(conn, kind=REPORT_NAME)]
    return {one["key"]: one["status"] for one in said}


def status(conn: Connection, stream: str = PARENT) -> dict[str, str]:
    """How a stream's delegations stand."""
    return {row.key: row.status for row in delegations.of(conn, stream, limit=1_000)}


class Scene(Uses):
    """A stream that wants things done and one that is at work."""

    def delegated(self, run: Run, *keys: str, child: str = CHILD, token: str = "parent") -> None:
        """Have the parent delegate these, in one turn each."""
        for key in keys:
            self.publish(run, NewEvent(stream=PARENT, event_id=f"want {key}", kind="ping", data="1"))
            (held,) = [one for one in self.claim(run, f"{token} {key}") if one.stream == PARENT]
            commit(run, decided(held, **made(key, child=child)))

    def delegates(self, run: Run, *keys: str) -> None:
        """Have the parent delegate these in one turn."""
        self.publish(run, NewEvent(stream=PARENT, event_id=f"want {keys}", kind="ping", data="1"))
        commit(run, decided(self.claim_one(run), **made(*keys)))

    def at_work(self, run: Run, *keys: str, token: str = "child", stream: str = CHILD) -> TurnClaim:
        """The claim of the stream that has these to do."""
        self.delegated(run, *keys, child=stream)
        return next(one for one in self.claim(run, token) if one.stream == stream)


class TestDelegations(Scene):
    """What a delegation comes to."""

    def test_it_begins_with_the_event(self, run: Run, clock: FakeClock) -> None:
        """The row is written by the commit that publishes the task, and is open."""
        held = self.at_work(run, "k")
        assert [(one.kind, one.event_id) for one in held.events] == [(TASK_NAME, ids.task_id(PARENT, "k"))]
        (row,) = run(delegations.open_of, CHILD, limit=9)
        assert (row.parent, row.key, row.stream, row.status, row.depth) == (PARENT, "k", CHILD, "open", 1)
        assert (row.deadline - row.created_at).total_seconds() == TIMEOUT / SECOND
        assert run(delegations.standing, PARENT, most=9) == delegations.Standing(1, 0)
        assert run(delegations.standing, CHILD, most=9) == delegations.Standing(0, 1)
        assert (run(delegations.known, PARENT, "k"), run(delegations.known, PARENT, "x")) == (CHILD, None)

    def test_counting_ends_at_the_bound(self, run: Run) -> None:
        """However many are open, no more than the bound are counted."""
        self.delegated(run, "a", "b", "c")
        assert run(delegations.standing, PARENT, most=2).open == 2

    @pytest.mark.parametrize("how", list(DelegationStatus)[1:])
    def test_the_first_end_stands(self, run: Run, how: DelegationStatus) -> None:
        """Ending it once more, in the same call or later, changes neither its status nor tells anybody."""
        self.delegated(run, "k")
        run(delegations.end, [ended("k", how), ended("k", DelegationStatus.DONE, "2")])
        run(delegations.end, [ended("k")])
        run(delegations.expire, limit=9)
        run(delegations.cancel, [CHILD])
        assert run(status) == {"k": how}
        assert run(told) == [(PARENT, "postroad.delegation:k")]

    def test_an_end_of_nothing(self, run: Run) -> None:
        """What nobody has delegated, or what is kept no more, cannot end; that is no error."""
        run(delegations.end, [ended("k")])
        run(delegations.end, [])
        run(delegations.cancel, [])
        assert (run(status), run(told)) == ({}, [])

    def test_the_deadline(self, run: Run, clock: FakeClock) -> None:
        """Never early, the longest overdue first, at most as many as asked for; the loop knows when to look."""
        self.delegated(run, "a")
        clock.advance(1)
        self.delegated(run, "b", "c")
        at = clock.wall() + TIMEOUT
        assert run(due.moments) == at - SECOND
        assert run(moments.next_moment, kinds=[], types=[], after=clock.wall()) == at - SECOND
        clock.advance_to(at - SECOND - 1)
        assert run(delegations.expire, limit=9) == 0
        clock.advance_to(at)
        assert run(delegations.expire, limit=1) == 1
        assert run(status) == {"a": "timed_out", "b": "open", "c": "open"}
        assert [run(delegations.expire, limit=9) for _ in range(2)] == [2, 0]
        assert len(run(told)) == 3

    def test_a_stop_ends_what_stands_before_it(self, run: Run) -> None:
        """What was begun and what waits in front of the stop is cancelled; what comes behind it is not."""
        commit(run, decided(self.at_work(run, "begun")))
        self.publish(run, event(1, PARENT))
        more = made("waits", "behind")
        waits, behind = more.pop("publishes")
        commit(run, decided(self.claim_one(run), publishes=[waits, stopping.event(CHILD, "t"), behind], **more))
        held = self.claim_one(run, "stopped")
        assert [one.kind for one in held.events] == [STOP_NAME, TASK_NAME]
        commit(run, decided(held))
        assert run(status) == {"begun": "cancelled", "waits": "cancelled", "behind": "open"}

    def test_the_end_and_the_stop_in_one_commit(self, run: Run) -> None:
        """What a turn says itself comes before what the stop makes of it."""
        commit(run, decided(self.at_work(run, "k")))
        self.publish(run, stopping.event(CHILD, "t"))
        commit(run, decided(self.claim_one(run), finished=[ended("k")]))
        assert run(status) == {"k": "done"}

    @pytest.mark.parametrize("by", ["block", "operator", "turn"])
    def test_a_deletion_ends_it(self, run: Run, by: str) -> None:
        """Whoever deletes the stream that works, its tasks are cancelled in the same transaction."""
        held = self.at_work(run, "k")
        if by == "block":
            run(BEGIN.run, [Records(deletions=[CHILD])])
        elif by == "operator":
            run(streams.delete_by, CHILD, by=audit.Operator(actor="ann"))
        else:
            commit(run, decided(held, deletions=[CHILD]))
        assert (run(status), len(run(told))) == ({"k": "cancelled"}, 1)

    def test_one_is_cancelled(self, run: Run) -> None:
        """What waits for it alone is withdrawn; the others, and what people have published, come to their turn."""
        self.delegates(run, "a", "b")
        self.publish(run, event(1, CHILD))
        assert run(delegations.cancel_by, PARENT, "a", by=ANN).done
        (held,) = [one for one in self.claim(run, "child") if one.stream == CHILD]
        task, stop = ids.task_id(PARENT, "b"), f"{STOP_NAME}/{ids.task_id(PARENT, 'a')}"
        assert [one.event_id for one in held.events] == [task, "e1", stop]
        assert not held.stopping
        commit(run, decided(held))
        assert run(status) == {"a": "cancelled", "b": "open"}
        assert run(told) == [(PARENT, "postroad.delegation:a")]
        ((dead, why),) = [(one.event_id, one.reason) for one in run(stream_views.dead, CHILD, limit=9)]
        assert (dead, why) == (ids.task_id(PARENT, "a"), stopping.WITHDRAWN)

    def test_cancelled_once_more(self, run: Run) -> None:
        """The end that there is stands, whatever it was, and the answer says so; of nothing there is nothing to end."""
        self.delegated(run, "a", "b")
        run(delegations.end, [ended("a")])
        assert run(delegations.cancel_by, PARENT, "b", by=ANN).status == "cancelled"
        answers = [run(delegations.cancel_by, PARENT, key, by=ANN) for key in ("a", "b", "c")]
        assert [(one.done, one.status) for one in answers] == [(False, "done"), (False, "cancelled"), (False, "")]
        assert [one.refused for one in answers] == [
            "it has ended before: done", "it has ended before: cancelled", "there is no such delegation",
        ]  # fmt: skip
        assert (run(status), len(run(told))) == ({"a": "done", "b": "cancelled"}, 2)

    def test_a_turn_for_it_alone_is_refused(self, run: Run) -> None:
        """A turn that was begun for the task and nothing else may call no tool and not decide; it ends as stopped."""
        held = self.at_work(run, "k")
        run(delegations.cancel_by, PARENT, "k", by=ANN)
        assert run(stopping.asked, ["load"]) == [stopping.Asked(stream=CHILD, claim_token=held.token)]
        with pytest.raises(TurnStopped):
            run(operations.start, [call(held)])
        with pytest.raises(TurnStopped):
            commit(run, decided(held, stoppable=True))
        commit(run, decided(held))
        assert run(stopping.asked, ["load"]) == []
        (again,) = [one for one in self.claim(run, "later") if one.stream == CHILD]
        assert [one.kind for one in again.events] == [STOP_NAME]

    def test_a_turn_for_more_than_it_goes_on(self, run: Run) -> None:
        """A turn that has begun with something else beside the task is not ended for it; its word comes too late."""
        self.delegated(run, "k")
        self.publish(run, event(1, CHILD))
        (held,) = [one for one in self.claim(run, "child") if one.stream == CHILD]
        run(delegations.cancel_by, PARENT, "k", by=ANN)
        assert run(stopping.asked, ["load"]) == []
        run(operations.start, [call(held)])
        commit(run, decided(held, finished=[ended("k")], stoppable=True))
        (row,) = run(delegations.of, PARENT, limit=9)
        assert (row.status, row.note) == ("cancelled", "done came too late")

    def test_where_it_waits_for_another_attempt(self, run: Run, clock: FakeClock) -> None:
        """A turn for it alone that backs off is found at once, to be ended."""
        held = self.at_work(run, "k")
        run(queues.back_off, hold(held), delay=TIMEOUT, error="later")
        run(delegations.cancel_by, PARENT, "k", by=ANN)
        assert run(stopping.asked, ["load"]) == [stopping.Asked(stream=CHILD, claim_token=None)]
        run(stopping.hurry, [CHILD])
        (again,) = [one for one in self.claim(run, "again") if one.stream == CHILD]
        assert (again.stopping, again.attempt) == (True, 2)

    def test_a_stop_and_a_cancelled_task(self, run: Run) -> None:
        """Each does its own: the stop withdraws what stands before it, the other its task, which came later."""
        more = made("a", "b")
        a, b = more.pop("publishes")
        self.publish(run, event(0, PARENT))
        between = [event(1, CHILD), stopping.event(CHILD, "t"), event(2, CHILD)]
        commit(run, decided(self.claim_one(run), publishes=[a, *between, b], **more))
        run(delegations.cancel_by, PARENT, "b", by=ANN)
        (held,) = [one for one in self.claim(run, "child") if one.stream == CHILD]
        assert [one.kind for one in held.events] == [STOP_NAME, "ping", STOP_NAME]
        commit(run, decided(held))
        assert run(status) == {"a": "cancelled", "b": "cancelled"}
        assert [one.reason for one in run(stream_views.dead, CHILD, limit=9)] == [stopping.WITHDRAWN] * 3

    def test_cancelled_in_a_deleted_stream(self, run: Run) -> None:
        """A task that got into a stream which is gone can be cancelled, and there is nobody left to be told there."""
        self.delegated(run, "k")
        run(streams.delete, [CHILD])
        assert run(delegations.cancel_by, PARENT, "k", by=ANN).done
        assert (run(status), len(run(told)), run(inbox.waiting, CHILD)) == ({"k": "cancelled"}, 1, 1)

    def test_they_are_listed(self, run: Run) -> None:
        """By stream and key, those in a state, of a stream or for one, and page by page."""
        self.delegated(run, "a", "b")
        self.delegated(run, "c", child="load/3", token="more")
        run(delegations.end, [ended("b")])

        def listed(**wanted: Any) -> list[str]:
            return [one.key for one in run(delegation_views.list_, Wanted(**wanted), limit=2)]

        assert listed() == ["a", "b"]
        assert listed(after=(PARENT, "b")) == ["c"]
        assert listed(status="open") == ["a", "c"]
        assert listed(status="open", after=(PARENT, "a"), child="load/3", stream=PARENT) == ["c"]
        assert (listed(status="done"), listed(child=CHILD), listed(stream=CHILD)) == (["b"], ["a", "b"], [])

    def test_a_deletion_that_did_not_see_it(self, run: Run) -> None:
        """A task that got into a deleted stream after all is cancelled where it is dropped."""
        self.delegated(run, "k")
        run(streams.delete, [CHILD])
        assert run(status) == {"k": "open"}
        assert self.claim(run) == []
        assert (run(status), len(run(told))) == ({"k": "cancelled"}, 1)

    def test_nobody_to_tell(self, run: Run) -> None:
        """If the stream that wanted it is deleted the end counts, its report is dropped, and the row says so."""
        self.delegated(run, "k")
        run(BEGIN.run, [Records(deletions=[PARENT])])
        run(delegations.end, [ended("k")])
        (row,) = run(delegations.of, PARENT, limit=9)
        assert (row.status, row.note, run(told)) == ("done", delegations.DROPPED, [])

    def test_a_late_end_leaves_a_note(self, run: Run, clock: FakeClock) -> None:
        """Another end than the one that stands is not lost without a word; the last one to end is told."""
        self.delegated(run, "a", "b")
        run(delegations.end, [ended("b")])
        clock.advance(1)
        run(delegations.end, [ended("a", DelegationStatus.TIMED_OUT)])
        run(delegations.end, [ended("a"), ended("b")])
        assert [(row.key, row.note) for row in run(delegations.of, PARENT, limit=9)] == [
            ("a", "done came too late"),
            ("b", ""),
        ]
        last = run(delegations.last_of, CHILD)
        assert (last.key, run(delegations.last_of, PARENT)) == ("a", None)

    def test_another_stream_under_the_same_key(self, run: Run) -> None:
        """Nothing of such a turn is written."""
        self.delegated(run, "k")
        self.publish(run, event(9, PARENT))
        (held,) = (one for one in self.claim(run, "again") if one.stream == PARENT)
        with pytest.raises(KeyConflict) as refused:
            commit(run, decided(held, **made("k", child="load/3")))
        assert refused.value.key == "k"
        assert run(inbox.waiting, "load/3") == 0

    def test_several_in_one_commit(self, run: Run) -> None:
        """Turns of several streams begin and end delegations together, each its own."""
        held = self.at_work(run, "k", stream="load/5")
        self.publish(run, event(1, PARENT))
        parent = next(one for one in self.claim(run, "other") if one.stream == PARENT)
        commit(run, decided(parent, **made("l", child="load/6")), decided(held, finished=[ended("k")]))
        assert run(status) == {"k": "done", "l": "open"}


def scene(database: Database, clock: FakeClock) -> TurnClaim:
    """One delegation whose time is over and that is being finished, and one that waits."""
    striking.quicken(database)
    held = Scene().at_work(database.transact, "k")
    Scene().delegated(database.transact, "l", child="load/3", token="more")
    clock.advance_to(clock.wall() + TIMEOUT)
    return held


def works(database: Database, held: TurnClaim) -> dict[str, Callable[[], object]]:
    """What begins and ends delegations."""
    return {
        "finish": lambda: database.transact(turns.commit, [decided(held, finished=[ended("k")])]),
        "time out": lambda: database.transact(delegations.expire, limit=9),
        "delete": lambda: database.transact(BEGIN.run, [Records(deletions=[CHILD, "load/3"])]),
        "cancel": lambda: database.transact(delegations.cancel_by, PARENT, "k", by=ANN),
    }


@pytest.mark.parametrize("what", ["finish", "time out", "delete", "cancel"])
@pytest.mark.parametrize("way", ["dies", "breaks"])
def test_a_fault_before_any_statement(database: Database, clock: FakeClock, what: str, way: striking.Way) -> None:
    """Struck before any of its statements an end has not happened; tried again there is one end and one report."""
    work = works(database, scene(database, clock))[what]
    striking.keep(database)
    before, number = striking.rows_of(database), 0
    while True:
        number += 1
        try:
            with striking.striking(database, number, way=way) as seen:
                work()
        except (striking.Crash, PostroadError):
            assert striking.rows_of(database) == before, f"struck before {seen.struck}"
        if not seen.struck:
            break
        if striking.rows_of(database) == before:
            work()
        told_now = database.read(told)
        assert len(told_now) == len(set(told_now)) == sum(s != "open" for s in database.read(status).values())
        striking.restore(database)
    assert number > 5


@pytest.mark.parametrize("what", ["finish", "time out", "delete", "cancel"])
def test_an_answer_that_is_lost(
    database: Database, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """An end whose COMMIT happened unheard stands; whoever tries again adds nothing."""
    work = works(database, scene(database, clock))[what]
    with monkeypatch.context() as patch:
        lose_answers(database, patch, happened=True)
        with pytest.raises(PostroadError):
            work()
    after = database.read(told)
    assert after
    database.transact(delegations.end, [ended("k"), ended("l")])
    assert {key for _, key in after} <= {key for _, key in database.read(told)}
    assert len(database.read(told)) == 2


class Stage:
    """A delegation that is being finished while its time is over and its streams may go."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.now = SystemClock().wall()
        with database.engine.begin() as conn:
            for table in metadata.sorted_tables:
                conn.exec_driver_sql(f'DELETE FROM "{database.schema}".{table.name}' if database.schema else
                                     f"DELETE FROM {table.name}")  # fmt: skip
            conn = database.bind(conn)
            for key, child in (("k", CHILD), ("l", CHILD), ("m", "load/3")):
                inbox.publish(conn, [NewEvent(stream=PARENT, event_id=key, kind="ping", data="1")], now=self.now)
                held = next(one for one in self._claim(conn, key) if one.stream == PARENT)
                turns.commit(conn, [decided(held, **made(key, child=child))], now=self.now)
            inbox.publish(conn, [event(1, PARENT)], now=self.now)
            self.held = {one.stream: one for one in self._claim(conn, "held", later=LEASE + 1)}

    def _claim(self, conn: Connection, token: str, later: int = 0) -> list[TurnClaim]:
        return queues.claim(
            conn, stream_type="load", token=token, limit=9, batch=9, lease=LEASE, now=self.now + later
        ).claims

    def works(self) -> dict[str, Callable[[Connection], Any]]:
        """What may meet, by name."""
        held, later = self.held, self.now + TIMEOUT + 1
        both = [ended("l"), ended("k")]
        return {
            "finish": lambda conn: turns.commit(conn, [self.done(finished=both)], now=later),
            "time out": lambda conn: delegations.expire(conn, limit=9, now=later),
            "delete the child": lambda conn: BEGIN.run(conn, [Records(deletions=[CHILD, "load/3"])], now=later),
            "cancel": lambda conn: [delegations.cancel_by(conn, PARENT, key, by=ANN, now=later) for key in "kl"],
            "delete the parent": lambda conn: BEGIN.run(conn, [Records(deletions=[PARENT])], now=later),
            "delegate": lambda conn: turns.commit(conn, [decided(held[PARENT], **made("n"))], now=later),
            "release": lambda conn: queues.release(conn, hold(held[PARENT]), now=later),
        }

    def done(self, **more: Any) -> TurnCommit:
        """The commit of the stream at work."""
        return decided(self.held[CHILD], **more)

    def check(self, answers: list[Any]) -> None:
        """One end and one report each, unless nobody is left to be told."""
        for answer in answers:
            assert isinstance(answer, PostroadError) or not isinstance(answer, Exception), answer
        with self.database.engine.begin() as conn:
            conn = self.database.bind(conn)
            later = self.now + 3 * TIMEOUT
            delegations.expire(conn, limit=9, now=later)
            rows = delegations.of(conn, PARENT, limit=9)
            assert {row.status for row in rows} <= {"done", "cancelled", "timed_out"}
            reports = told(conn)
            expected = [(PARENT, ids.delegated_id(row.key)) for row in rows if row.note != delegations.DROPPED]
            assert reports == sorted(expected)
            assert reported(conn).items() <= {row.key: row.status for row in rows}.items()


@pytest.fixture(scope="module")
def race(postgres_url: str) -> Iterator[Race]:
    """A race track over a Postgres schema of its own."""
    url, schema = make_url(postgres_url), f"test_delegations_{secrets.token_hex(4)}"
    built = Database(url, schema=schema)
    migrations.migrate(built)
    with racing(url, schema) as track:
        yield track
    with built.engine.begin() as conn:
        conn.exec_driver_sql(f'DROP SCHEMA IF EXISTS "{schema}" CASCADE')
    built.close()


ENDS = ("finish", "time out", "delete the child", "cancel")
PAIRS = [(one, other) for one in ENDS for other in (*ENDS, "delete the parent", "delegate") if one != other]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_two_that_meet(race: Race, first: str, second: str) -> None:
    """Stopped before any of its statements, with the other run until it is done or waits: one end, one report each."""
    steps = play(race, first, second, TO_ITS_END)
    for stop in range(steps):
        play(race, first, second, stop)
    print(f"{first} stopped before each of {steps} statements, {second} between")
    assert steps > 5


def play(race: Race, first: str, second: str, stop: int) -> int:
    """Run the first one up to a statement, then the second, then the first to its end; how many steps there were."""
    stage = Stage(race.database)
    works = stage.works()
    answers, steps = race.run((works[first], works[second]), [0] * stop + [1] * TO_ITS_END)
    stage.check(answers)
    return steps


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_one_after_the_other_on_sqlite(migrated_path: Path, first: str, second: str) -> None:
    """Where transactions that write are serial, one after the other: one end and one report each."""
    database = Database(f"sqlite:///{migrated_path}")
    stage = Stage(database)
    answers: list[Any] = []
    for name in (first, second):
        try:
            with database.engine.begin() as conn:
                answers.append(stage.works()[name](database.bind(conn)))
        except PostroadError as refused:
            answers.append(refused)
    stage.check(answers)
    database.close()
