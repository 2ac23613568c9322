"""Each pair of transactions that can meet, in two processes on one SQLite file: the second waits for the first.

Transactions of SQLite are serial, so there is one thing to see for each pair and order: while the first is open, with
all that it writes, the second one has not begun; then it answers what it would have answered after the first.
"""

import json
import pickle
import select
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from postroad.store import migrations
from postroad.store.database import Database
from tests.races.scene import Scene, broken, build, came_to, drain, look, plain, restore, unsynced
from tests.races.works import WORKS, Transaction, carried_out

# The second process has the SQLite library of the first.
_LIBRARY = "import postroad.bundled_sqlite; " if "pysqlite3" in sqlite3.__file__ else ""
START = "import runpy; runpy.run_module('tests.races.second', run_name='__main__')"
ROOT = Path(__file__).parent.parent.parent
HEARD_SECONDS = 0.005  # how long a second one that wrongly goes on beside the first may take to say so


@dataclass
class Second:
    """The second process."""

    process: "subprocess.Popen[str]"

    def ask(self, one: Transaction) -> None:
        """Have it carry out a transaction; return when it is about to begin."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{one.name}\n")
        self.process.stdin.flush()
        assert self.hear() == ["begins", None]

    def hear(self) -> list[Any]:
        """The next that it says."""
        assert self.process.stdout is not None
        told: list[Any] = json.loads(self.process.stdout.readline())
        return told

    def is_silent(self) -> bool:
        """Whether it has nothing more to say."""
        return not select.select([self.process.stdout], [], [], HEARD_SECONDS)[0]


@dataclass
class File:
    """A scene in a SQLite file, and a second process on it."""

    database: Database
    scene: Scene
    second: Second

    def reset(self) -> None:
        """Begin again."""
        with self.database.engine.begin() as conn:
            restore(self.database, conn)

    def came(self) -> tuple[dict[str, list[Any]], list[str]]:
        """What the file's rows come to, and which invariants do not hold."""
        with self.database.engine.connect() as conn, conn.begin() as transaction:
            wrong = list(broken(look(conn)))
            drain(conn, now=self.scene.now)
            end = look(conn, end=True)
            transaction.rollback()
        return came_to(end), [*wrong, *broken(end)]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[File]:
    """The scene in a file, which nobody syncs: these tests end no process."""
    folder = tmp_path_factory.mktemp("races")
    url = f"sqlite:///{folder / 'test.db'}"
    database = unsynced(url)
    migrations.migrate(database)
    scene = build(database)
    given = {one.name: getattr(scene, one.name) for one in fields(scene) if one.name != "post"}
    (folder / "scene").write_bytes(pickle.dumps(given))
    with subprocess.Popen(
        [sys.executable, "-c", _LIBRARY + START, url, str(folder / "scene")],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield File(database, scene, Second(process))
        process.terminate()
    database.close()


@pytest.mark.parametrize("first", WORKS.values(), ids=WORKS)
def test_the_second_process_waits_for_the_first(file: File, first: Transaction) -> None:
    """While a transaction is open in one process, none begins in another; what comes then is as if it came after."""
    for second in filter(first.meets, WORKS.values()):
        told = f"{first.name}, then {second.name}"
        file.reset()
        carried_out(file.database, first, file.scene, "a")
        expected = plain(carried_out(file.database, second, file.scene, "b"))
        after, wrong = file.came()
        assert wrong == [], told
        file.reset()

        def beside(second: Transaction = second, told: str = told) -> None:
            file.second.ask(second)
            assert file.second.is_silent(), f"{told}: it did not wait"

        carried_out(file.database, first, file.scene, "a", ended=beside)
        assert file.second.hear() == ["began", None]
        assert file.second.hear() == ["answer", json.loads(json.dumps(expected))], told
        assert file.came() == (after, []), told
