"""The one seam through which every transaction of ours goes."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, Protocol, TypeVar

R = TypeVar("R")
Lane = Literal["plain", "urgent", "group", "alone"]


class Executor(Protocol):
    """Runs whole transactions. Urgent ones (renewals, settles) have a lane of their own.

    So have groups, and those whose members wait for somebody else's lock and must be written alone. `shares_calls`: in
    the lane of groups a call that has not begun stands for all that come after it, so that one may be too few.
    """

    shares_calls: bool

    def submit(self, call: Callable[[], R], *, lane: Lane = "plain") -> Future[R]:
        """Run the call, at once or in another thread."""

    def close(self) -> None:
        """Wait for what is under way, then accept nothing more."""


class Inline:
    """Runs each call at once in the caller's thread: deterministic, for tests, simulation and small tools."""

    shares_calls = False

    def submit(self, call: Callable[[], R], *, lane: Lane = "plain") -> Future[R]:
        future: Future[R] = Future()
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
        return future

    def close(self) -> None:
        return


class Threads:
    """Runs calls in threads: one for SQLite, where there is one writer, several for Postgres.

    A lane without threads of its own uses the plain ones. The fewer threads groups have, the larger they get.
    """

    shares_calls = True

    def __init__(self, *, plain: int, urgent: int = 0, group: int = 0, alone: int = 0) -> None:
        self._plain = ThreadPoolExecutor(plain, thread_name_prefix="postroad-db")
        self._lanes = {
            lane: ThreadPoolExecutor(threads, thread_name_prefix=f"postroad-db-{lane}")
            for lane, threads in (("alone", alone), ("urgent", urgent), ("group", group))
            if threads
        }
        self._shared: Future[Any] | None = None  # the call of the lane of groups that has not begun
        self._sharing = threading.Lock()

    def submit(self, call: Callable[[], R], *, lane: Lane = "plain") -> Future[R]:
        pool = self._lanes.get(lane, self._plain)
        if lane != "group":
            return pool.submit(call)
        with self._sharing:  # each has put down what is to be written before it comes here
            if self._shared is None:
                self._shared = pool.submit(self._begin, call)
            return self._shared

    def _begin(self, call: Callable[[], R]) -> R:
        with self._sharing:
            self._shared = None
        return call()

    def close(self) -> None:
        # Groups first: what must be written alone is handed on.
        for pool in (*reversed(self._lanes.values()), self._plain):
            pool.shutdown(wait=True)


async def outcome(future: Future[R]) -> R:
    """The call's result. A caller that is cancelled still waits for the call, then is cancelled.

    A transaction under way is never abandoned: its answer must be known before anything else happens.
    """
    waiting = asyncio.wrap_future(future)
    cancelled: asyncio.CancelledError | None = None
    while not waiting.done():
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError as error:
            if waiting.cancelled():
                raise
            cancelled = error
        except BaseException:
            break
    if cancelled is not None:
        if not waiting.cancelled():
            waiting.exception()  # looked at, so that it is not reported as never retrieved
        raise cancelled
    return waiting.result()
