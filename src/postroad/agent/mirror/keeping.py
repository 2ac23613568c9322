"""Keeping the mirror of one stream type up to date: what to do next, and what becomes of trouble with the disk."""

import errno
from pathlib import Path

from postroad.agent.mirror.lines import stem
from postroad.agent.mirror.lock import FolderLock
from postroad.agent.mirror.news import News, Walk
from postroad.agent.mirror.scribe import Brought, Scribe
from postroad.engine.loop import ENDLESS, Parts
from postroad.engine.telemetry import logger
from postroad.model.clock import SECOND
from postroad.model.payload import safe_error
from postroad.model.retry import Retry
from postroad.model.rows import NewAlert
from postroad.store import alerts

GAP = SECOND // 20  # between two looks, whatever happens
REST = 9  # times as long as a look, or a page of a walk, took
LOOK_REST_MAX, PAGE_REST_MAX = 5 * SECOND, SECOND
QUIET_AFTER = 8  # looks in a row that found nothing
QUIET_TIMES = 4
LOCK_EVERY = 2 * SECOND
WALK_EVERY = 3_600 * SECOND
BATCH = 100  # streams at a time
WAITING_MAX = 10_000  # streams that are remembered; more are found by a walk
AGAIN = Retry(attempts=1, first=1, cap=60, jitter=True)
ALERT_EVERY = 600 * SECOND
LASTING = 3  # failures in a row: a database may be away for a moment
DETAIL_CHARS_MAX = 500
ERROR_CHARS_MAX = 400
FOLDER_WIDE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO}


class Keeping:
    """The mirror of one stream type in this process. Not for several threads.

    Errors are told and tried again, and nothing is lost by them. People hear at once of those of the disk, and of
    others when they last. What is raised is what keeps an alert from being stored.
    """

    def __init__(self, parts: Parts, folder: Path, of_type: str, *, file_bytes_max: int) -> None:
        self.type = of_type
        self._parts = parts
        self._database = parts.database
        self._clock = parts.database.clock
        self._folder = folder / stem(of_type)
        self._lock = FolderLock(self._folder)
        self._scribe = Scribe(parts.database, self._folder, file_bytes_max=file_bytes_max)
        self._news: News | None = None  # None: it is for another process to write
        self._walk: Walk | None = None
        self._walk_at = 0
        self._walk_anew = False
        self._page_began: int | None = None  # when the last page of the walk was put among what waits
        self._look_at = 0
        self._looked = False  # in the last step; if not, whoever woke us waits for it
        self._quiet = 0
        self._waiting: dict[str, int] = {}  # streams, and when to see to them, on the steady clock
        self._failures: dict[str, int] = {}  # by stream; '': of the folder
        self._alerted: dict[str, int] = {}
        self._standing_by = False
        self._resting = 0  # until then nothing is tried

    def step(self) -> int:
        """Do what is due; how long there is nothing to do then, in microseconds."""
        resting = self._resting - self._clock.monotonic()
        if resting > 0:
            return resting
        try:
            if not self._ours():
                return self._pause(LOCK_EVERY)
            self._work()
        except Exception as error:
            rest = self._pause(self._delay(""))
            self._failed("", error)
            return rest
        self._worked("")
        return self._rest()

    def finish(self, until: int) -> None:
        """Write what was committed up to now, no longer than until then (on the steady clock), and let go of it all."""
        try:
            if self._ours() and self._news is not None:
                self._look(self._news)
                self._finish(until)
        finally:
            self.release()

    def _finish(self, until: int) -> None:
        while self._clock.monotonic() < until:
            if names := self._due():
                self._bring(names)
            elif self._walk is not None:
                self._step_of_walk()
            else:
                return

    def release(self) -> None:
        """Let go of the folder."""
        self._lock.release()
        self._news = None

    def _ours(self) -> bool:
        """Whether the folder is locked by us; if it was not until now, everything is looked at anew."""
        if self._news is not None and self._lock.held():
            return True
        self._news = None
        if not self._lock.take():
            self._stand_by()
            return False
        if self._standing_by:
            logger.info("mirror of %s: it is for this process to write now", self.type)
        self._standing_by = False
        self._waiting.clear()
        self._page_began = None
        self._news = News(self._database, self.type)  # before the walk: between them nothing is missed
        self._walk, self._walk_at = Walk(self._database, self.type, self._folder), 0
        return True

    def _stand_by(self) -> None:
        if not self._standing_by:
            holder = self._lock.holder()
            logger.info("mirror of %s: %s writes it; this one waits", self.type, holder)
            self._parts.telemetry.emit("mirror.waiting", type=self.type, holder=holder)
        self._standing_by = True

    def _work(self) -> None:
        assert self._news is not None
        now = self._clock.monotonic()
        self._looked = now >= self._look_at
        if self._looked:
            self._look(self._news)
        names = self._due()
        if names:
            self._bring(names)
        elif now >= self._walk_due():
            self._step_of_walk()

    def _look(self, news: News) -> None:
        began = self._clock.monotonic()
        changed = news.look()
        for name in changed:
            self._put(name, 0)
        ended = self._clock.monotonic()
        self._quiet = 0 if changed else self._quiet + 1
        self._look_at = ended + min(max(GAP, REST * (ended - began)), LOOK_REST_MAX)

    def _put(self, stream: str, at: int) -> None:
        """See to a stream then, unless it waits for another time already."""
        if len(self._waiting) < WAITING_MAX:
            self._waiting.setdefault(stream, at)
        elif stream not in self._waiting:
            self._missed()

    def _due(self) -> list[str]:
        """The next streams to see to; they don't wait any more."""
        now = self._clock.monotonic()
        names = [name for name, at in self._waiting.items() if at <= now][:BATCH]
        for name in names:
            del self._waiting[name]
        return names

    def _step_of_walk(self) -> None:
        """Put the next page among what waits; a page that was seen to is followed by a rest."""
        now = self._clock.monotonic()
        if self._page_began is not None:
            self._walk_at = now + min(REST * (now - self._page_began), PAGE_REST_MAX)
            self._page_began = None
            return
        if self._walk is None:
            self._walk, self._walk_anew = Walk(self._database, self.type, self._folder), False
        page = self._walk.page()
        if page is None:
            self._walk = None
            self._walk_at = now if self._walk_anew else now + WALK_EVERY
            return
        self._page_began = now
        for name in page:
            self._waiting.setdefault(name, 0)

    def _walk_due(self) -> int:
        """When to go on with the walk, on the steady clock: not before there is room for what it finds."""
        return self._walk_at if len(self._waiting) < WAITING_MAX else ENDLESS

    def _missed(self) -> None:
        """Look at all streams, from the first one on: the walk under way may have passed what is not remembered."""
        if self._walk is None:
            self._walk_at = 0
        else:
            self._walk_anew = True

    def _bring(self, names: list[str]) -> None:
        try:
            brought = self._scribe.bring(names)
        except BaseException:
            for name in names:
                self._put(name, 0)
            raise
        for name in brought.again:
            self._put(name, 0)
        for name in names:
            if name not in brought.troubles:
                self._worked(name)
        for name, error in brought.troubles.items():
            self._put(name, self._clock.monotonic() + self._delay(name))
            self._failed(name, error)
        self._tell(brought)
        wide = [error for error in brought.troubles.values() if error.errno in FOLDER_WIDE]
        if wide:
            raise wide[0]

    def _tell(self, brought: Brought) -> None:
        emit = self._parts.telemetry.emit
        if brought.lines:
            emit("mirror.written", type=self.type, lines=brought.lines)
        for name in brought.cut:
            logger.info("mirror of %s: a line that had not been finished was cut", name)
        for name in brought.removed:
            emit("mirror.removed", stream=name)
        for name, lines in brought.aside.items():
            emit("mirror.aside", stream=name, lines=lines)
            where = self._scribe.files(name).aside
            logger.warning("mirror of %s: what the log does not have (%d lines) was moved to %s", name, lines, where)
            self._alert("mirror.aside", name, f"{lines} lines that the log does not have were moved to {where}")

    def _failed(self, name: str, error: Exception) -> None:
        subject, said = name or self.type, safe_error(error, ERROR_CHARS_MAX)
        if not self._failures:
            logger.warning("mirror of %s: %s (it will be tried again; the log is not affected)", subject, said)
            self._parts.telemetry.emit("mirror.error", type=self.type, stream=name, error=error)
        self._failures[name] = self._failures.get(name, 0) + 1
        if isinstance(error, OSError) or self._failures[name] >= LASTING:
            self._alert("mirror.stalled", subject, f"{said}; it is tried again, and the log is not affected")

    def _worked(self, name: str) -> None:
        if self._failures.pop(name, None) is not None and not self._failures:
            logger.info("mirror of %s: working again", self.type)

    def _delay(self, name: str) -> int:
        return AGAIN.delay(self._failures.get(name, 0) + 1, 0.5 + self._parts.entropy.fraction() / 2)

    def _alert(self, code: str, subject: str, detail: str) -> None:
        """Tell people, of one thing now and then: a database that was restored has many streams."""
        now = self._clock.monotonic()
        if code in self._alerted and now - self._alerted[code] < ALERT_EVERY:
            return
        alert = NewAlert(severity="warning", code=code, subject=subject, detail=detail[:DETAIL_CHARS_MAX])
        self._database.transact(alerts.raise_alerts, [alert])
        self._alerted[code] = now

    def _pause(self, length: int) -> int:
        self._resting = self._clock.monotonic() + length
        return length

    def _rest(self) -> int:
        now = self._clock.monotonic()
        interval = self._parts.poll * (QUIET_TIMES if self._quiet >= QUIET_AFTER else 1) if self._looked else 0
        return max(0, min([self._walk_due(), max(self._look_at, now + interval), *self._waiting.values()]) - now)
