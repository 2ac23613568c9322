"""A mirror's lines and files: names that never meet, and files that are mended whatever has happened to them."""

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection

from postroad.agent.mirror import files as mirror_files
from postroad.agent.mirror.files import StreamFiles
from postroad.agent.mirror.lines import line_of, name_of, read, stem, written
from postroad.agent.mirror.scribe import Scribe
from postroad.model.clock import FakeClock
from postroad.model.events import Entry
from postroad.model.rows import NewEntry
from postroad.store import log
from postroad.store.database import Database
from postroad.store.executor import Inline

STREAM = "chat/1"
SHARED, LENGTH = 9, 24  # entries that both logs have, and entries of each
TEXTS = ("", "a", "\u2028 \u2029 \x85 \x0b", "é" * 150, '"\\n' * 40, "x" * 1_500, "日本")
NAMES = (
    "..",
    ".",
    "../../etc/passwd",
    "a/b",
    "A",
    "a",
    "%61",
    "a.old",
    "a.aside",
    ".lock",
    "con",
    "é",
    "e\u0301",
    "~",
    "a" * 500,
)


def test_a_line_is_one_line_for_everybody() -> None:
    """A line's text has one end, whatever is in it, and says the same when it is read again."""
    entry = Entry(
        stream="chat/a\u2028b", key="k\n1", kind="note", raw='{"a":\n "\u2028\x85",\r\n"b": 1}', seq=3, cause="t"
    )
    raw = written(line_of(entry, "k0"))
    assert raw.endswith(b"\n")
    assert len(raw.decode().splitlines()) == len(raw.split(b"\n")) - 1 == 1
    line = read(raw)
    assert line is not None
    assert (line.stream, line.seq, line.id, line.parent, line.kind, line.cause) == (
        "chat/a\u2028b", 3, "k\n1", "k0", "note", "t",
    )  # fmt: skip
    assert msgspec.json.decode(line.data) == {"a": "\u2028\x85", "b": 1}
    assert line.at == "1970-01-01T00:00:00.000000Z"


@pytest.mark.parametrize(
    "raw", [b"", b"\n", b"{}\n", b"[1]\n", b"\x00" * 40 + b"\n", b"\xff\n", b'{"v":1,"stream":"chat/1"}\n']
)
def test_what_is_no_line_is_not_read(raw: bytes) -> None:
    """Zeros, other people's JSON and half of a line are no line."""
    assert read(raw) is None


@given(st.text(min_size=1, max_size=200), st.text(min_size=1, max_size=200))
def test_names_of_files_never_meet(one: str, other: str) -> None:
    """Two streams never share a file, also where case does not count; no name leads anywhere or is too long."""
    first, second = (stem(name.encode("utf-8", "replace").decode()) for name in (one, other))
    if first != second:
        assert first.casefold() != second.casefold()
    for given_, name in ((first, one), (second, other)):
        assert set(given_) <= set("abcdefghijklmnopqrstuvwxyz0123456789_-%~")
        assert 0 < len(given_) <= 120
        assert name_of(given_) in (name.encode("utf-8", "replace").decode(), None)


def test_names_that_try_to_meet_or_to_get_out() -> None:
    """Dots, slashes, suffixes of ours, case and accents all end in names of their own, inside of the folder."""
    stems = [stem(name) for name in NAMES]
    assert len(set(stems)) == len(NAMES)
    assert not any("/" in one or "." in one for one in stems)
    assert [name_of(one) for one in stems[:-1]] == list(NAMES[:-1])
    assert stems[-1] == "a" * 80 + "~" + hashlib.sha256(b"a" * 500).hexdigest()[:32]
    assert name_of(stems[-1]) is None
    assert name_of("%2") is None


class Logs(NamedTuple):
    """Databases that share a beginning: one as it is, one with another future, and one that was restored."""

    one: Database
    other: Database
    restored: Database


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory, sqlite_template: Path) -> Iterator[Logs]:
    """The three, each a file of its own."""
    folder = tmp_path_factory.mktemp("logs")
    made = []
    for number, (length, salt) in enumerate(((LENGTH, "one"), (LENGTH, "other"), (SHARED, ""))):
        shutil.copyfile(sqlite_template, folder / f"{number}.db")
        database = Database(f"sqlite:///{folder}/{number}.db", clock=FakeClock(), executor=Inline())
        database.transact(grow, length, salt)
        made.append(database)
    yield Logs(*made)
    for database in made:
        database.close()


def grow(conn: Connection, length: int, salt: str, *, now: int) -> None:
    """A log of which the ids are the same whatever becomes of it, as those of a turn that runs again are."""
    for seq in range(1, length + 1):
        said = {"n": seq, "text": TEXTS[seq % len(TEXTS)], "salt": salt if seq > SHARED else ""}
        data = msgspec.json.encode(said).decode()
        log.append(
            conn, STREAM, [NewEntry(entry_id=f"e{seq}", kind="note", data=data)], expected_version=seq - 1, now=now
        )


def lines_of(database: Database) -> list[bytes]:
    """The lines that a mirror of the log has."""
    entries = database.read(log.read, STREAM)
    return [written(line_of(one, entries[place - 1].key if place else None)) for place, one in enumerate(entries)]


def found(files: StreamFiles) -> list[bytes]:
    """The lines that are there, in order."""
    return [raw for path in paths(files) for raw in path.read_bytes().splitlines(keepends=True)]


def paths(files: StreamFiles) -> list[Path]:
    """The files of a stream, oldest first."""
    full = sorted(files.old.glob("*.jsonl")) if files.old.exists() else []
    return [*full, *([files.path] if files.path.exists() else [])]


def set_aside(files: StreamFiles) -> bytes:
    """All that was set aside."""
    return b"".join(path.read_bytes() for path in files.aside.glob("*")) if files.aside.exists() else b""


def settle(scribe: Scribe) -> int:
    """Bring the stream's files up to the log; how many lines that wrote."""
    lines = 0
    for _ in range(50):
        brought = scribe.bring([STREAM])
        assert not brought.troubles
        lines += brought.lines
        if not brought.again:
            return lines
    raise AssertionError("it never ended")


Harm = tuple[str, Any]
HARMS = st.lists(
    st.one_of(
        st.tuples(st.just("cut"), st.floats(0, 1)),
        st.tuples(st.just("garbage"), st.binary(min_size=1, max_size=80)),
        st.tuples(st.just("twice"), st.just(None)),
        st.tuples(st.just("zeros"), st.integers(1, 5_000)),
        st.tuples(st.just("removed"), st.just(None)),
    ),
    max_size=3,
)


def harm(files: StreamFiles, what: Harm) -> None:
    """Do something to the file that stands last."""
    there = paths(files)
    if not there:
        return
    path, raw = there[-1], there[-1].read_bytes()
    match what:
        case "cut", part:
            path.write_bytes(raw[: round(len(raw) * part)])
        case "garbage", more:
            path.write_bytes(raw + more)
        case "twice", _:
            path.write_bytes(raw + b"".join(raw.splitlines(keepends=True)[-1:]))
        case "zeros", count:
            path.write_bytes(raw + bytes(count))
        case _:
            path.unlink()


@settings(max_examples=80)
@example(written_by=0, count=4, truth=0, most=1_024, harms=[("removed", None), ("cut", 0.0)])  # a full one, now empty
@given(
    written_by=st.integers(0, 1), count=st.integers(0, LENGTH), truth=st.integers(0, 2),
    most=st.sampled_from([1_024, 3_000, 2**20]), harms=HARMS,
)  # fmt: skip
def test_files_are_mended(
    logs: Logs, tmp_path_factory: pytest.TempPathFactory, written_by: int, count: int, truth: int, most: int,
    harms: list[Harm],
) -> None:  # fmt: skip
    """Torn, doubled, foreign, ahead of the log, of another future: in the end each line of the log is there once.

    What was a whole line and is none of the log's is kept aside, and what is right is not touched again.
    """
    folder = tmp_path_factory.mktemp("mirror")
    lines = lines_of(logs[written_by])[:count]
    begun = StreamFiles(folder, STREAM, file_bytes_max=most)
    begun.append(begun.tail(), [line for raw in lines if (line := read(raw)) is not None])
    for what in harms:
        harm(begun, what)
    before = found(begun)
    scribe = Scribe(logs[truth], folder, file_bytes_max=most)
    expected = lines_of(logs[truth])
    settle(scribe)
    files = scribe.files(STREAM)
    assert found(files) == expected
    assert all(path.stat().st_size <= most or len(path.read_bytes().splitlines()) == 1 for path in paths(files))
    kept = set_aside(files)
    lost = [raw for raw in before if raw.endswith(b"\n") and raw not in expected and raw not in kept]
    assert not lost
    if not harms and lines == expected[:count]:
        assert kept == b""
    assert settle(scribe) == 0
    assert found(files) == expected
    shutil.rmtree(folder)


def test_what_is_ahead_of_the_log_is_set_aside_once(logs: Logs, tmp_path: Path) -> None:
    """A database restored from a backup: what the files have beyond it goes aside, and what then happens is written."""
    settle(Scribe(logs.one, tmp_path, file_bytes_max=2_000))
    files = Scribe(logs.restored, tmp_path, file_bytes_max=2_000).files(STREAM)
    assert settle(Scribe(logs.restored, tmp_path, file_bytes_max=2_000)) == 0
    assert found(files) == lines_of(logs.one)[:SHARED]
    assert sorted(set_aside(files).splitlines(keepends=True)) == sorted(lines_of(logs.one)[SHARED:])
    assert settle(Scribe(logs.other, tmp_path, file_bytes_max=2_000)) == LENGTH - SHARED
    assert found(files) == lines_of(logs.other)


def test_a_stream_that_nobody_knows_is_set_aside(logs: Logs, tmp_path: Path) -> None:
    """Files of a stream that the database has never had are not kept as if it had them."""
    strange = Entry(stream="chat/2", key="k", kind="note", raw="1", seq=1)
    files = StreamFiles(tmp_path, "chat/2", file_bytes_max=2_000)
    files.append(files.tail(), [line_of(strange, None)])
    brought = Scribe(logs.one, tmp_path, file_bytes_max=2_000).bring(["chat/2"])
    assert brought.aside == {"chat/2": 1}
    assert not files.path.exists()
    assert set_aside(files) == written(line_of(strange, None))


class Disk:
    """The `os` that files are written through, full from a number of bytes on."""

    def __init__(self, room: int) -> None:
        self.room = room

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, descriptor: int, data: memoryview) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = os.write(descriptor, data[: self.room])
        self.room -= done
        return done


@pytest.mark.parametrize("room", [0, 1, 700, 5_000, 9_000])
def test_a_full_disk_leaves_whole_lines(logs: Logs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """What does not fit is taken back, and written when there is room again."""
    scribe = Scribe(logs.one, tmp_path, file_bytes_max=4_000)
    disk = Disk(room)
    monkeypatch.setattr(mirror_files, "os", disk)
    brought = scribe.bring([STREAM])
    assert brought.troubles[STREAM].errno == errno.ENOSPC
    there = found(scribe.files(STREAM))
    assert there == lines_of(logs.one)[: len(there)]
    disk.room = 2**30
    settle(scribe)
    assert found(scribe.files(STREAM)) == lines_of(logs.one)
    assert set_aside(scribe.files(STREAM)) == b""


def test_a_file_that_is_in_the_way_is_not_overwritten(logs: Logs, tmp_path: Path) -> None:
    """Where the file that is full is to go there is one already: that is told, and both are as they were."""
    scribe = Scribe(logs.one, tmp_path, file_bytes_max=2_000)
    files = scribe.files(STREAM)
    first = StreamFiles(tmp_path, STREAM, file_bytes_max=2**20)
    first.append(first.tail(), [line for raw in lines_of(logs.one)[:4] if (line := read(raw)) is not None])
    files.old.mkdir()
    (files.old / "000000000004.jsonl").write_text("mine")
    brought = scribe.bring([STREAM])
    assert isinstance(brought.troubles[STREAM], FileExistsError)
    assert (files.old / "000000000004.jsonl").read_text() == "mine"
    assert files.path.read_bytes() == b"".join(lines_of(logs.one)[:4])


def test_files_are_for_their_owner(logs: Logs, tmp_path: Path) -> None:
    """Files are made 0600 and folders 0700, whatever the umask lets through."""
    before = os.umask(0)
    try:
        settle(Scribe(logs.one, tmp_path, file_bytes_max=1_024))
        settle(Scribe(logs.restored, tmp_path, file_bytes_max=1_024))
        settle(Scribe(logs.one, tmp_path, file_bytes_max=2_000))
    finally:
        os.umask(before)
    modes = {(path.name if path.is_dir() else path.suffix, path.stat().st_mode & 0o777) for path in tmp_path.rglob("*")}
    assert modes == {("1.old", 0o700), ("1.aside", 0o700), (".jsonl", 0o600)}
