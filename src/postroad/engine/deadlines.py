"""Deadlines of calls: those with the same timeout are over in the order in which they began, so one timer does."""

import asyncio
import threading
from collections.abc import Callable, Hashable

Overdue = Callable[[float], None]


class Deadlines:
    """Calls with one timeout on one event loop. What is over is told so, with the time at which it was to be."""

    __slots__ = ("_loop", "_seconds", "_timer", "_waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._loop = loop
        self._seconds = seconds
        self._waiting: dict[Hashable, tuple[float, Overdue]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, call: Hashable, overdue: Overdue) -> None:
        """Begin with a call's time."""
        due = self._loop.time() + self._seconds
        self._waiting[call] = due, overdue
        if self._timer is None:
            self._timer = self._loop.call_at(due, self._ring)

    def drop(self, call: Hashable) -> None:
        """Forget a call; the timer may ring for nothing."""
        self._waiting.pop(call, None)

    def _ring(self) -> None:
        self._timer, now = None, self._loop.time()
        for call, (due, overdue) in list(self._waiting.items()):
            if due > now:
                self._timer = self._loop.call_at(due, self._ring)
                return
            del self._waiting[call]
            self._loop.call_soon(overdue, due)


class DeadlinesOfLoops:
    """The deadlines of each thread's running event loop, by their timeouts in seconds: those that were declared."""

    def __init__(self) -> None:
        self._here = threading.local()

    def of(self, seconds: float) -> Deadlines:
        """Those of the event loop that runs here; those of an earlier one are over with it."""
        loop = asyncio.get_running_loop()
        if getattr(self._here, "loop", None) is not loop:
            self._here.loop, self._here.found = loop, {}
        found: dict[float, Deadlines] = self._here.found
        deadlines = found.get(seconds)
        if deadlines is None:
            deadlines = found[seconds] = Deadlines(loop, seconds)
        return deadlines
