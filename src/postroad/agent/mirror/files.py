"""The files of one stream's mirror: the one that grows, those that were full, and what was set aside.

    42.jsonl                     grows
    42.old/000000000500.jsonl    was full; the number is the place of its last line, so that names sort as lines do
    42.aside/<hash>.jsonl        what stood in the files and is not in the log

Where a file ends is the only memory of how far the mirror has come. So one may die after each step: what was half
written is cut or written again, what was copied aside and not yet removed is copied to the same place again.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from postroad.agent.mirror.lines import Line, is_of, read, stem, written
from postroad.model.events import Entry
from postroad.model.ids import subject

BLOCK = 64 * 1024
PAGE = 200  # lines that are held against the log at a time
SUFFIX = ".jsonl"
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_MAKE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
ReadLog = Callable[[int, int], Sequence[Entry]]


class Tail(NamedTuple):
    """Where a stream's files end.

    Attributes:
        line: The last one; None: there is none, or it is no line of this stream.
        size: Bytes of the file that grows.
        sound: Whether what stands there can be gone on from.
        cut: Bytes of a line that was begun and never finished; they are gone now.
    """

    line: Line | None
    size: int
    sound: bool = True
    cut: int = 0

    @property
    def seq(self) -> int:
        """The place of the last line; 0: there is none."""
        return 0 if self.line is None else self.line.seq


class StreamFiles:
    """The files of one stream. All methods raise OSError if the disk refuses; whatever was begun can be begun again."""

    def __init__(self, folder: Path, stream: str, *, file_bytes_max: int) -> None:
        base = stem(subject(stream))
        self.path = folder / f"{base}{SUFFIX}"
        self.old = folder / f"{base}.old"
        self.aside = folder / f"{base}.aside"
        self._stream = stream
        self._file_bytes_max = file_bytes_max

    def tail(self) -> Tail:
        """See where the files end, and cut off what is not a whole line."""
        last, end, size = _last_lines(self.path)
        if end < size:
            os.truncate(self.path, end)
        if last:
            return self._tail(last, end, cut=size - end)
        full = self._full()
        return self._tail_of_full(full[0], cut=size) if full else Tail(None, 0, cut=size)

    def _tail(self, last: Sequence[bytes], size: int, *, cut: int) -> Tail:
        """The end that these last two lines make, or the only one: the second must follow the first."""
        lines = [read(raw) for raw in last]
        line = lines[-1]
        sound = line is not None and line.stream == self._stream and _follow(lines)
        return Tail(line if sound else None, size, sound, cut)

    def _tail_of_full(self, path: Path, *, cut: int) -> Tail:
        """The end of a file that was full, while none grows. One that has lost its end grows again."""
        last, end, size = _last_lines(path)
        tail = self._tail(last or [b""], 0, cut=cut)
        if not tail.sound or end < size:
            return tail._replace(line=None, sound=False)
        if path.name == _full_name(tail.seq):
            return tail
        os.replace(path, self.path)
        return tail._replace(size=size)

    def append(self, tail: Tail, lines: Sequence[Line]) -> None:
        """Write lines behind the last one; a file that would become too large is closed, and the next one begun."""
        size, last = tail.size, tail.seq
        block = bytearray()
        for line in lines:
            raw = written(line)
            filled = size + len(block)
            if filled and filled + len(raw) > self._file_bytes_max:
                self._write(block)
                self._rotate(last)
                size, block = 0, bytearray()
            block += raw
            last = line.seq
        self._write(block)

    def rewind(self, read_log: ReadLog) -> int:
        """Set aside whatever follows the last line that the log has too; how many lines went.

        `read_log(after, limit)` are the stream's entries. Files are looked at from the newest on, until one begins with
        a line of the log.
        """
        gone = 0
        for path in [*self._growing(), *self._full()]:
            kept, size = self._agreed(path, read_log), path.stat().st_size
            if not size:
                _remove(path)
            elif kept < size:
                gone += self._set_aside(path, kept)
            if kept:
                break
        return gone

    def delete(self) -> bool:
        """Remove all of it; False: there was nothing."""
        found = False
        for path in (self.path, *_inside(self.aside), *_inside(self.old)):
            found = _remove(path) or found
        for folder in (self.aside, self.old):
            if folder.is_dir():
                os.rmdir(folder)
        return found

    def _growing(self) -> list[Path]:
        return [self.path] if self.path.exists() else []

    def _full(self) -> list[Path]:
        """The files that were full, the newest first."""
        return sorted((path for path in _inside(self.old) if path.suffix == SUFFIX), reverse=True)

    def _write(self, block: bytearray) -> None:
        if block:
            _append(self.path, block)

    def _rotate(self, last: int) -> None:
        """Close the file that grows. On the disk first: what is written afterwards must not outlive it."""
        os.makedirs(self.old, mode=0o700, exist_ok=True)
        target = self.old / _full_name(last)
        if target.exists():
            raise FileExistsError(f"{target} is there already; nothing was overwritten")
        _sync(self.path)
        os.replace(self.path, target)

    def _agreed(self, path: Path, read_log: ReadLog) -> int:
        """How many bytes at the beginning of a file are lines of the log, one after the other."""
        agreed, page = 0, list[tuple[Line, int]]()
        for line, end in self._lines(path):
            page.append((line, end))
            if len(page) == PAGE:
                same = _agreed(page, read_log)
                agreed = same or agreed
                if same != page[-1][1]:
                    return agreed
                page = []
        return (_agreed(page, read_log) if page else 0) or agreed

    def _lines(self, path: Path) -> Iterator[tuple[Line, int]]:
        """A file's lines as long as they follow each other, each with the place of its end."""
        end, seq = 0, None
        with path.open("rb") as file:
            for raw in file:
                line = read(raw) if raw.endswith(b"\n") else None
                if line is None or line.stream != self._stream or (seq is not None and line.seq != seq + 1):
                    return
                end, seq = end + len(raw), line.seq
                yield line, end

    def _set_aside(self, path: Path, kept: int) -> int:
        """Move what follows the first `kept` bytes of a file; what is kept of one that was full grows again."""
        with path.open("rb") as file:
            file.seek(kept)
            digest = hashlib.file_digest(file, "sha256").hexdigest()[:32]
            file.seek(kept)
            lines = _copy(file, self.aside, f"{digest}{SUFFIX}")
        if not kept:
            _remove(path)
            return lines
        if path != self.path:
            os.replace(path, self.path)
        os.truncate(self.path, kept)
        return lines


def _full_name(last: int) -> str:
    """How a file that is full is called, by the place of its last line."""
    return f"{last:012d}{SUFFIX}"


def _agreed(page: Sequence[tuple[Line, int]], read_log: ReadLog) -> int:
    """The end of the last of these lines that is as the log has it, like all before it; 0: the first one is not."""
    found = {entry.seq: entry for entry in read_log(page[0][0].seq - 1, len(page))}
    agreed = 0
    for line, end in page:
        entry = found.get(line.seq)
        if entry is None or not is_of(line, entry):
            break
        agreed = end
    return agreed


def _follow(lines: Sequence[Line | None]) -> bool:
    """Whether the last two are lines that follow each other; one alone does."""
    if len(lines) < 2:
        return True
    before, line = lines
    return before is not None and line is not None and (before.seq + 1, before.id) == (line.seq, line.parent)


def _last_lines(path: Path) -> tuple[list[bytes], int, int]:
    """The last two whole lines of a file, where they end, and how long the file is; nothing if there is no file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            end = begin = _behind_line_end(file, size)
            for _ in range(2):
                begin = _behind_line_end(file, max(0, begin - 1))
            file.seek(begin)
            return [raw + b"\n" for raw in file.read(end - begin).split(b"\n")[:-1]], end, size
    except FileNotFoundError:
        return [], 0, 0


def _behind_line_end(file: IO[bytes], before: int) -> int:
    """The place behind the last line's end that stands before a place; 0: none does."""
    while before > 0:
        begin = max(0, before - BLOCK)
        file.seek(begin)
        found = file.read(before - begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        before = begin
    return 0


def _append(path: Path, block: bytearray) -> None:
    """Write all of it or nothing, as far as the disk lets us."""
    descriptor = os.open(path, _APPEND, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        try:
            _write_all(descriptor, block)
        except OSError:
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, block: bytes | bytearray) -> None:
    view = memoryview(block)
    while view:
        view = view[os.write(descriptor, view) :]


def _copy(source: IO[bytes], folder: Path, name: str) -> int:
    """Copy the rest of a file into one of this name, on the disk when it has it; how many lines those are."""
    os.makedirs(folder, mode=0o700, exist_ok=True)
    part = folder / "part"
    lines = 0
    descriptor = os.open(part, _MAKE, 0o600)
    try:
        while block := source.read(BLOCK):
            _write_all(descriptor, block)
            lines += block.count(b"\n")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(part, folder / name)
    _sync(folder)
    return lines


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _inside(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []


def _remove(path: Path) -> bool:
    """Remove a file, or a folder that somebody has put there; False: there is none."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    except (IsADirectoryError, PermissionError):
        if not path.is_dir():
            raise
        shutil.rmtree(path)
    return True
