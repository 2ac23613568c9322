"""Our side: the public API, the real Worker and the real Dispatcher, as an application uses them."""

import asyncio
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

from benchmarks import work
from benchmarks.places import Place
from benchmarks.work import Work
from postroad import Dispatch, Kind, Postroad, Turn
from postroad.engine.running import Part, Runtime

EVENT = Kind(work.EVENT, dict[str, str])
DECIDED = Kind(work.DECIDED, dict[str, str])
MAIL = Kind(work.MAIL, dict[str, str])
SETTLE_SECONDS = 0.05
TIMEOUT_SECONDS = 300


class Ours:
    """An app for one work. `run` gives seconds; the place was cleared before."""

    def __init__(self, place: Place, what: Work) -> None:
        self._place = place
        self.post = Postroad(place.url, schema=place.schema)
        self._declare(what)
        self._ended = 0
        self._awaited = 0
        self._reached: asyncio.Event | None = None
        self.post.observe(self._observe)
        self.post.check_schema()

    def run(self, what: Work) -> float:
        """Do the work and say how many seconds it took."""
        match what.name:
            case "publish" if what.streams == 1:
                return self._publish_in_turn(what)
            case "publish":
                return asyncio.run(self._publish_at_once(what))
            case "publish bulk":
                return self._publish_bulk(what)
            case "decide":
                return asyncio.run(self._loop("turns", what, lambda: self._place.seed_events(what.count)))
            case "drain":
                return asyncio.run(
                    self._loop("sends", what, lambda: self._place.seed_dispatches(what.count, what.streams))
                )
            case "timers":
                return asyncio.run(
                    self._loop("timers", what, lambda: self._place.seed_timers(what.count, what.streams))
                )

    def close(self) -> None:
        """Close the app."""
        self.post.close()

    def _declare(self, what: Work) -> None:
        if what.name == "drain":
            self.post.sender(MAIL, concurrency=what.streams)(carry_out)
        else:
            self.post.elsewhere(MAIL)
        self.post.turn(work.TYPE, concurrency=what.streams)(decide)

    def _publish_in_turn(self, what: Work) -> float:
        began = perf_counter()
        for number in range(what.count):
            with self.post.begin() as tx:
                tx.publish(work.stream(0), EVENT, work.event(number), key=f"e{number}")
        return perf_counter() - began

    async def _publish_at_once(self, what: Work) -> float:
        async def publisher(place: int) -> None:
            for number in range(place, what.count, what.streams):
                async with self.post.begin() as tx:
                    tx.publish(work.stream(place), EVENT, work.event(number), key=f"e{number}")

        began = perf_counter()
        await asyncio.gather(*(publisher(place) for place in range(what.streams)))
        return perf_counter() - began

    def _publish_bulk(self, what: Work) -> float:
        began = perf_counter()
        for first in range(0, what.count, what.batch):
            with self.post.begin() as tx:
                for number in range(first, first + what.batch):
                    tx.publish(work.stream(number % what.streams), EVENT, work.event(number), key=f"e{number}")
        return perf_counter() - began

    async def _loop(self, part: Part, what: Work, seed: Callable[[], None]) -> float:
        """How long a process that was idle takes for what is committed at one stroke."""
        runtime = self.post.runtime(only=(part,))
        stop = asyncio.Event()
        running = asyncio.ensure_future(runtime.run(stop))
        await asyncio.sleep(SETTLE_SECONDS)
        try:
            # The loop's own thread: the process sees nothing of it before the clock runs.
            seed()
            return await self._timed(runtime, part, what.count)
        finally:
            stop.set()
            await running

    async def _timed(self, runtime: Runtime, part: Part, count: int) -> float:
        self._ended, self._awaited, self._reached = 0, count, asyncio.Event()
        began = perf_counter()
        runtime.parts.wakeups.ping((part,))
        await asyncio.wait_for(self._reached.wait(), TIMEOUT_SECONDS)
        return perf_counter() - began

    def _observe(self, name: str, values: Mapping[str, Any]) -> None:
        self._ended += _ends(name, values)
        if self._reached is not None and 0 < self._awaited <= self._ended:
            self._reached.set()


def _ends(name: str, values: Mapping[str, Any]) -> int:
    """How many of what is counted this event of telemetry tells of."""
    match name:
        case "turn.ended":
            return int(values.get("end") == "committed")
        case "dispatch.settled":
            return int(values.get("status") == "delivered")
        case "timers.fired":
            return int(values["count"])
        case _:
            return 0


async def decide(turn: Turn) -> None:
    """One event in; one more entry, two dispatches and a timer out."""
    for event in turn.events:
        number = turn.subject
        turn.record(DECIDED, work.decision(event.key))
        for each in range(work.SENDS_PER_TURN):
            turn.send(MAIL, work.mail(number), to="driver", key=f"{number}/{each}")
        turn.set_timer(number, after=work.TIMER_SECONDS, data={"number": number})


async def carry_out(dispatch: Dispatch[dict[str, str]]) -> None:
    """A send that costs nothing."""
