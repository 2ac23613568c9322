"""Two versions on one database: code N works on the schema of N + 1, beside the code of N + 1 and after it."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection

from postroad.store.database import Database
from postroad.store.statements import Statement
from tests.system import codes
from tests.system.codes import NEXT, Code, Place

pytestmark = pytest.mark.acceptance
DEADLINE = 60.0
ROUND = 10
ROUNDS_MAX = 30

APP = """
import json, os, time
from datetime import timedelta
from postroad import Dispatch, Kind, Postroad, TIMER_FIRED, Turn

CODE = os.environ["CODE"]
SMS = Kind("sms", dict[str, str])
post = Postroad()

def note(what, key):
    descriptor = os.open("journal", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, json.dumps({"what": what, "key": key, "code": CODE}).encode() + b"\\n")
    os.close(descriptor)

@post.turn("load", concurrency=1)
def decide(turn: Turn) -> None:
    for event in turn.events:
        fired = TIMER_FIRED.of(event)
        if event.kind == "ping":
            note("turn", event.key)
            turn.send(SMS, {"text": "ETA?"}, to="driver", key=f"{event.key}/1")
            turn.set_timer(event.key, after=timedelta(seconds=0.2), data={"of": event.key})
        elif fired is not None:
            turn.send(SMS, {"text": "ETA, please?"}, to="driver", key=f"{fired['of']}/2")

@post.sender(SMS, concurrency=1)
def send_sms(d: Dispatch[dict[str, str]]) -> None:
    note("send", d.key)
    time.sleep(0.01)
"""

PUBLISH = """
import sys
if sys.argv[1] == "1":
    import postroad.bundled_sqlite
from app import post

for number in range(int(sys.argv[3])):
    key = f"{sys.argv[2]}.{number}"
    with post.begin() as tx:
        tx.publish(f"load/{number}", "ping", {}, key=key)
post.close()
"""


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Code:
    """Version N."""
    folder = tmp_path_factory.mktemp("old")
    return Code("old", codes.earlier_tree(tmp_path_factory.mktemp("old-tree")), folder)


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Code:
    """Version N + 1, on whose schema N may run."""
    folder, tree = tmp_path_factory.mktemp("new"), tmp_path_factory.mktemp("new-tree")
    return Code("new", codes.next_tree(tree, oldest_code=NEXT - 1), folder)


@pytest.fixture(scope="module")
def demanding(tmp_path_factory: pytest.TempPathFactory) -> Code:
    """Version N + 1, on whose schema only N + 1 may run."""
    folder, tree = tmp_path_factory.mktemp("demanding"), tmp_path_factory.mktemp("demanding-tree")
    return Code("demanding", codes.next_tree(tree, oldest_code=NEXT), folder)


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A program on an empty database."""
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "publish.py").write_text(PUBLISH)
    if request.param == "postgres":
        return Place(tmp_path, request.getfixturevalue("postgres_url"), request.getfixturevalue("fresh_schema"))
    return Place(tmp_path, f"sqlite:///{request.getfixturevalue('sqlite_path')}", None)


@pytest.fixture
def database(place: Place) -> Iterator[Database]:
    """The test's own look at the database."""
    opened = Database(place.url, schema=place.schema)
    yield opened
    opened.close()


class Trip:
    """What was published on a database, by which code, and what came of it."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._published: list[str] = []

    def publish(self, code: Code) -> list[str]:
        """Publish some events by a version; their keys."""
        name = f"{code.name}{len(self._published)}"
        bundled = "1" if code.environment(self._place)["POSTROAD_BUNDLED_SQLITE"] == "1" else "0"
        done = code.call("publish.py", bundled, name, str(ROUND), at=self._place)
        assert done.returncode == 0, done.stderr
        keys = [f"{name}.{number}" for number in range(ROUND)]
        self._published += keys
        return keys

    def arrives(self, keys: list[str]) -> None:
        """Wait until all that these events cause has been sent."""
        wanted = {f"{key}/{n}" for key in keys for n in (1, 2)}
        self.until(lambda: wanted <= set(self.sent()))

    def sent(self) -> Counter[str]:
        """How often each key was sent."""
        return Counter(line["key"] for line in self.journal() if line["what"] == "send")

    def by(self, what: str, since: int = 0) -> set[str]:
        """Which versions have had turns, or have sent, after so many lines of the journal."""
        return {line["code"] for line in self.journal()[since:] if line["what"] == what}

    def journal(self) -> list[dict[str, Any]]:
        """What the processes have done, in order."""
        journal = self._place.folder / "journal"
        return [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []

    def until(self, true: Callable[[], object]) -> None:
        """Wait for what the processes do."""
        end = time.monotonic() + DEADLINE
        while not true():
            assert time.monotonic() < end, self._place.said()
            time.sleep(0.05)

    def nothing_was_lost(self) -> None:
        """Everything published was sent, and, as no process died, once."""
        assert self.sent() == {f"{key}/{n}": 1 for key in self._published for n in (1, 2)}


def step_of(database: Database) -> int:
    """The version of the schema that the database has."""

    def read(conn: Connection) -> int:
        return int(Statement("SELECT max(version) FROM {p}migrations")(conn).scalar_one())

    return database.read(read)


def test_the_schema_goes_up_then_the_code_and_back(old: Code, new: Code, place: Place, database: Database) -> None:
    """N works while N + 1 migrates; both share the work; N + 1 goes, N starts anew and works: nothing is lost."""
    trip = Trip(place)
    assert old.postroad("migrate", at=place).returncode == 0
    with old.running(place):
        trip.arrives(trip.publish(old))
        migrated = new.postroad("migrate", at=place)
        assert f"applied {NEXT:04}_notes" in migrated.stdout, migrated.stderr
        assert step_of(database) == NEXT
        trip.arrives(trip.publish(old))
        write_notes(database)
        begun = len(trip.journal())
        with new.running(place):
            for _ in range(ROUNDS_MAX):
                trip.arrives(trip.publish(old) + trip.publish(new))
                if trip.by("turn", begun) == trip.by("send", begun) == {"old", "new"}:
                    break
            else:
                raise AssertionError(f"one of them does nothing\n{place.said()}")
        trip.arrives(trip.publish(old))
    with old.running(place):
        trip.arrives(trip.publish(old))
    trip.nothing_was_lost()
    assert old.postroad("migrate", at=place).returncode == 0
    assert notes(database) == {"written by N + 1"}


def test_the_old_code_settles_what_the_new_one_left(old: Code, new: Code, place: Place) -> None:
    """Events, dispatches and timers that N + 1 has written and not carried out are carried out by N, once."""
    trip = Trip(place)
    assert new.postroad("migrate", at=place).returncode == 0
    keys = trip.publish(new)
    with new.running(place):
        trip.until(lambda: any(line["what"] == "turn" for line in trip.journal()))
    with old.running(place):
        trip.arrives(keys)
    trip.nothing_was_lost()
    assert trip.by("send") <= {"old", "new"}


def test_a_step_that_old_code_does_not_know_keeps_it_out(old: Code, demanding: Code, place: Place) -> None:
    """On a schema that only N + 1 may run on, N does not begin, and says what to do."""
    assert demanding.postroad("migrate", at=place).returncode == 0
    for command in (["migrate", "verify"], ["run", "app:post"]):
        refused = old.postroad(*command, at=place)
        assert refused.returncode != 0
        assert f"has schema {NEXT}, this code was written for {NEXT - 1}: upgrade postroad" in refused.stderr
    trip = Trip(place)
    with demanding.running(place):
        trip.arrives(trip.publish(demanding))
    trip.nothing_was_lost()


def test_the_new_code_waits_for_its_schema(old: Code, new: Code, place: Place, database: Database) -> None:
    """N + 1 on the schema of N: on Postgres it says which command brings it up to date, on SQLite it does that."""
    assert old.postroad("migrate", at=place).returncode == 0
    if database.is_sqlite:
        trip = Trip(place)
        with new.running(place):
            trip.arrives(trip.publish(new))
        trip.nothing_was_lost()
        assert step_of(database) == NEXT
    else:
        refused = new.postroad("run", "app:post", at=place)
        assert refused.returncode != 0
        assert f"has schema {NEXT - 1}, this code needs {NEXT}: run `postroad migrate`" in refused.stderr
        assert step_of(database) == NEXT - 1


def write_notes(database: Database) -> None:
    """Fill the column and the table that the new step has added."""

    def write(conn: Connection, *, now: int) -> None:
        Statement("UPDATE {p}outbox SET note = 'written by N + 1'")(conn)
        Statement("INSERT INTO {p}notes (id, text) VALUES ('1', 'written by N + 1')")(conn)

    database.transact(write)


def notes(database: Database) -> set[str]:
    """What stands in the column and in the table that the new step has added."""

    def read(conn: Connection) -> set[str]:
        written = Statement("SELECT note FROM {p}outbox WHERE note IS NOT NULL UNION SELECT text FROM {p}notes")
        return set(written(conn).scalars())

    return database.read(read)
