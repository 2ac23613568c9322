"""Mirror: a copy of streams' logs as files of JSON lines, for people and for programs that read files (provisional)."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path

import msgspec

from postroad.agent.mirror.files import StreamFiles
from postroad.agent.mirror.keeping import AGAIN, BATCH, GAP, Keeping
from postroad.agent.mirror.lines import stem
from postroad.agent.mirror.lock import FolderLock
from postroad.agent.mirror.news import Walk
from postroad.agent.mirror.scribe import Scribe
from postroad.engine.app import Postroad
from postroad.engine.declarations import check_stream_type
from postroad.engine.loop import Parts
from postroad.engine.telemetry import logger
from postroad.model.clock import SECOND
from postroad.model.errors import InvalidInput, Refused, shown
from postroad.model.ids import check_stream, stream_type
from postroad.model.payload import whole
from postroad.store.database import Database

FILE_BYTES = 64 * 2**20
FILE_BYTES_MIN = 1_024
FINISH = 2 * SECOND
THREAD = "postroad-mirror"


class Caught(msgspec.Struct, kw_only=True):
    """What a catch-up has done: how many lines were written, and set aside; of how many streams files were removed."""

    lines: int = 0
    aside: int = 0
    removed: int = 0


class Mirror:
    """A file of JSON lines for each stream of some types, written from the log.

    Give it to an app as its `lifespan`: it is kept up to date wherever the app's loops run. Of the processes of which
    several have the folder one writes at a time, the others stand by. An app with a lifespan of its own enters
    `mirror(post)` there.

    Args:
        folder: Where the files go, each type in a folder of its own. Made if it is missing, for its owner only.
        stream_types: Whose streams.
        file_bytes_max: A file that would grow beyond it is closed, and the next one begun.
    """

    def __init__(self, folder: str | os.PathLike[str], *stream_types: str, file_bytes_max: int = FILE_BYTES) -> None:
        self._folder = Path(os.path.abspath(_path(folder)))
        if not stream_types:
            raise InvalidInput("A mirror needs at least one stream type.", field="stream_types")
        self._types = tuple(dict.fromkeys(check_stream_type(name) for name in stream_types))
        self._file_bytes_max = whole(file_bytes_max, "file_bytes_max", least=FILE_BYTES_MIN, most=2**63 - 1)

    def path(self, stream: str) -> Path:
        """The file to which a stream's next line is written; there is none before its first one."""
        folder = self._folder / stem(self._type_of(stream))
        return StreamFiles(folder, stream, file_bytes_max=self._file_bytes_max).path

    def __call__(self, post: Postroad) -> AbstractAsyncContextManager[None]:
        """Keep it up to date for as long as the block lasts.

        Raises:
            InvalidInput: `post` is no Postroad.
        """
        return self._kept(_app(post))

    def catch_up(self, post: Postroad, *streams: str) -> Caught:
        """Bring the files of these streams, or of all, up to the log, now and here.

        Raises:
            InvalidInput: `post` is no Postroad, or a stream is none, or not of this mirror's types.
            Refused: Another process keeps this mirror; or the folder or a file in it cannot be written to, with the
                OSError as its cause. What was written is sound, and the next catch-up goes on from there.
            SchemaMismatch: The database's schema does not fit this code.
        """
        for name in streams:
            self._type_of(name)
        return self.write(_app(post).database, *streams)

    def write(self, database: Database, *streams: str) -> Caught:
        """`catch_up` for who has a database and no app."""
        try:
            return self._write(database, streams)
        except OSError as error:
            raise Refused(f"{self._folder} could not be written to: {error}.", field="folder") from error

    def _write(self, database: Database, streams: Sequence[str]) -> Caught:
        caught = Caught()
        for of_type in self._types:
            chosen = [check_stream(name) for name in streams if self._type_of(name) == of_type]
            if streams and not chosen:
                continue
            with self._locked(of_type) as folder:
                scribe = Scribe(database, folder, file_bytes_max=self._file_bytes_max)
                for page in [chosen] if streams else _pages(Walk(database, of_type, folder)):
                    _bring(scribe, page, caught)
        return caught

    def _type_of(self, stream: str) -> str:
        of_type = stream_type(check_stream(stream))
        if of_type not in self._types:
            raise InvalidInput(f"stream must be of the types {', '.join(self._types)}.", field="stream")
        return of_type

    @contextmanager
    def _locked(self, of_type: str) -> Iterator[Path]:
        folder = self._folder / stem(of_type)
        lock = FolderLock(folder)
        if not lock.take():
            raise Refused(f"{lock.holder()} keeps the mirror in {folder}.", field="folder")
        try:
            yield folder
        finally:
            lock.release()

    @asynccontextmanager
    async def _kept(self, post: Postroad) -> AsyncIterator[None]:
        if post.database.inline:  # a test's: no thread may use it
            yield
            self.catch_up(post)
            return
        parts = post.parts()
        keeper = Keeper(
            parts,
            [Keeping(parts, self._folder, name, file_bytes_max=self._file_bytes_max) for name in self._types],
        )
        keeper.start()
        try:
            yield
        finally:
            await asyncio.to_thread(keeper.close)


class Keeper:
    """The thread that writes mirrors. It is a daemon: a disk that does not answer keeps no process from ending."""

    def __init__(self, parts: Parts, mirrors: list[Keeping]) -> None:
        self._parts = parts
        self._clock = parts.database.clock
        self._mirrors = mirrors
        self._closing = threading.Event()
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)

    def start(self) -> None:
        """Keep them up to date from now on."""
        self._thread.start()

    def close(self) -> None:
        """Write what was committed by now, if that takes no longer than a moment, and end."""
        self._closing.set()
        self._woken.set()
        self._thread.join(timeout=2 * FINISH / SECOND)
        if self._thread.is_alive():
            logger.warning("mirror: the disk or the database does not answer; what is missing is written later")

    def _run(self) -> None:
        unsubscribe = self._parts.wakeups.subscribe(("entries",), self._woken.set)
        try:
            while not self._closing.is_set():
                rest = min(self._stepped(one) for one in self._mirrors)
                if rest and not self._closing.wait(GAP / SECOND):
                    self._woken.wait(max(0, rest - GAP) / SECOND)
                self._woken.clear()
            self._finish()
        finally:
            unsubscribe()

    @staticmethod
    def _stepped(mirror: Keeping) -> int:
        """What a step answers; a while, if something lasts and there is no database to tell people of it."""
        try:
            return mirror.step()
        except Exception as error:
            logger.debug("mirror of %s: no alert could be raised: %s", mirror.type, error)
            return AGAIN.delay(1, 0.5)

    def _finish(self) -> None:
        until = self._clock.monotonic() + FINISH
        for mirror in self._mirrors:
            try:
                mirror.finish(until)
            except Exception as error:
                logger.warning("mirror of %s: not everything was written: %s", mirror.type, error)


def _path(folder: object) -> str:
    """The path that was given, if there can be files with such a name."""
    path = os.fspath(folder) if isinstance(folder, str | os.PathLike) else None
    if not isinstance(path, str) or not path:
        raise InvalidInput(f"folder must be a path, got {shown(folder)}.", field="folder")
    try:
        whole_path = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        whole_path = False
    if not whole_path:
        raise InvalidInput(f"folder holds what no file's name can hold, got {shown(folder)}.", field="folder")
    return path


def _app(post: object) -> Postroad:
    if not isinstance(post, Postroad):
        raise InvalidInput(f"post must be a Postroad, got {shown(post)}.", field="post")
    return post


def _pages(walk: Walk) -> Iterator[list[str]]:
    while (page := walk.page()) is not None:
        yield page


def _bring(scribe: Scribe, page: list[str], caught: Caught) -> None:
    left = page
    while left:
        brought = scribe.bring(left[:BATCH])
        for error in brought.troubles.values():
            raise error
        caught.lines += brought.lines
        caught.aside += sum(brought.aside.values())
        caught.removed += len(brought.removed)
        left = brought.again + left[BATCH:]
