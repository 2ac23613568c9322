"""The one seam through which every transaction of ours goes."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal, Protocol, TypeVar

R = TypeVar("R")
Lane = Literal["plain", "urgent", "group", "alone"]


class Executor(Protocol):
    """Runs whole transactions. Urgent ones (renewals, settles) have a lane of their own.

    So have groups, and those whose members wait for somebody else's lock and must be written alone.
    """

    def submit(self, call: Callable[[], R], *, lane: Lane = "plain") -> Future[R]:
        """Run the call, at once or in another thread."""

    def close(self) -> None:
        """Wait for what is under way, then accept nothing more."""


class Inline:
    """Runs each call at once in the caller's thread: deterministic, for tests, simulation and small tools."""

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

    def __init__(self, *, plain: int, urgent: int = 0, group: int = 0, alone: int = 0) -> None:
        self._plain = ThreadPoolExecutor(plain, thread_name_prefix="postroad-db")
        self._lanes = {
            lane: ThreadPoolExecutor(threads, thread_name_prefix=f"postroad-db-{lane}")
            for lane, threads in (("alone", alone), ("urgent", urgent), ("group", group))
            if threads
        }

    def submit(self, call: Callable[[], R], *, lane: Lane = "plain") -> Future[R]:
        return self._lanes.get(lane, self._plain).submit(call)

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
