"""An event loop in which waiting takes no time: its clock is a FakeClock that jumps to the next moment."""

import asyncio
import math
import selectors

from postroad.model.clock import SECOND, FakeClock

_Ready = list[tuple[selectors.SelectorKey, int]]


class NothingLeft(RuntimeError):
    """Everything waits and nothing will ever happen."""


class _Jumping(selectors.DefaultSelector):
    """Looks without waiting; the wait that it was asked for passes on the clock."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> _Ready:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise NothingLeft
        self._clock.advance_to(self._clock.wall() + math.ceil(timeout * SECOND))
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs callbacks in asyncio's own order, at the times of a FakeClock's steady reading."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(_Jumping(clock))
        self._steady = clock

    def time(self) -> float:
        return self._steady.monotonic() / SECOND
