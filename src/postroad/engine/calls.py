"""Running user code: async functions as tasks, sync ones in threads of their own, each with a deadline."""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol, TypeVar

from postroad.engine.declarations import is_async
from postroad.model.clock import SECOND
from postroad.model.payload import safe_error

CANCEL_GRACE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Returned:
    """The function came to its end."""

    value: Any


@dataclass(frozen=True, slots=True)
class Raised:
    """The function raised, whatever it was: SystemExit and KeyboardInterrupt too are a handler's failure."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The deadline passed. `stuck`: it runs on all the same, its result will be refused."""

    stuck: bool


@dataclass(frozen=True, slots=True)
class Aborted:
    """We ended it: its claim was lost, or the process shuts down."""

    why: str


CallResult = Returned | Raised | TimedOut | Aborted
Abort = asyncio.Future[str]
P = ParamSpec("P")
R = TypeVar("R")


def contained(fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call user code that runs in our own loops and threads.

    What is no Exception, SystemExit and its like, would end these; it comes out as a RuntimeError that names it.
    """
    try:
        return fn(*args, **kwargs)
    except Exception:
        raise
    except BaseException as error:
        raise RuntimeError(safe_error(error)) from error


class Calls(Protocol):
    """How user code is run."""

    async def run(self, fn: Callable[[Any], Any], argument: Any, *, timeout: int, abort: Abort) -> CallResult:
        """Call `fn(argument)`, for `timeout` microseconds at the most or until `abort` is set."""


class RealCalls:
    """Async functions as tasks of the running loop, sync ones in daemon threads, which cannot be cancelled."""

    def __init__(self) -> None:
        self._stuck: set[asyncio.Future[CallResult]] = set()

    @property
    def stuck(self) -> int:
        """How many calls outlived their deadline and still run."""
        return len(self._stuck)

    async def run(self, fn: Callable[[Any], Any], argument: Any, *, timeout: int, abort: Abort) -> CallResult:
        awaited = is_async(fn)
        call = asyncio.ensure_future(_guarded(fn, argument)) if awaited else _in_thread(fn, argument)
        either: list[asyncio.Future[Any]] = [call, abort]
        await asyncio.wait(either, timeout=timeout / SECOND, return_when=asyncio.FIRST_COMPLETED)
        if call.done():
            return _result(call)
        if awaited:  # a thread cannot be cancelled
            call.cancel()
            await asyncio.wait({call}, timeout=CANCEL_GRACE_SECONDS)
        if not call.done():
            self._stuck.add(call)
            call.add_done_callback(self._stuck.discard)
        return Aborted(abort.result()) if abort.done() else TimedOut(stuck=not call.done())


class InlineCalls:
    """Everything in the caller's own thread, one after the other, without deadlines: for tests and simulation."""

    async def run(self, fn: Callable[[Any], Any], argument: Any, *, timeout: int, abort: Abort) -> CallResult:
        return await _guarded(fn, argument)


async def _guarded(fn: Callable[[Any], Any], argument: Any) -> CallResult:
    try:
        value = fn(argument)
        return Returned(await value if is_async(fn) else value)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return Raised(error)
    except BaseException as error:
        return Raised(error)


def _in_thread(fn: Callable[[Any], Any], argument: Any) -> asyncio.Future[CallResult]:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[CallResult] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(result: CallResult) -> None:
        if not future.done():
            future.set_result(result)

    def work() -> None:
        try:
            result: CallResult = Returned(context.run(fn, argument))
        except BaseException as error:
            result = Raised(error)
        if not loop.is_closed():
            loop.call_soon_threadsafe(deliver, result)

    # A daemon: a handler that never returns must not keep the process from ending.
    threading.Thread(target=work, name="postroad-handler", daemon=True).start()
    return future


def _result(call: asyncio.Future[CallResult]) -> CallResult:
    if call.cancelled():
        return Raised(asyncio.CancelledError())
    return call.result()
