"""Carrying out what was drawn to go wrong, and writing down what really did, with beginning and end."""

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from postroad.testing.chaos import down, faults
from postroad.testing.chaos.crew import Crew
from postroad.testing.chaos.faults import Fault, Plan
from postroad.testing.chaos.places import Place
from postroad.testing.chaos.sink import Sink
from postroad.testing.chaos.sizes import EVERYBODY
from postroad.testing.simulation.outages import Outage


class Disturbance:
    """Faults on the processes and the database of a run; `log` and `counts` say which there were.

    `survived` is awaited after each fault that hit everybody.
    """

    def __init__(
        self, crew: Crew, place: Place, sink: Sink, folder: Path, survived: Callable[[], Awaitable[None]]
    ) -> None:
        self.log: list[Fault] = []
        self.counts: Counter[str] = Counter()
        self._crew = crew
        self._place = place
        self._sink = sink
        self._folder = folder
        self._down: list[Outage] = []
        down.write(folder, self._down)
        self._survived = survived
        self._one_crash = asyncio.Lock()

    async def run(self, plans: Sequence[Plan], seconds: float) -> None:
        """Begin each fault at its time, beside those that are not repaired yet; return when all are repaired."""
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for plan in sorted(plans, key=lambda plan: plan.at):
                await asyncio.sleep(began + plan.at - time.monotonic())
                group.create_task(_ACTS[plan.kind](self, plan))
            await asyncio.sleep(began + seconds - time.monotonic())

    async def kill(self, plan: Plan) -> None:
        """Kill a process: the one that was drawn, or if that is down another."""
        running = self._crew.running()
        names = [plan.victim] if plan.victim in running else running[:1]
        await self._kill(names, self._begin("kill", names), plan.length)

    async def kill_all(self, plan: Plan) -> None:
        """Kill all processes at once."""
        names = self._crew.running()
        self.counts["groups"] += 1
        await self._kill(names, self._begin("group", names), plan.length)
        await self._survived()

    async def stop(self, plan: Plan) -> None:
        """Stop a process for longer than its leases last, and let it go on as if nothing had been."""
        life = self._crew.life(plan.victim)
        if not self._crew.signal(plan.victim, life, signal.SIGSTOP):
            return
        fault = self._begin("stop", [plan.victim])
        self.counts["stops"] += 1
        await asyncio.sleep(plan.length)
        self._crew.signal(plan.victim, life, signal.SIGCONT)
        self._repaired(fault)

    async def crash(self, plan: Plan) -> None:
        """Crash the database. A file's crash is that of all processes that have it open."""
        async with self._one_crash:
            fault = self._begin("database", EVERYBODY, plan.how)
            self.counts["crashes"] += 1
            if self._place.name == "sqlite":
                await self._kill(self._crew.running(), fault, plan.length)
            else:
                await asyncio.to_thread(self._place.crash, plan.how)
                await asyncio.sleep(plan.length)
                await asyncio.to_thread(self._place.restore)
                self._repaired(fault)
            await self._survived()

    async def outage(self, plan: Plan) -> None:
        """Have a host or a kind be down for a while: no fault of any process, so that it explains no lost claim."""
        outage = Outage(place=plan.victim, until=0, wall=0, whole="whole" in plan.how, later="later" in plan.how)
        self.counts["outages"] += 1
        self._sink.write("fault", "outage", plan.victim, how=plan.how)
        self._down.append(outage)
        down.write(self._folder, self._down)
        await asyncio.sleep(plan.length)
        self._down.remove(outage)
        down.write(self._folder, self._down)
        self._sink.write("fault", "outage repaired", plan.victim)

    async def _kill(self, names: Sequence[str], fault: Fault, length: float) -> None:
        """Kill processes, and start them again after a while."""
        self.counts["kills"] += sum(self._crew.kill(name) for name in names)
        await asyncio.sleep(length)
        running = self._crew.running()
        for name in names:
            if name not in running:
                self._crew.start(name)
        self._repaired(fault)

    def _begin(self, kind: str, names: Sequence[str], how: str = "") -> Fault:
        fault = Fault(kind=kind, lives=[self._crew.life(name) for name in names], begun=faults.now(), how=how)
        self.log.append(fault)
        self._sink.write("fault", kind, ", ".join(fault.lives), begun=fault.begun, how=how)
        return fault

    def _repaired(self, fault: Fault) -> None:
        fault.ended = faults.now()
        self._sink.write("fault", f"{fault.kind} repaired", ", ".join(fault.lives), ended=fault.ended)


_ACTS: Mapping[str, Callable[[Disturbance, Plan], Coroutine[Any, Any, None]]] = {
    "kill": Disturbance.kill,
    "group": Disturbance.kill_all,
    "stop": Disturbance.stop,
    "database": Disturbance.crash,
    "outage": Disturbance.outage,
}
