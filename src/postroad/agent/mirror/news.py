"""Which streams of a type a mirror must look at: those in which a run has ended, and now and then all of them."""

import os
from collections.abc import Sequence
from pathlib import Path

from postroad.agent.mirror.files import SUFFIX
from postroad.agent.mirror.lines import name_of, read
from postroad.model.clock import SECOND
from postroad.model.ids import stream_type
from postroad.store import mirroring
from postroad.store.database import Database
from postroad.store.mirroring import Happening, Place

PAGE = 200  # streams of a walk that are looked at together
ROWS_MAX = 10_000  # of a look; what is more is read by the next ones
LINE_BYTES_MAX = 2**24
# What is written first may be seen last: a look goes back a little behind the last one, and sometimes more.
BACK = 3 * SECOND
FAR_BACK = 60 * SECOND
FAR_EVERY = 15 * SECOND


class Recent:
    """Things that happen at times, each told once, although they may be seen in another order."""

    def __init__(self, newest: int) -> None:
        self._newest = newest
        self._told: dict[str, int] = {}
        self._behind: Place | None = None

    def place(self, now: int, back: int) -> Place:
        """Where to look: a little back, unless the last look left something. A clock that was set back is followed."""
        if self._behind is not None:
            return self._behind
        idle = now - self._newest > FAR_BACK
        return Place(self._newest if idle else min(self._newest, now) - back)

    def fresh(self, seen: Sequence[Happening], now: int) -> list[Happening]:
        """Those that were not told before."""
        new = [one for one in seen if one.name not in self._told]
        self._newest = max([self._newest, *(one.at for one in seen)])
        self._behind = Place(seen[-1].at, seen[-1].name) if len(seen) >= ROWS_MAX else None
        kept = min(self._newest, now) - FAR_BACK - BACK
        self._told = {name: at for name, at in self._told.items() if at >= kept}
        return new

    def told(self, one: Happening) -> None:
        """Remember that this one is over, and was told."""
        self._told[one.name] = one.at


class News:
    """Finds the streams of a type whose logs have grown or are gone. The database is only read."""

    def __init__(self, database: Database, of_type: str) -> None:
        self._database = database
        self._type = of_type
        begin = database.read(mirroring.start, of_type)
        self._runs, self._deletions = Recent(begin.run_at), Recent(begin.deletion_at)
        self._running = {name: Happening(0, name, stream, False) for name, stream in begin.running.items()}
        self._went_far = database.clock.monotonic() - FAR_EVERY

    def look(self) -> list[str]:
        """The streams that have changed."""
        now = self._database.clock.wall()
        back = self._back()
        asked = list(self._running)
        seen = self._database.read(
            mirroring.glance,
            self._type,
            runs=self._runs.place(now, back),
            deletions=self._deletions.place(now, back),
            running=asked,
            limit=ROWS_MAX,
        )
        changed = [self._ended(name) for name in asked if name not in seen.running]
        for run in self._runs.fresh(seen.runs, now):
            if run.over:
                self._runs.told(run)
                changed.append(run.stream)
            else:
                self._running.setdefault(run.name, run)
        for deletion in self._deletions.fresh(seen.deletions, now):
            self._deletions.told(deletion)
            changed.append(deletion.stream)
        return list(dict.fromkeys(changed))

    def _ended(self, name: str) -> str:
        run = self._running.pop(name)
        self._runs.told(run)
        return run.stream

    def _back(self) -> int:
        now = self._database.clock.monotonic()
        if now - self._went_far < FAR_EVERY:
            return BACK
        self._went_far = now
        return FAR_BACK


class Walk:
    """All streams of a type by name, and then those that have files here and are in no database."""

    def __init__(self, database: Database, of_type: str, folder: Path) -> None:
        self._database = database
        self._type = of_type
        self._folder = folder
        self._after = ""
        self._files: list[str] | None = None

    def page(self) -> list[str] | None:
        """The next streams; None: these were all."""
        if self._files is None:
            found = self._database.read(mirroring.names, self._type, after=self._after, limit=PAGE)
            if found:
                self._after = found[-1]
                return found
            self._files = _stems(self._folder)
        if not self._files:
            return None
        page, self._files = self._files[:PAGE], self._files[PAGE:]
        found = [name for given in page if (name := self._stream(given)) is not None]
        return self._database.read(mirroring.unknown, found)

    def _stream(self, given: str) -> str | None:
        """The stream whose files these are; None: of no stream that can be told."""
        name = name_of(given)
        if name is not None:
            return f"{self._type}/{name}"
        try:
            with (self._folder / f"{given}{SUFFIX}").open("rb") as file:
                line = read(file.readline(LINE_BYTES_MAX))
        except FileNotFoundError:
            return None
        return None if line is None or stream_type(line.stream) != self._type else line.stream


def _stems(folder: Path) -> list[str]:
    parts = (name.rpartition(".") for name in os.listdir(folder))
    return sorted({given for given, _, suffix in parts if suffix in ("jsonl", "old")})
