"""One timer for all calls of a timeout, in virtual time."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any

import pytest

from postroad.engine.calls import Aborted, CallResult, RealCalls
from postroad.engine.deadlines import Deadlines, DeadlinesOfLoops
from postroad.model.clock import SECOND, FakeClock
from postroad.testing.simulation.virtual import VirtualLoop

Play = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture
def play() -> Iterator[Play]:
    """Runs a coroutine on a loop in which waiting takes no time."""
    loop = VirtualLoop(FakeClock())
    yield loop.run_until_complete
    loop.close()


def seconds() -> float:
    return round(asyncio.get_running_loop().time(), 3)


def test_each_call_has_its_whole_time(play: Play) -> None:
    """Calls that began one after another are over one after another, whichever of them have ended before."""
    told: list[tuple[str, float, float]] = []

    def tell(name: str, began: float, due: float) -> None:
        told.append((name, round(due - began, 3), round(seconds() - began, 3)))

    async def scene() -> None:
        deadlines = Deadlines(asyncio.get_running_loop(), 10)
        began = seconds()
        for name in "abcde":
            deadlines.add(name, partial(tell, name, began))
            await asyncio.sleep(1)
        for name in "acxe":  # the first, one between others, one that never was, the last
            deadlines.drop(name)
        await asyncio.sleep(30)

    play(scene())
    assert told == [("b", 11, 11), ("d", 13, 13)]


def test_a_call_after_a_quiet_time_has_its_whole_time(play: Play) -> None:
    """A timer that rings for nobody, or is to ring for one that has ended, cuts nobody short."""
    told: list[float] = []

    async def scene() -> None:
        deadlines = Deadlines(asyncio.get_running_loop(), 10)
        deadlines.add("quick", told.append)
        deadlines.drop("quick")
        await asyncio.sleep(9)
        deadlines.add("later", told.append)
        await asyncio.sleep(9)
        assert told == []
        await asyncio.sleep(30)
        deadlines.add("last", told.append)
        await asyncio.sleep(11)

    play(scene())
    assert len(told) == 2


def test_what_fails_at_its_deadline_holds_up_no_other(play: Play) -> None:
    """Whoever raises when it is told is reported by the loop; the next one is told all the same."""
    told: list[float] = []

    def raises(due: float) -> None:
        raise LookupError

    async def scene() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, _about: None)
        deadlines = Deadlines(loop, 10)
        deadlines.add("bad", raises)
        deadlines.add("good", told.append)
        await asyncio.sleep(11)

    play(scene())
    assert len(told) == 1


def test_there_is_one_for_each_timeout_and_loop() -> None:
    """Those of a loop that has ended are not used again."""
    found = DeadlinesOfLoops()

    async def both() -> tuple[Deadlines, Deadlines, Deadlines]:
        return found.of(1.0), found.of(1.0), found.of(2.0)

    first, again, other = asyncio.run(both())
    assert first is again
    assert first is not other
    assert asyncio.run(both())[0] is not first


def test_a_call_that_is_given_up_as_its_deadline_passes_has_one_end(play: Play) -> None:
    """It was aborted; the deadline that passes in the same moment says nothing more."""
    told: list[CallResult] = []

    async def never_answers(_: Any) -> None:
        await asyncio.Event().wait()

    async def scene() -> None:
        loop = asyncio.get_running_loop()
        call = RealCalls().start(never_answers, None, timeout=SECOND, done=told.append)
        loop.call_at(loop.time() + 1, call.abort, "shutdown")  # between the timer and what it calls
        await asyncio.sleep(5)

    play(scene())
    assert told == [Aborted("shutdown")]
