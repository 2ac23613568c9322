"""A SQLite file that is made, and one that is removed or replaced under a program that has it open."""

import logging
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import create_async_engine

from postroad import DatabaseReplaced, Kind, Postroad, sqlite
from tests.cases.apps import idle, until

pytestmark = pytest.mark.filterwarnings("ignore::postroad.store.sqlite_version.SQLiteVersionWarning")
NOTE = Kind("note", dict[str, str])


def app(path: Path, *, own_engine: bool = False) -> tuple[Postroad, list[str]]:
    """An app on a file, and what it sent."""
    engine = sqlite.configure(create_engine(f"sqlite:///{path}")) if own_engine else None
    post = Postroad(engine or f"sqlite:///{path}")
    sent: list[str] = []
    post.sender(NOTE)(lambda d: sent.append(d.key))
    post.check_schema()
    return post, sent


def send(post: Postroad, key: str) -> None:
    with post.begin() as tx:
        tx.send(NOTE, {}, key=key)


def remove(path: Path) -> None:
    for end in ("", "-wal", "-shm"):
        Path(f"{path}{end}").unlink(missing_ok=True)


def replace(path: Path) -> None:
    """As a restored backup does it."""
    fresh = path.with_name("backup.db")
    app(fresh)[0].close()
    remove(path)
    os.rename(fresh, path)


@pytest.mark.parametrize("own_engine", [False, True])
def test_what_goes_into_a_removed_file_is_refused(sqlite_path: Path, own_engine: bool) -> None:
    """Nothing is accepted into a file that was removed, time after time, and no empty file is made in its place."""
    post, _ = app(sqlite_path, own_engine=own_engine)
    send(post, "before")
    remove(sqlite_path)
    for n in range(3):
        with pytest.raises(DatabaseReplaced, match="was removed or replaced while it was open") as caught:
            send(post, f"k{n}")
        assert caught.value.path == str(sqlite_path)
    with pytest.raises(DatabaseReplaced):
        post.dispatches.list()
    assert not sqlite_path.exists()
    post.close()


@pytest.mark.parametrize("own_engine", [False, True])
def test_after_a_replacement_the_new_file_is_used(sqlite_path: Path, own_engine: bool) -> None:
    """A replaced file is told of once, to whoever comes first; then the new one is written to and read."""
    post, _ = app(sqlite_path, own_engine=own_engine)
    with post.database.engine.connect(), post.database.engine.connect():
        pass  # two connections in the pool
    replace(sqlite_path)
    with pytest.raises(DatabaseReplaced):
        send(post, "lost")
    send(post, "k")
    assert [row.key for row in post.dispatches.list()] == ["k"]
    other, _ = app(sqlite_path)
    assert [row.key for row in other.dispatches.list()] == ["k"]
    for each in (post, other):
        each.close()


def test_a_replacement_without_our_tables_is_told(sqlite_path: Path) -> None:
    """A new file that has no tables of ours is refused with the cure, and is taken once it has them."""
    post, _ = app(sqlite_path)
    remove(sqlite_path)
    sqlite_path.touch()
    with pytest.raises(DatabaseReplaced):
        send(post, "k0")
    for _ in range(2):
        with pytest.raises(DatabaseReplaced, match="no tables of ours: `postroad migrate`"):
            send(post, "k1")
    assert sqlite_path.stat().st_size == 0
    app(sqlite_path)[0].close()
    send(post, "k2")
    assert [row.key for row in post.dispatches.list()] == ["k2"]
    post.close()


def test_a_commit_into_a_removed_file_is_refused(sqlite_path: Path) -> None:
    """A file that is removed during a transaction, ours or the user's, makes its commit fail."""
    post, _ = app(sqlite_path, own_engine=True)
    with pytest.raises(DatabaseReplaced), post.begin() as tx:
        tx.send(NOTE, {}, key="k")
        tx.write(lambda conn: remove(sqlite_path))
    replace(sqlite_path)
    engine = post.database.engine
    with pytest.raises(DatabaseReplaced), engine.begin() as conn:
        with post.join(conn) as tx:
            tx.send(NOTE, {}, key="k")
        remove(sqlite_path)
    post.close()


async def test_an_async_engine_of_the_users_notices_too(sqlite_path: Path) -> None:
    """The user's own AsyncEngine is told as well, and goes on with the new file."""
    post, _ = app(sqlite_path)
    engine = create_async_engine(f"sqlite+aiosqlite:///{sqlite_path}")
    sqlite.configure(engine.sync_engine)
    async with engine.begin() as conn, post.join(conn) as tx:
        tx.send(NOTE, {}, key="a")
    replace(sqlite_path)
    with pytest.raises(DatabaseReplaced):
        async with engine.begin():
            pass
    async with engine.begin() as conn:
        assert (await conn.exec_driver_sql("SELECT count(*) FROM postroad_outbox")).scalar_one() == 0
    await engine.dispose()
    post.close()


def test_a_file_that_its_owner_removes_after_disposing_is_made_anew(sqlite_path: Path) -> None:
    """Whoever disposes of the engine and removes the file gets a new one, as without us."""
    engine = sqlite.configure(create_engine(f"sqlite:///{sqlite_path}"))
    for _ in range(2):
        with engine.begin() as conn:
            conn.exec_driver_sql("CREATE TABLE mine (id integer)")
        engine.dispose()
        remove(sqlite_path)


@pytest.mark.parametrize("swap", [replace, remove])
def test_running_loops_go_on_with_the_new_file(
    sqlite_path: Path, swap: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Loops say that the file is gone, and send what others put into the new one."""
    post, sent = app(sqlite_path)
    with caplog.at_level(logging.WARNING, "postroad"), post.running():
        send(post, "before")
        until(lambda: sent == ["before"])
        swap(sqlite_path)
        until(lambda: "removed or replaced" in caplog.text)
        other, _ = app(sqlite_path)
        send(other, "after")
        until(lambda: sent == ["before", "after"])
        until(lambda: idle(post))
        other.close()
    post.close()


@pytest.fixture
def umask() -> Iterator[Callable[[int], object]]:
    """Sets the process's umask for the test."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def modes(path: Path) -> dict[str, int]:
    """The file and those that SQLite has beside it, with who may do what."""
    return {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.glob(f"{path.name}*")}


def all_with(mode: int) -> dict[str, int]:
    return dict.fromkeys(("test.db", "test.db-wal", "test.db-shm"), mode)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_a_new_file_is_for_its_owner_alone(sqlite_path: Path, umask: Callable[[int], object], mask: int) -> None:
    """Whatever the umask, nobody else may read what is in it, nor in the files beside it."""
    umask(mask)
    post, sent = app(sqlite_path)
    send(post, "k")
    assert modes(sqlite_path) == all_with(0o600)
    post.drain()
    post.close()
    assert sent == ["k"]
    assert modes(sqlite_path) == {"test.db": 0o600}


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o600])
def test_the_mode_of_a_file_that_is_there_stays(sqlite_path: Path, mode: int) -> None:
    """Whoever made it, or changed its mode, has decided; the files beside it follow."""
    sqlite_path.touch()
    sqlite_path.chmod(mode)
    post, _ = app(sqlite_path)
    send(post, "k")
    assert modes(sqlite_path) == all_with(mode)
    post.close()
    app(sqlite_path)[0].close()
    assert modes(sqlite_path) == {"test.db": mode}


def test_an_engine_of_the_users_makes_its_file_as_the_umask_has_it(
    sqlite_path: Path, umask: Callable[[int], object]
) -> None:
    """What the application makes by itself is its own matter."""
    umask(0o027)
    post, _ = app(sqlite_path, own_engine=True)
    assert modes(sqlite_path)["test.db"] == 0o640
    post.close()


@pytest.mark.parametrize("form", ["file:{}?uri=true", "file:{}?mode=rwc&uri=true", "file://localhost{}?uri=true"])
def test_a_file_that_is_named_by_its_uri(sqlite_path: Path, form: str) -> None:
    """The same for SQLite's own way to name a file."""
    post = Postroad("sqlite:///" + form.format(sqlite_path))
    post.check_schema()
    assert modes(sqlite_path) == all_with(0o600)
    post.close()


def test_a_link_to_a_file_that_is_not_there(sqlite_path: Path) -> None:
    """The file is made where the link leads, for its owner alone."""
    target = sqlite_path.with_name("real.db")
    sqlite_path.symlink_to(target)
    post, _ = app(sqlite_path)
    assert modes(target)["real.db"] == 0o600
    post.close()


@pytest.mark.parametrize("name", ["file:{}?mode=rw&uri=true", "file:{}?mode=ro&uri=true", "/nowhere{}"])
def test_where_nothing_can_be_made_nothing_is(sqlite_path: Path, name: str) -> None:
    """A URL that makes no file makes none now either, and SQLite says what is wrong."""
    post = Postroad("sqlite:///" + name.format(sqlite_path))
    with pytest.raises(OperationalError, match="unable to open database file"):
        post.check_schema()
    assert modes(sqlite_path) == {}
