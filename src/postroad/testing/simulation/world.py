"""One seeded run: processes that live, die and come back, clients, the sink, and the checks in between."""

import asyncio
import contextvars
from collections.abc import Coroutine
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from postroad.model.clock import SECOND, FakeClock
from postroad.model.dispatches import Dispatch
from postroad.testing.simulation.checkers import InvariantBroken, verify
from postroad.testing.simulation.clients import Clients
from postroad.testing.simulation.connections import Looker
from postroad.testing.simulation.history import (
    History,
    everything,
    left_over,
    tables,
    unrung,
)
from postroad.testing.simulation.ledger import Ledger, ReportCall
from postroad.testing.simulation.options import OPERATIONS, Options
from postroad.testing.simulation.people import People
from postroad.testing.simulation.process import CURRENT, Crash, Process
from postroad.testing.simulation.sink import ENDED
from postroad.testing.simulation.sometimes import reached
from postroad.testing.simulation.stepped import Onlooker, SteppedDatabase
from postroad.testing.simulation.surroundings import Surroundings
from postroad.testing.simulation.workload import Message

HEAL_SECONDS = 1_800
LOOK_EVERY_SECONDS = 2.0
AT_ONCE = 0.3  # the share of blocks that come at the same moment as the one before
LONGER_AT_MOST = 10  # times its operations, while nothing that was published has been accepted
SURVIVOR = "p0"


class Unexpected(AssertionError):
    """The product raised what nothing in this run explains."""


class Run(Surroundings):
    """The world of one seed. `play` lets it run to its end; `lines` is the log."""

    def __init__(self, options: Options, clock: FakeClock, path: Path) -> None:
        super().__init__(options, clock)
        self.url = f"sqlite:///{path}"
        self.ledger = Ledger()
        self._clients = Clients(options, self.ledger, self.note)
        self._people = People(self, self._clients)
        self._lives = 0
        self._over = False
        self._looker = Looker(path)
        self._rests = False  # whether nothing waited when it was looked last
        self.seen: History | None = None
        self._observer = SteppedDatabase(self.url, clock=clock, place=Onlooker(self.shelf))

    async def play(self) -> None:
        """Raise InvariantBroken or Unexpected where something is wrong.

        First the operations, amid faults; then calm, until nothing is left to do.
        """
        asyncio.get_running_loop().set_task_factory(_owned_task)
        undertaker = asyncio.ensure_future(self._bury())
        try:
            for number in range(self.options.processes):
                self._start(f"p{number}")
            await self._watched(undertaker, self._operations())
            await self._watched(undertaker, self._heal())
        finally:
            self._over = True
            undertaker.cancel()
            await asyncio.wait({undertaker})
            for process in list(self._processes):
                await self._end(process)
            self._observer.close()
            self._looker.close()
            self.shelf.close()

    @staticmethod
    async def _watched(undertaker: asyncio.Future[None], phase: Any) -> None:
        """Run a phase; what the undertaker finds to be wrong ends it."""
        task = asyncio.ensure_future(phase)
        await asyncio.wait({task, undertaker}, return_when=asyncio.FIRST_COMPLETED)
        if undertaker.done():
            task.cancel()
            undertaker.result()
        task.result()

    async def _operations(self) -> None:
        made, disturbances = 0, self._disturbances()
        longest = LONGER_AT_MOST * self.options.operations
        while made < self.options.operations or (made < longest and not self.ledger.accepted("publish")):
            if self._rng.random() > AT_ONCE:
                await asyncio.sleep(round(self._rng.expovariate(1 / self.options.pace), 6))
            while disturbances and disturbances[0][0] <= made:
                self._disturb(disturbances.pop(0)[1], await self._someone())
            process = self._rng.choice(await self._someone())
            block = self._clients.begin()
            made += len(block)
            self.counts["blocks"] += 1
            self.inside(process, self._clients.make(process, block))
            self._people.meanwhile()
        self.counts["operations"] += made
        await asyncio.sleep(self._rng.random() * 20)

    def _disturbances(self) -> list[tuple[int, str]]:
        """What happens after how many operations, in order. Fewer operations than usual are the same, cut short."""
        options = self.options
        kinds = {"kill": options.kills, "shutdown": options.shutdowns, "pause": options.pauses, "jump": options.jumps}
        before = max(options.operations, OPERATIONS) - options.burst
        return sorted((self._rng.randrange(before), kind) for kind, times in kinds.items() for _ in range(times))

    def _disturb(self, kind: str, alive: list[Process]) -> None:
        if kind == "jump":
            by = self._rng.choice((-1, 1)) * self._rng.choice((1, 20, 200))
            self.note(f"the clock jumps by {by} s")
            self.counts["jump forward" if by > 0 else "jump back"] += 1
            self.clock.jump(by)
            return
        if kind == "pause":
            # In the midst of a send or of a turn, so that it comes back with results of a claim that is over.
            self._pauses.append(self._rng.choice(("send", "turn")))
            return
        process = self._rng.choice(alive)
        self.note(f"{kind} of {process.name}")
        self.counts[kind] += 1
        if kind == "kill":
            process.dead = True
            self.died(process, "kill")
        else:
            process.stop.set()

    async def _someone(self) -> list[Process]:
        """The processes that live, as soon as there is one."""
        until = self.clock.monotonic() + HEAL_SECONDS * SECOND
        while not (alive := self.alive()):
            await asyncio.sleep(0.5)
            if self.clock.monotonic() > until:
                raise Unexpected(f"{[process.name for process in self._processes]} neither end nor come back")
        return alive

    def alive(self) -> list[Process]:
        """The processes that live and are not told to end."""
        return [process for process in self._processes if not process.dead and not process.stop.is_set()]

    def _start(self, name: str) -> None:
        if self._over:
            return
        self._lives += 1
        self.note(f"start of {name}")
        seed = self.options.seed * 1_000_003 + self._lives
        process = Process(self, name=name, life=f"{name}/{self._lives}", seed=seed, faxes=name == SURVIVOR)
        self._processes.append(process)
        self.inside(process, self._live(process))

    async def _live(self, process: Process) -> None:
        try:
            await process.run()
        except Crash:
            return
        except Exception as error:
            self._trouble.append(f"{process.name} did not end in order: {type(error).__name__}: {error}")
        if process.dead:
            return
        self.note(f"{process.name} has ended")
        self.sink.sends.append((process.life, "", ENDED))
        process.dead = True
        self._fallen.put_nowait(process)

    def got(self, dispatch: Dispatch[Message]) -> None:
        """A message has arrived: consumers act upon it."""
        self._people.got(dispatch)

    def begun(self, stream: str) -> None:
        """A turn of a stream has begun: people act upon it."""
        self._people.begun(stream)

    def telling(self, call: ReportCall) -> AbstractContextManager[None]:
        """A turn reports something within this."""
        return self._people.telling(call)

    def inside(self, process: Process, work: Coroutine[Any, Any, None]) -> None:
        """Run something as part of a process: it dies with it."""
        context = contextvars.copy_context()
        context.run(CURRENT.set, process)
        context.run(asyncio.ensure_future, work)

    async def _bury(self) -> None:
        """End what is left of dead processes, check everything, and start them again after a while."""
        while True:
            process = await self._fallen.get()
            await self._end(process)
            self.verify()
            if process.name == SURVIVOR or not self.faults.calm:
                wait = round(self._rng.expovariate(1), 3)
                asyncio.get_running_loop().call_later(wait, self._start, process.name)

    async def _end(self, process: Process) -> None:
        process.dead = True
        while process.tasks:
            tasks = list(process.tasks)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        process.database.close()
        if process in self._processes:
            self._processes.remove(process)

    async def _heal(self) -> None:
        """No more faults, and one process: whatever was begun must come to its end in bounded time."""
        self.note("calm")
        self.faults.calm = self.clock.wall()
        until = self.clock.monotonic() + HEAL_SECONDS * SECOND
        quiet = 0
        while quiet < 2:
            for process in self.alive():  # one that died earlier may still come back
                if process.name != SURVIVOR:
                    process.stop.set()
            await asyncio.sleep(LOOK_EVERY_SECONDS)
            quiet = quiet + 1 if self._is_quiet() else 0
            if self.clock.monotonic() > until:
                raise InvariantBroken(f"G3 liveness: after {HEAL_SECONDS} s\n" + self._left())
        self.verify(end=True)
        assert self.seen is not None
        self.counts.update(reached(self.seen))
        self._never_pass_on_nothing()

    def _is_quiet(self) -> bool:
        """Nothing waits, nobody sends, every alert has rung, and the one process lives."""
        if [process.name for process in self._processes] != [SURVIVOR]:
            return False
        if not self._looker.changed():
            return self._rests
        self._rests = False
        waits, parked = self._observer.read(left_over)
        if waits > 0:
            return False
        if parked:  # all else is done, and these wait for nobody but an operator
            self._people.relieve(sorted(parked))
            self._looker.forget()  # it may be in vain, and has to be done again
            return False
        self._rests = not self._observer.read(unrung)
        return self._rests

    def _left(self) -> str:
        found = self._observer.read(tables)
        rows = [row for row in found["outbox"] if row.status in ("pending", "delivering")]
        rows += [row for row in found["timers"] if row.status == "armed"] + found["queues"]
        rows += [row for row in found["inbox"] if row.reason is None]
        rows += [row for row in found["alerts"] if row.rung_at is None]
        rows += [row for row in found["delegations"] if row.status == "open"]
        rows += [f"{process.name} still lives" for process in self._processes if process.name != SURVIVOR]
        return "\n".join(map(str, rows))

    def _never_pass_on_nothing(self) -> None:
        """A run in which nothing happened proves nothing."""
        if lacking := self._lacking():
            raise Unexpected(f"no {' and no '.join(lacking)}: this seed has shown nothing")

    def _lacking(self) -> list[str]:
        happened = {
            "publish": len(self.ledger.accepted("publish")),
            "send": len(self.sink.arrivals),
            "crash": self.counts["crashes"],
        }
        return [name for name, times in happened.items() if not times]

    def verify(self, *, end: bool = False) -> None:
        """Check every invariant on what is committed now."""
        if self._trouble:
            raise Unexpected("\n".join(self._trouble))
        history = History(
            options=self.options, now=self.clock.wall(), ledger=self.ledger, arrivals=list(self.sink.arrivals),
            rung=list(self.sink.rung), tried=list(self.sink.tried), sends=list(self.sink.sends), before=self.seen,
            handled=list(self.sink.handled), happened=list(self.sink.happened),
            deeds=self._people.deeds, outages=self.outages.log, turned_away=self.outages.turned_away,
            calm=self.faults.calm, end=end, **self._observer.read(everything),
        )  # fmt: skip
        self.counts["checks"] += 1
        verify(history)
        history.before = None
        self.seen = history


def _owned_task(loop: asyncio.AbstractEventLoop, work: Any, **about: Any) -> asyncio.Task[Any]:
    """A task that its simulated process knows of, so that it ends when that dies."""
    task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **about)
    process = CURRENT.get()
    if process is not None:
        process.tasks[task] = None
        task.add_done_callback(process.ended)
    return task
