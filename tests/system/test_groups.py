"""Group commit under fire: two processes with groups of 32 over the same rows, lost answers under a whole engine."""

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from postroad import Kind, Postroad, Turn
from postroad.store import groups, log, migrations, runs
from postroad.store.database import Database
from tests.lost_answers import lose_answers
from tests.postgres_server import Own

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.filterwarnings("ignore::postroad.store.sqlite_version.SQLiteVersionWarning"),
]
ROUNDS = 15
FRACTION = 0.25  # of one process alone, that two on the same rows must do together: a storm of deadlocks does 1/400
DEADLOCKS_MAX = ROUNDS

# 32 callers at a time, all of them of the same 32 streams, keys and events as the other process's, in its own order.
# Each round has blocks, whose events and keys both processes give, and turns, of which both believe to hold the
# streams: claims last for no time at all.
PROCESS = """
import asyncio, json, os, random, sys, time
import postroad.bundled_sqlite
from postroad.model.errors import PostroadError
from postroad.engine.records import BEGIN
from postroad.store import queues, turns
from postroad.store.database import Database
from postroad.testing.contracts.dispatches import dispatch
from postroad.testing.contracts.groups import block, sending
from postroad.testing.contracts.streams import decided, event

url, schema, name, pool, rounds, go = sys.argv[1:]
backwards = name == "b"
database = Database(url, schema=schema or None)
number = 10_000_000 * ["alone a", "both a", "both b"].index(f"{pool} {name}")

async def ask(verb, item, told):
    try:
        answer = await database.agroup(verb, item)
    except PostroadError as error:
        answer = type(error).__name__
    print(json.dumps(told(answer)))

def blocks(round_):
    global number
    for n in range(32):
        number += 1
        # Two streams each, so that blocks overlap in part.
        events = [event(round_, f"{pool}/{n:02}"), event(round_ + 1000, f"{pool}/{(n + 7) % 32:02}")]
        yield block(*events, sends=[sending(number, f"{pool}/{round_}/{n}")])

def told_block(answer):
    if isinstance(answer, str):
        return {"refused": answer}
    return {"ids": [[each.key, each.id, each.created] for each in answer.enqueued],
            "created": sum(each.created for each in answer.published)}

async def turns_of(round_):
    global number
    token = f"{name}{round_}"
    found = await database.atransact(queues.claim, stream_type=pool, token=token, limit=32, batch=2, lease=1)
    items = []
    for held in found.claims:
        number += 1
        first = held.events[0]
        items.append(decided(held, "a", dispatches=[dispatch(number, stream=held.stream,
                                                  key=f"{held.stream}/{first.event_id}")],
                             publishes=[event(1, f"room/{held.run_id}")]))
    return items

def told_turn(item):
    def told(answer):
        done = not isinstance(answer, str)
        return {"run": item.claim.run_id, "stream": item.claim.stream, "consumed": len(item.consumed),
                "end": "committed" if done else answer}
    return told

async def main():
    print("ready", flush=True)
    while not os.path.exists(go):
        await asyncio.sleep(0.002)
    begun, done = time.monotonic(), 0
    for round_ in range(int(rounds)):
        asked = [(BEGIN, item, told_block) for item in blocks(round_)]
        asked += [(turns.COMMIT, item, told_turn(item)) for item in await turns_of(round_)]
        if backwards:
            asked.reverse()
        await asyncio.gather(*(ask(*each) for each in asked))
        done += len(asked)
    print(json.dumps({"rate": done / (time.monotonic() - begun), "seconds": time.monotonic() - begun}), flush=True)

asyncio.run(main())
database.close()
"""


def until(condition: Callable[[], bool]) -> None:
    """Ask until it is so; the suite's timeout ends a wait that has no end."""
    while not condition():
        time.sleep(0.01)


class Place:
    """A database of the test's own, and processes on it."""

    def __init__(self, url: str, schema: str | None, folder: Path) -> None:
        self.url, self.schema, self._folder = url, schema, folder
        self.database = Database(url, schema=schema)
        migrations.migrate(self.database)

    def run(self, pool: str, *names: str) -> list[list[dict[str, Any]]]:
        """What each of these processes told, started at one instant on the streams of one pool."""
        go = self._folder / f"go-{pool}"
        told = [self._folder / f"told-{pool}-{name}" for name in names]
        command = [sys.executable, "-c", PROCESS, self.url, self.schema or ""]
        processes = []
        for name, file in zip(names, told, strict=True):
            with file.open("w") as out:
                started = [*command, name, pool, str(ROUNDS), str(go)]
                processes.append(subprocess.Popen(started, stdout=out, stderr=subprocess.STDOUT))
        try:
            until(lambda: all(file.read_text() for file in told))  # it is ready, or says why not
            go.touch()
            assert [process.wait(100) for process in processes] == [0] * len(names), [
                f.read_text()[:3_000] for f in told
            ]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [[json.loads(line) for line in file.read_text().splitlines()[1:]] for file in told]

    def deadlocks(self) -> int:
        """How many the server has counted."""
        if self.database.is_sqlite:
            return 0
        with psycopg.connect(self.url.replace("+psycopg", "")) as conn:
            row = conn.execute("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()").fetchone()
            assert row is not None
            return int(row[0])


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """An empty database that nobody else uses."""
    if request.param == "postgres":
        own: Own = request.getfixturevalue("own_postgres")
        made = Place(own.url, None, tmp_path)
    else:
        made = Place(f"sqlite:///{request.getfixturevalue('sqlite_path')}", None, tmp_path)
    yield made
    made.database.close()


@pytest.mark.timeout(240)
def test_two_processes_over_the_same_rows(place: Place) -> None:
    """In opposite orders: every answer is true, there is no storm of deadlocks, and the two are not much slower."""
    (alone,) = place.run("alone", "a")
    told = place.run("both", "a", "b")
    rates = [each[-1]["rate"] for each in told]
    both = 2 * (ROUNDS * 64) / max(each[-1]["seconds"] for each in told)
    print(f"alone {alone[-1]['rate']:.0f}/s; two {rates[0]:.0f} and {rates[1]:.0f}/s, together {both:.0f}/s; "
          f"{place.deadlocks()} deadlocks")  # fmt: skip
    for pool, lines in (("alone", alone[:-1]), ("both", [line for each in told for line in each[:-1]])):
        check_blocks(place, pool, [line for line in lines if "run" not in line])
        check_turns(place, pool, [line for line in lines if "run" in line])
    assert place.deadlocks() <= DEADLOCKS_MAX
    assert both >= FRACTION * alone[-1]["rate"]


def check_blocks(place: Place, pool: str, lines: list[dict[str, Any]]) -> None:
    """Each key and event was created once, and whoever asked for a key was told of the row that has it."""
    assert not [line for line in lines if "refused" in line]
    ids = [tuple(each) for line in lines for each in line["ids"]]
    with place.database.engine.connect() as conn:
        rows = conn.exec_driver_sql("SELECT key, id FROM postroad_outbox WHERE stream = ''").all()
        logged = conn.exec_driver_sql("SELECT stream, entry_id FROM postroad_log WHERE kind = 'ping'").all()
        waits = conn.exec_driver_sql("SELECT stream, event_id FROM postroad_inbox").all()
    assert {(key, id_) for key, id_, _ in ids} == {tuple(row) for row in rows if row[0].startswith(f"{pool}/")}
    assert set(Counter(key for key, _, created in ids if created).values()) == {1}
    events = [tuple(row) for row in (*logged, *waits) if row[0].startswith(f"{pool}/")]
    assert len(events) == len(set(events)) == sum(line["created"] for line in lines) == 2 * 32 * ROUNDS


def check_turns(place: Place, pool: str, lines: list[dict[str, Any]]) -> None:
    """A turn that was answered as committed is in the log with all that it caused, any other one is not at all."""
    ends = Counter(line["end"] for line in lines)
    print(f"turns of {pool}: {dict(ends)}")
    assert set(ends) <= {"committed", "StaleClaim", "ConcurrencyConflict", "DuplicateEntry"}
    assert ends["committed"] >= 32
    with place.database.engine.connect() as conn:
        rows = conn.exec_driver_sql("SELECT stream, seq, run_id FROM postroad_log ORDER BY stream, seq").all()
        rooms = conn.exec_driver_sql("SELECT stream FROM postroad_inbox WHERE type = 'room'").scalars().all()
        ended = dict(map(tuple, conn.exec_driver_sql("SELECT run_id, end_reason FROM postroad_runs").all()))
    logged = [row for row in rows if row.stream.startswith(f"{pool}/")]
    committed = {line["run"]: line for line in lines if line["end"] == "committed"}
    assert Counter(row.run_id for row in logged) == Counter(
        {run: line["consumed"] + 1 for run, line in committed.items()}
    )
    for stream in {row.stream for row in logged}:
        assert [row.seq for row in logged if row.stream == stream] == [
            n + 1 for n in range(len([row for row in logged if row.stream == stream]))
        ]
    assert {room for room in rooms if room.split("/", 1)[1] in {line["run"] for line in lines}} == {
        f"room/{run}" for run in committed
    }
    for line in lines:
        assert (ended[line["run"]] == "committed") == (line["end"] == "committed")


STREAMS = 12
PING = Kind("ping", dict[str, int])


def app(place: Place, seen: list[str], sent: list[str]) -> Postroad:
    """A program whose first turns of all streams decide at one instant."""
    post = Postroad(place.url, schema=place.schema)
    together = threading.Barrier(STREAMS)

    @post.sender("sms", timeout=5)
    def sms(d: Any) -> None:
        sent.append(d.key)

    @post.turn("load", concurrency=STREAMS)
    def load(t: Turn) -> None:
        first = t.stream not in seen
        seen.append(t.stream)
        if first:
            together.wait(30)
        t.record("thought", {})
        t.send("sms", {}, key=t.subject)

    post.filter("load", "postroad.outcome")(lambda e: "sent")
    return post


@contextmanager
def losing_the_first_groups(
    post: Postroad, monkeypatch: pytest.MonkeyPatch, *, happened: bool
) -> Iterator[list[list[str]]]:
    """Lose the answers of the first commits of all streams' turns that are groups; the streams of these groups."""
    begun: list[int] = []
    lost: list[list[str]] = []
    here = threading.local()
    run, commit = groups.run, post.database.engine.dialect.do_commit

    def spied(members: Any, transact: Any) -> Any:
        begun.append(len(members))
        until(lambda: sum(begun) + len(post.database._waiting) >= STREAMS)  # all have decided
        first = sum(begun) <= STREAMS and len(members) > 1
        here.streams = [member.item.claim.stream for member in members] if first else []
        try:
            return run(members, transact)
        finally:
            here.streams = []

    monkeypatch.setattr(groups, "run", spied)
    lose_answers(post.database, monkeypatch, happened=happened)
    lose = post.database.engine.dialect.do_commit

    def do_commit(connection: Any) -> None:
        streams, here.streams = getattr(here, "streams", []), []
        if streams:
            lost.append(streams)
        (lose if streams else commit)(connection)

    monkeypatch.setattr(post.database.engine.dialect, "do_commit", do_commit)
    yield lost
    monkeypatch.undo()


@pytest.mark.parametrize("happened", [True, False])
def test_lost_answers_of_whole_groups(place: Place, monkeypatch: pytest.MonkeyPatch, happened: bool) -> None:
    """Each turn of a group looks up its own run: what happened stands, what did not is decided again, once."""
    seen: list[str] = []
    sent: list[str] = []
    post = app(place, seen, sent)
    with post.begin() as tx:
        for n in range(STREAMS):
            tx.publish(f"load/{n}", PING, {"n": n}, key="p")
    with losing_the_first_groups(post, monkeypatch, happened=happened) as lost, post.running():
        until(lambda: len(set(sent)) == STREAMS)
    unknown = {stream for group in lost for stream in group}
    print(f"groups whose answer was lost: {[len(group) for group in lost]}")
    assert len(unknown) >= STREAMS // 2
    for n in range(STREAMS):
        stream = f"load/{n}"
        again = not happened and stream in unknown
        assert seen.count(stream) == 1 + again
        ends = Counter(str(run.end) for run in post.database.read(runs.of_stream, stream))
        assert (ends.keys() <= {"committed", "conflict"}, ends["conflict"]) == (True, int(again))
        kinds = [entry.kind for entry in post.database.read(log.read, stream)]
        assert (kinds[:2], kinds.count("thought")) == (["ping", "thought"], 1)
    assert sorted(sent) == sorted(str(n) for n in range(STREAMS))
    post.close()
