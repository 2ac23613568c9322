"""An event loop in which waiting takes no time: its clock is a FakeClock that jumps to the next moment.

Nothing outside of the loop's own thread exists: no threads, no sockets.
"""

import asyncio
import math
import selectors
from collections.abc import Callable
from contextvars import Context
from typing import TypeVarTuple

from postroad.model.clock import SECOND, FakeClock

ROUNDS_MAX = 50_000
Args = TypeVarTuple("Args")
_Ready = list[tuple[selectors.SelectorKey, int]]


class NothingLeft(RuntimeError):
    """Everything waits and nothing will ever happen."""


class TimeStandsStill(RuntimeError):
    """So much happens at one moment that it will never end."""


class _Jumping(selectors.DefaultSelector):
    """Has nothing to look at; the wait that it was asked for passes on the clock."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self._clock = clock
        self._rounds = 0

    def select(self, timeout: float | None = None) -> _Ready:
        if timeout is None:
            raise NothingLeft
        self._rounds += 1
        if self._rounds > ROUNDS_MAX:
            raise TimeStandsStill
        if timeout > 0:
            self._rounds = 0
            self._clock.advance_to(self._clock.wall() + math.ceil(timeout * SECOND))
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs callbacks in asyncio's own order, at the times of a FakeClock's steady reading."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(_Jumping(clock))
        self._steady = clock

    def time(self) -> float:
        return self._steady.monotonic() / SECOND

    def call_soon_threadsafe(
        self, callback: Callable[[*Args], object], *args: *Args, context: Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)
