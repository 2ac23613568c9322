"""Bringing files up to the log: what is missing is written, what the log does not have is set aside."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from postroad.agent.mirror.files import StreamFiles, Tail
from postroad.agent.mirror.lines import Line, is_of, line_of
from postroad.model.events import Entry
from postroad.store import log, watching
from postroad.store.database import Database
from postroad.store.watching import Asked, News

ENTRIES_MAX = 200  # that are in memory at once


class Brought(msgspec.Struct, kw_only=True):
    """What became of some streams' files.

    Attributes:
        lines: How many lines were written.
        aside: How many lines were set aside, by stream.
        cut: Of which streams a line was cut that had not been finished.
        removed: The streams whose files were removed, since they were deleted.
        again: The streams of which there is more to do.
        troubles: What the disk said, by stream; there is all to do again.
    """

    lines: int = 0
    aside: dict[str, int] = {}
    cut: list[str] = []
    removed: list[str] = []
    again: list[str] = []
    troubles: dict[str, OSError] = {}


class Scribe:
    """Writes the files of one stream type. Whoever has one must hold the folder's lock."""

    def __init__(self, database: Database, folder: Path, *, file_bytes_max: int) -> None:
        self._database = database
        self._folder = folder
        self._file_bytes_max = file_bytes_max

    def bring(self, streams: Sequence[str]) -> Brought:
        """Bring the files of these streams towards the log, a bounded piece of it at a time."""
        brought = Brought()
        tails = {name: tail for name in streams if (tail := self._tail(name, brought)) is not None}
        news, full = self._news(tails)
        for name, tail in tails.items():
            if name not in news and full:
                brought.again.insert(0, name)  # there was no room for it in this look; there shall be in the next
                continue
            try:
                self._carry(name, tail, news.get(name), brought)
            except OSError as error:
                brought.troubles[name] = error
        return brought

    def files(self, stream: str) -> StreamFiles:
        """The files of a stream."""
        return StreamFiles(self._folder, stream, file_bytes_max=self._file_bytes_max)

    def _tail(self, stream: str, brought: Brought) -> Tail | None:
        try:
            tail = self.files(stream).tail()
        except OSError as error:
            brought.troubles[stream] = error
            return None
        if tail.cut:
            brought.cut.append(stream)
        return tail

    def _news(self, tails: Mapping[str, Tail]) -> tuple[dict[str, News], bool]:
        """The entries from each last line on, that one too; and whether there may be streams that had no room."""
        asked = [Asked(name, max(0, tail.seq - 1)) for name, tail in tails.items()]
        now = self._database.clock.wall()
        found = self._database.read(watching.look, asked, limit=max(ENTRIES_MAX, 2 * len(asked)), now=now)
        told = sum(len(news.entries) for news in found.values())
        return {one.stream: news for one, news in found.items()}, told >= max(ENTRIES_MAX, 2 * len(asked))

    def _carry(self, stream: str, tail: Tail, news: News | None, brought: Brought) -> None:
        files = self.files(stream)
        if news is not None and news.deleted:
            if files.delete():
                brought.removed.append(stream)
            return
        entries = [] if news is None else list(news.entries)
        if tail.line is not None and entries and is_of(tail.line, entries[0]):
            entries = entries[1:]
        elif tail.line is not None or not tail.sound:
            brought.aside[stream] = files.rewind(partial(self._entries, stream))
            brought.again.append(stream)
            return
        lines = _lines(entries, tail.line)
        files.append(tail, lines)
        brought.lines += len(lines)
        if news is not None and news.upto < news.version:
            brought.again.append(stream)

    def _entries(self, stream: str, after: int, limit: int) -> Sequence[Entry]:
        return self._database.read(log.read, stream, after=after, limit=limit)


def _lines(entries: Sequence[Entry], last: Line | None) -> list[Line]:
    """The lines of entries that follow each other, behind the last one that is written."""
    parent = None if last is None else last.id
    lines = []
    for entry in entries:
        lines.append(line_of(entry, parent))
        parent = entry.key
    return lines
