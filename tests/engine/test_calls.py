"""Calls of user code and their deadlines."""

import asyncio
import time
from typing import Any

import pytest

from postroad.engine.calls import CANCEL_GRACE_SECONDS, Aborted, CallResult, RealCalls, Returned, TimedOut, run_call
from postroad.model.clock import SECOND

TIMEOUT = SECOND // 10


async def answers_soon(_: Any) -> str:
    """Needs the loop some times more after its own wait."""
    await asyncio.sleep(TIMEOUT / SECOND / 2)
    for _turn in range(20):
        await asyncio.sleep(0)
    return "done"


async def never_answers(_: Any) -> None:
    await asyncio.Event().wait()


async def is_deaf(_: Any) -> None:
    for _turn in range(3):
        try:
            await asyncio.sleep(2 * CANCEL_GRACE_SECONDS)
        except asyncio.CancelledError:
            continue


async def called(fn: Any, calls: RealCalls, *, asleep: float = 0) -> CallResult:
    """What a call comes to if the process stands still for so many seconds right after its begin."""
    loop = asyncio.get_running_loop()
    loop.call_soon(time.sleep, asleep)
    return await run_call(calls, fn, None, timeout=TIMEOUT, abort=loop.create_future())


@pytest.mark.parametrize(("fn", "expected"), [(answers_soon, Returned("done")), (never_answers, TimedOut(False))])
async def test_a_process_that_stood_still_does_not_blame_its_calls(fn: Any, expected: CallResult) -> None:
    """A call whose deadline passed while the whole process slept gets a moment to end; then it is over for good."""
    assert await called(fn, RealCalls(), asleep=CANCEL_GRACE_SECONDS + 2 * TIMEOUT / SECOND) == expected


async def test_a_call_that_is_late_by_itself_is_over() -> None:
    """The deadline ends it, and what ignores its cancellation counts as stuck until it ends."""
    calls = RealCalls()
    assert await called(never_answers, calls) == TimedOut(False)
    assert calls.stuck == 0
    assert await called(is_deaf, calls) == TimedOut(True)
    assert calls.stuck == 1


async def test_a_call_that_is_given_up() -> None:
    """Giving up ends a call early and says why; one that has ended is not ended again."""
    told: list[CallResult] = []
    call = RealCalls().start(never_answers, None, timeout=60 * SECOND, done=told.append)
    await asyncio.sleep(0)
    call.abort("shutdown")
    call.abort("once more")
    while not told:
        await asyncio.sleep(0)
    call.abort("too late")
    await asyncio.sleep(0)
    assert told == [Aborted("shutdown")]
