"""Mirrors of streams' logs as files: whole, in order, each line once; and what becomes of them when things go wrong."""

import asyncio
import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from postroad import InvalidInput, Kind, Postroad, Refused, Turn
from postroad.agent.mirror import Caught, Mirror
from postroad.agent.mirror import keeping as mirror_keeping
from postroad.agent.mirror import news as mirror_news
from postroad.agent.mirror.keeping import Keeping
from postroad.agent.mirror.mirrors import THREAD
from postroad.agent.mirror.news import FAR_BACK, Recent
from postroad.agent.mirror.scribe import Scribe
from postroad.model.clock import SECOND
from postroad.model.rows import NewEntry
from postroad.store import alerts, log
from postroad.store.mirroring import Happening
from postroad.store.statements import Statement
from tests.cases.apps import OpenApp, idle, until
from tests.engine.conftest import Open

NOTE = Kind("note", dict[str, Any])
_FORGET = Statement("DELETE FROM {p}log WHERE stream = :stream AND seq > :seq")
_SET_BACK = Statement("UPDATE {p}streams SET version = :seq WHERE id = :stream")
_FORGET_STREAM = Statement("DELETE FROM {p}streams WHERE id = :stream")

pytestmark = pytest.mark.timeout(120)


def publish(post: Postroad, stream: str, *numbers: int) -> None:
    with post.begin() as tx:
        for n in numbers:
            tx.publish(stream, NOTE, {"n": n}, key=f"n{n}")


def grow(post: Postroad, streams: list[str], count: int) -> None:
    """Logs of so many entries, as if turns had written them long ago."""

    def write(conn: Any, *, now: int) -> None:
        for stream in streams:
            entries = [NewEntry(entry_id=f"e{n}", kind="note", data=f'{{"n":{n}}}') for n in range(1, count + 1)]
            log.append(conn, stream, entries, expected_version=0, now=now)

    post.database.transact(write)


def set_back(post: Postroad, stream: str, seq: int) -> None:
    """The database as a backup has it that was made when the stream stood there."""

    def restore(conn: Any, *, now: int) -> None:
        _FORGET(conn, stream=stream, seq=seq)
        _SET_BACK(conn, stream=stream, seq=seq)
        if not seq:
            _FORGET_STREAM(conn, stream=stream)

    post.database.transact(restore)


def files_of(mirror: Mirror, stream: str) -> list[Path]:
    """The files of a stream, oldest first."""
    path = mirror.path(stream)
    return [*sorted(path.with_suffix(".old").glob("*.jsonl")), *([path] if path.exists() else [])]


def mirrored(mirror: Mirror, stream: str) -> list[dict[str, Any]]:
    """The lines that are there, in order."""
    return [json.loads(raw) for path in files_of(mirror, stream) for raw in path.read_text("utf-8").split("\n")[:-1]]


def logged(post: Postroad, stream: str) -> list[dict[str, Any]]:
    """The lines that should be there."""
    entries = post.read(stream, limit=10_000)
    return [
        {
            "v": 1, "stream": stream, "seq": place + 1, "id": one.key, "kind": one.kind, "version": one.version,
            "parent": entries[place - 1].key if place else None, "cause": one.cause, "data": one.data,
            "at": one.recorded_at.isoformat(timespec="microseconds").replace("+00:00", "Z"),
        }
        for place, one in enumerate(entries)
    ]  # fmt: skip


def same(post: Postroad, mirror: Mirror, *streams: str) -> bool:
    """Whether the files say what the logs say."""
    return all(mirrored(mirror, name) == logged(post, name) for name in streams)


async def soon(condition: Callable[[], Any]) -> None:
    """Look until the condition holds."""
    await asyncio.to_thread(until, condition)


@contextmanager
def statements(post: Postroad) -> Iterator[list[str]]:
    """What is sent to the database meanwhile."""
    sent: list[str] = []

    def before(_conn: Any, _cursor: Any, sql: str, *_rest: Any) -> None:
        sent.append(sql)

    event.listen(post.database.engine, "before_cursor_execute", before)
    yield sent
    event.remove(post.database.engine, "before_cursor_execute", before)


def keeping(post: Postroad, folder: Path) -> Keeping:
    return Keeping(post.parts(), folder, "chat", file_bytes_max=2**20)


def settle(kept: Keeping) -> None:
    """Step until there is nothing to do."""
    end = time.monotonic() + 60
    while not (kept._walk is None and not kept._waiting and kept._news is not None and kept._page_began is None):
        kept.step()
        assert time.monotonic() < end


async def test_every_entry_is_a_line(open_app: OpenApp, tmp_path: Path) -> None:
    """While loops run, what turns record is written: each entry once, in order, with its parent, down to the last."""
    post, mirror = open_app(), Mirror(tmp_path / "m", "chat", "room", file_bytes_max=1_024)
    post.recorded("room", "other")

    @post.turn("chat")
    def chat(turn: Turn) -> None:
        turn.record("reply", {"text": "\u2028 é"})

    streams = [f"{of_type}/{n}" for of_type in ("chat", "room", "other") for n in range(4)]
    async with mirror(post), post.running():
        for n in range(12):
            for stream in streams:
                publish(post, stream, n)
            await asyncio.sleep(0.02)
        await soon(lambda: idle(post))
    written = streams[:8]
    assert same(post, mirror, *written)
    assert all(len(mirrored(mirror, stream)) >= 12 for stream in written)
    assert sum(len(files_of(mirror, stream)) for stream in written) > 2 * len(written)
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == ["chat", "room"]


async def test_an_app_is_given_a_mirror_as_its_lifespan(place: dict[str, Any], tmp_path: Path) -> None:
    """It is kept wherever the app's loops run, in a drain too, and ends with them."""
    mirror = Mirror(tmp_path / "m", "chat")
    post = Postroad(place["database"], schema=place.get("schema"), migrate=True, lifespan=mirror)
    post.recorded("chat")
    publish(post, "chat/1", 1, 2)
    await post.adrain()
    assert same(post, mirror, "chat/1")
    with post.running():
        publish(post, "chat/1", 3)
        until(lambda: len(mirrored(mirror, "chat/1")) == 3)
    assert same(post, mirror, "chat/1")
    post.close()


async def test_what_others_record_is_found(open_app: OpenApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns of another process are found, also long ones that began before the mirror did, or before others did."""
    walked: list[list[str] | None] = []
    page = mirror_news.Walk.page
    monkeypatch.setattr(mirror_news.Walk, "page", lambda walk: (walked.append(page(walk)), walked[-1])[1])
    monkeypatch.setattr(mirror_news, "BACK", 0)
    monkeypatch.setattr(mirror_news, "FAR_BACK", 0)
    worker, post, mirror = open_app(), open_app(), Mirror(tmp_path, "chat")
    go = asyncio.Event()

    @worker.turn("chat")
    async def chat(turn: Turn) -> None:
        if turn.subject.startswith("slow"):
            await go.wait()
        turn.record("reply", {})

    async with worker.running():
        await begin(worker, "chat/slow1")
        publish(worker, "chat/0", 0)
        await soon(lambda: len(worker.read("chat/0")) == 2)
        async with mirror(post):
            await soon(lambda: None in walked)  # what is found from here on is not found by the walk
            for n, slow in ((1, "chat/slow2"), (2, None)):
                publish(worker, f"chat/{n}", n)
                await soon(lambda n=n: len(mirrored(mirror, f"chat/{n}")) == 2)
                if slow is not None:
                    await begin(worker, slow)
            assert [mirrored(mirror, f"chat/slow{n}") for n in (1, 2)] == [[], []]
            go.set()
            await soon(lambda: all(len(mirrored(mirror, f"chat/slow{n}")) == 2 for n in (1, 2)))
    assert same(post, mirror, "chat/slow1", "chat/slow2", "chat/1", "chat/2")


async def begin(worker: Postroad, stream: str) -> None:
    """Have a turn begin that takes its time."""
    publish(worker, stream, 1)
    await soon(lambda: (row := worker.streams.get(stream)) and row.state == "running")


def test_a_look_costs_the_same_however_many_streams_there_are(open_app: OpenApp, tmp_path: Path) -> None:
    """When nothing is new a look is two statements, beside three streams and beside three hundred."""
    post = open_app()
    kept = keeping(post, tmp_path)
    for count in (3, 300):
        grow(post, [f"chat/{count}-{n}" for n in range(count)], 2)
        kept.release()
        settle(kept)
        for _ in range(4):
            kept._look_at = 0
            with statements(post) as sent:
                kept.step()
            assert len([sql for sql in sent if sql.startswith("SELECT") and "postroad_" in sql]) == 2
    kept.release()


async def test_one_process_writes_and_another_takes_over(
    open_app: OpenApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A second process waits, and says for whom; when the first one ends it goes on where that has stopped."""
    monkeypatch.setattr(mirror_keeping, "LOCK_EVERY", SECOND // 20)
    caplog.set_level(logging.INFO, "postroad")
    first, second, mirror = open_app(), open_app(), Mirror(tmp_path, "chat")
    first.recorded("chat")
    told: list[str] = []
    second.observe(lambda name, values: told.append(name))
    async with first.running():
        async with mirror(first):
            publish(first, "chat/1", 1)
            await soon(lambda: len(mirrored(mirror, "chat/1")) == 1)
            other = mirror(second)
            await other.__aenter__()
            await soon(lambda: "mirror.waiting" in told)
            with pytest.raises(Refused, match="process"):
                mirror.catch_up(second)
            publish(first, "chat/1", 2)
            await soon(lambda: len(mirrored(mirror, "chat/1")) == 2)
        publish(first, "chat/1", 3)
        await soon(lambda: len(mirrored(mirror, "chat/1")) == 3)
        await other.__aexit__(None, None, None)
    assert same(first, mirror, "chat/1")
    assert told.count("mirror.waiting") == 1
    assert "this one waits" in caplog.text
    assert "for this process to write now" in caplog.text


def test_a_restored_database_is_followed(open_app: OpenApp, tmp_path: Path) -> None:
    """Lines that the log does not have any more are moved aside, and people are told; the others stay."""
    post, mirror = open_app(), Mirror(tmp_path, "chat", file_bytes_max=1_024)
    streams = ["chat/back", "chat/gone", "chat/" + "long" * 60, "chat/same"]
    grow(post, streams, 20)
    assert mirror.catch_up(post).lines == 80
    before = mirrored(mirror, "chat/back")
    set_back(post, "chat/back", 7)
    for stream in streams[1:3]:
        set_back(post, stream, 0)
    kept = Keeping(post.parts(), tmp_path, "chat", file_bytes_max=1_024)
    settle(kept)
    kept.release()
    assert mirrored(mirror, "chat/back") == before[:7] == logged(post, "chat/back")
    assert [files_of(mirror, stream) for stream in streams[1:3]] == [[], []]
    assert same(post, mirror, "chat/same")
    for stream, count in zip(streams, (13, 20, 20, 0), strict=True):
        aside = mirror.path(stream).with_suffix(".aside").glob("*")
        assert sum(len(path.read_text().splitlines()) for path in aside) == count
    assert [one.code for one in post.database.read(alerts.list_)] == ["mirror.aside"]
    grow(post, ["chat/gone"], 3)
    assert mirror.catch_up(post).lines == 3
    assert same(post, mirror, *streams[:2])


async def test_a_disk_that_refuses_stops_nothing(
    open_app: OpenApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a folder that can't be made turns go on; people are told once; when it can, all is written."""
    monkeypatch.setattr(mirror_keeping, "AGAIN", mirror_keeping.Retry(attempts=1, first=0.02, cap=0.1))
    caplog.set_level(logging.INFO, "postroad")
    post, place = open_app(), tmp_path / "m"
    place.write_text("a file, where the folder should be")
    mirror = Mirror(place, "chat")
    post.recorded("chat")
    async with mirror(post), post.running():
        publish(post, "chat/1", 1, 2)
        await soon(lambda: len(post.read("chat/1")) == 2)
        await soon(lambda: post.database.read(alerts.list_))
        publish(post, "chat/1", 3)
        await soon(lambda: len(post.read("chat/1")) == 3)
        place.unlink()
        await soon(lambda: len(mirrored(mirror, "chat/1")) == 3)
    assert [(one.code, one.subject) for one in post.database.read(alerts.list_)] == [("mirror.stalled", "chat")]
    assert caplog.text.count("it will be tried again") == 1
    assert "working again" in caplog.text


async def test_whatever_lasts_is_told(
    open_app: OpenApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error that is none of the disk's stops one type only; people hear of it once, when it lasts and they can."""
    monkeypatch.setattr(mirror_keeping, "AGAIN", mirror_keeping.Retry(attempts=1, first=0.02, cap=0.1))
    caplog.set_level(logging.INFO, "postroad")
    post, mirror = open_app(), Mirror(tmp_path, "chat", "room")
    post.recorded("chat", "room")
    bring = Scribe.bring
    broken = threading.Event()
    broken.set()

    def sometimes(scribe: Scribe, streams: list[str]) -> Any:
        if broken.is_set() and "chat/1" in streams:
            raise ValueError("embedded null byte")
        return bring(scribe, streams)

    raise_alerts, tried = alerts.raise_alerts, []

    def at_the_third_time(*args: Any, **kwargs: Any) -> Any:
        tried.append(1)
        if len(tried) < 3:
            raise ValueError("away")
        return raise_alerts(*args, **kwargs)

    monkeypatch.setattr(alerts, "raise_alerts", at_the_third_time)
    monkeypatch.setattr(Scribe, "bring", sometimes)
    async with mirror(post), post.running():
        publish(post, "chat/1", 1)
        publish(post, "room/1", 1)
        await soon(lambda: post.database.read(alerts.list_))
        await soon(lambda: len(mirrored(mirror, "room/1")) == 1)
        broken.clear()
        await soon(lambda: len(mirrored(mirror, "chat/1")) == 1)
    (alert,) = post.database.read(alerts.list_)
    assert (alert.code, alert.subject) == ("mirror.stalled", "chat")
    assert "ValueError: embedded null byte" in alert.detail
    assert len(tried) == 3
    assert caplog.text.count("it will be tried again") == 1
    assert "working again" in caplog.text


def test_what_does_not_last_alerts_nobody(open_app: OpenApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A database that does not answer for a moment is told to observers, and alerts nobody."""
    monkeypatch.setattr(mirror_keeping, "AGAIN", mirror_keeping.Retry(attempts=1, first=0, jitter=False))
    post = open_app()
    grow(post, ["chat/1"], 1)
    kept = keeping(post, tmp_path)
    look = mirror_news.News.look
    told: list[Exception] = []
    post.observe(lambda name, values: told.append(values["error"]) if name == "mirror.error" else None)
    settle(kept)

    class Away(Exception):
        pass

    def raising(_news: mirror_news.News) -> list[str]:
        raise Away

    kept._look_at = 0
    monkeypatch.setattr(mirror_news.News, "look", raising)
    for _ in range(mirror_keeping.LASTING - 1):
        kept.step()
    assert kept._failures == {"": 2}
    monkeypatch.setattr(mirror_news.News, "look", look)
    kept.step()
    assert post.database.read(alerts.list_) == []
    assert [type(error) for error in told] == [Away]
    kept.release()


@pytest.mark.parametrize("harm", ["a file, no folder", "a folder, no file", "a folder, no lock", "a dead link"])
def test_a_catch_up_that_cannot_write_is_refused(open_app: OpenApp, tmp_path: Path, harm: str) -> None:
    """What the disk says is our error's cause, with the path in its text; when it is mended all is written."""
    post, place = open_app(), tmp_path / "m"
    mirror = Mirror(place, "chat")
    grow(post, ["chat/1"], 3)
    wrong = {
        "a file, no folder": place,
        "a folder, no file": mirror.path("chat/1"),
        "a folder, no lock": place / "chat" / ".lock",
        "a dead link": place,
    }[harm]
    wrong.parent.mkdir(parents=True, exist_ok=True)
    if harm == "a dead link":
        wrong.symlink_to(tmp_path / "nothing")
    elif harm == "a file, no folder":
        wrong.touch()
    else:
        wrong.mkdir()
    for streams in ((), ("chat/1",)):
        with pytest.raises(Refused, match=r"could not be written to: .*/m") as caught:
            mirror.catch_up(post, *streams)
        assert (caught.value.about, isinstance(caught.value.__cause__, OSError)) == ({"field": "folder"}, True)
    wrong.rmdir() if wrong.is_dir() else wrong.unlink()
    assert mirror.catch_up(post) == Caught(lines=3)
    assert same(post, mirror, "chat/1")


def test_a_line_that_is_too_deep_to_be_read_is_set_aside(open_app: OpenApp, tmp_path: Path) -> None:
    """What somebody has written into a file stops nothing, however odd it is."""
    post, mirror = open_app(), Mirror(tmp_path, "chat")
    grow(post, ["chat/1"], 3)
    mirror.path("chat/1").parent.mkdir(parents=True)
    mirror.path("chat/1").write_bytes(b'{"v":1,"data":' + b"[" * 100_000 + b"\n")
    assert mirror.catch_up(post) == Caught(lines=3, aside=1)
    assert same(post, mirror, "chat/1")


def test_a_file_that_is_broken_holds_up_no_other(open_app: OpenApp, tmp_path: Path) -> None:
    """A stream whose file cannot be written is tried again by itself; the others are written."""
    post, mirror = open_app(), Mirror(tmp_path, "chat")
    grow(post, [f"chat/{n}" for n in range(5)], 3)
    mirror.path("chat/2").mkdir(parents=True)
    kept = keeping(post, tmp_path)
    until(lambda: kept.step() > 0 and kept._walk is None)
    assert same(post, mirror, *(f"chat/{n}" for n in (0, 1, 3, 4)))
    assert set(kept._waiting) == {"chat/2"}
    mirror.path("chat/2").rmdir()
    settle(kept)
    kept.release()
    assert same(post, mirror, "chat/2")


def test_a_folder_that_is_removed_is_made_again(open_app: OpenApp, tmp_path: Path) -> None:
    """Somebody removes the folder under a running mirror: it is locked and written anew, whole."""
    post, mirror = open_app(), Mirror(tmp_path / "m", "chat")
    grow(post, ["chat/1", "chat/2"], 3)
    kept = keeping(post, tmp_path / "m")
    settle(kept)
    shutil.rmtree(tmp_path / "m")
    kept.step()
    settle(kept)
    kept.release()
    assert same(post, mirror, "chat/1", "chat/2")


def test_a_deleted_stream_has_no_files(open_app: OpenApp, tmp_path: Path) -> None:
    """Deleting a stream removes its files, what was set aside too, whether or not a mirror ran at the time."""
    post, mirror = open_app(), Mirror(tmp_path, "chat", file_bytes_max=1_024)
    grow(post, ["chat/1", "chat/2", "chat/3"], 20)
    mirror.catch_up(post)
    set_back(post, "chat/1", 5)
    assert mirror.catch_up(post).aside == 15
    kept = keeping(post, tmp_path)
    settle(kept)
    post.streams.delete("chat/1", actor="a person")
    until(lambda: (kept.step(), files_of(mirror, "chat/1"))[1] == [])
    assert not mirror.path("chat/1").with_suffix(".aside").exists()
    kept.release()
    post.streams.delete("chat/2", actor="a person")
    assert files_of(mirror, "chat/2")
    assert mirror.catch_up(post).removed == 1
    assert [path.name for path in sorted(mirror.path("chat/3").parent.iterdir())] == [".lock", "3.jsonl", "3.old"]
    assert same(post, mirror, "chat/3")


def test_many_streams_are_caught_up_with(open_app: OpenApp, tmp_path: Path) -> None:
    """Three hundred streams that no mirror has seen are written in pages; the next catch-up finds nothing to do."""
    post, mirror = open_app(), Mirror(tmp_path, "chat", "room")
    streams = [f"chat/{n}" for n in range(300)]
    grow(post, streams, 3)
    grow(post, ["room/long"], 1_000)
    assert mirror.catch_up(post, "chat/7", "room/long").lines == 1_003
    assert mirror.catch_up(post).lines == 897
    assert mirror.catch_up(post) == Caught()
    assert same(post, mirror, "room/long", *streams[::50])


@pytest.mark.parametrize("limit", [(mirror_keeping, "WAITING_MAX", 3), (mirror_news, "ROWS_MAX", 5)])
def test_more_at_once_than_is_remembered(
    open_app: OpenApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: tuple[Any, str, int]
) -> None:
    """Where more streams have changed than are kept in mind, or than a look reads, all are found nevertheless."""
    monkeypatch.setattr(*limit)
    monkeypatch.setattr(mirror_news, "FAR_BACK", 600 * SECOND)  # longer than it is waited for here
    post, mirror = open_app(), Mirror(tmp_path, "chat")
    post.recorded("chat")
    kept = keeping(post, tmp_path)
    settle(kept)
    for n in range(20):
        publish(post, f"chat/{n}", 1)
        if n % 3:
            post.drain()
    post.drain()
    until(lambda: (kept.step(), same(post, mirror, *(f"chat/{n}" for n in range(20))))[1])
    kept.release()


def test_a_mirror_in_a_harness_is_caught_up_by_hand(harness: Open, tmp_path: Path) -> None:
    """A test's harness runs no mirror; a catch-up works there as everywhere, and so does the block."""
    post, mirror = Postroad(), Mirror(tmp_path, "chat")
    post.recorded("chat")
    h = harness(post)

    async def block() -> None:
        async with mirror(post):
            await h.adrain()

    publish(post, "chat/1", 1)
    asyncio.run(block())
    assert same(post, mirror, "chat/1")
    publish(post, "chat/1", 2)
    h.drain()
    assert mirror.catch_up(post).lines == 1
    assert same(post, mirror, "chat/1")


def test_recent_things_are_told_once() -> None:
    """Things that become visible late are told, none twice, and a clock that was set back hides nothing."""
    recent = Recent(1_000 * SECOND)
    now = 1_001 * SECOND
    assert recent.place(now, 3 * SECOND).at == 997 * SECOND
    first, late = Happening(1_001 * SECOND, "b", "chat/b", True), Happening(999 * SECOND, "a", "chat/a", True)
    for seen, fresh in (([first], [first]), ([late, first], [late]), ([late, first], [])):
        assert recent.fresh(seen, now) == fresh
        for one in fresh:
            recent.told(one)
    assert recent.place(now + 10, 3 * SECOND).at == 998 * SECOND
    assert recent.place(500 * SECOND, 3 * SECOND).at == 497 * SECOND
    assert recent.place(now + 2 * FAR_BACK, 3 * SECOND).at == 1_001 * SECOND
    recent.fresh([], now + 10 * FAR_BACK)
    back = Happening(500 * SECOND, "c", "chat/c", True)
    assert recent.fresh([back], 501 * SECOND) == [back]


class Raw:
    """A path of bytes."""

    def __fspath__(self) -> bytes:
        return b"m"


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (lambda folder: Mirror("", "chat"), "folder"),
        (lambda folder: Mirror(7, "chat"), "folder"),
        (lambda folder: Mirror(f"{folder}/bad\0x", "chat"), "folder"),
        (lambda folder: Mirror(Path("bad\0x"), "chat"), "folder"),
        (lambda folder: Mirror(f"{folder}/\ud800", "chat"), "folder"),
        (lambda folder: Mirror(Raw(), "chat"), "folder"),
        (lambda folder: Mirror(folder), "stream_types"),
        (lambda folder: Mirror(folder, "chat/1"), "stream_type"),
        (lambda folder: Mirror(folder, ""), "stream_type"),
        (lambda folder: Mirror(folder, "chat", file_bytes_max=10), "file_bytes_max"),
        (lambda folder: Mirror(folder, "chat").path("room/1"), "stream"),
        (lambda folder: Mirror(folder, "chat").path("chat"), "stream"),
        (lambda folder: Mirror(folder, "chat").catch_up(Postroad(), "room/1"), "stream"),
        (lambda folder: Mirror(folder, "chat").catch_up(None), "post"),
        (lambda folder: Mirror(folder, "chat").catch_up("sqlite:///a.db", "chat/1"), "post"),
        (lambda folder: Mirror(folder, "chat")(None), "post"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, given: Callable[[Any], Any], field: str) -> None:
    """A folder that is none or never will be, no types, a stream for a type, other types' streams, no app."""
    with pytest.raises(InvalidInput) as caught:
        given(tmp_path)
    assert caught.value.about["field"] == field


async def test_nothing_is_left_behind(open_app: OpenApp, tmp_path: Path) -> None:
    """After the block its thread has ended, and nobody has the folder."""
    post, mirror = open_app(), Mirror(tmp_path, "chat")
    async with mirror(post):
        assert THREAD in [thread.name for thread in threading.enumerate()]
    assert THREAD not in [thread.name for thread in threading.enumerate()]
    assert mirror.catch_up(post).lines == 0
