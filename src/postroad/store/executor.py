"""The one seam through which every transaction of ours goes."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

R = TypeVar("R")


class Executor(Protocol):
    """Runs whole transactions. `urgent` ones (renewals, settles) have a lane of their own."""

    def submit(self, call: Callable[[], R], *, urgent: bool = False) -> Future[R]:
        """Run the call, at once or in another thread."""

    def close(self) -> None:
        """Wait for what is under way, then accept nothing more."""


class Inline:
    """Runs each call at once in the caller's thread: deterministic, for tests, simulation and small tools."""

    def submit(self, call: Callable[[], R], *, urgent: bool = False) -> Future[R]:
        future: Future[R] = Future()
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
        return future

    def close(self) -> None:
        return


class Threads:
    """Runs calls in threads: one for SQLite, where there is one writer, several for Postgres."""

    def __init__(self, *, workers: int, urgent_workers: int) -> None:
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="postroad-db")
        self._urgent = (
            ThreadPoolExecutor(urgent_workers, thread_name_prefix="postroad-db-urgent")
            if urgent_workers
            else self._pool
        )

    def submit(self, call: Callable[[], R], *, urgent: bool = False) -> Future[R]:
        return (self._urgent if urgent else self._pool).submit(call)

    def close(self) -> None:
        self._pool.shutdown(wait=True)
        self._urgent.shutdown(wait=True)


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
