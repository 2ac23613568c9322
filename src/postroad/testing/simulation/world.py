"""One seeded run: processes that live, die and come back, clients, the sink, and the checks in between."""

import asyncio
import contextvars
from collections import Counter
from collections.abc import Coroutine, Mapping
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from postroad.engine.wakeups import Topic
from postroad.model.clock import SECOND, FakeClock, micros
from postroad.model.dispatches import Alert, Dispatch
from postroad.model.errors import CommitUnknown
from postroad.store import moments
from postroad.store.database import Database
from postroad.store.executor import Inline
from postroad.testing.simulation.checkers import InvariantBroken, verify
from postroad.testing.simulation.clients import Clients
from postroad.testing.simulation.faults import Faults
from postroad.testing.simulation.history import History, instruments, operated, tables
from postroad.testing.simulation.ledger import Ledger
from postroad.testing.simulation.options import OPERATIONS, Options
from postroad.testing.simulation.outages import Outages
from postroad.testing.simulation.people import People
from postroad.testing.simulation.process import CURRENT, Crash, Process
from postroad.testing.simulation.sink import ENDED, Begun, Sink
from postroad.testing.simulation.sometimes import reached
from postroad.testing.simulation.workload import Message

HEAL_SECONDS = 1_800
LOOK_EVERY_SECONDS = 2.0
AT_ONCE = 0.3  # the share of blocks that come at the same moment as the one before
LONGER_AT_MOST = 10  # times its operations, while nothing that was published has been accepted
SURVIVOR = "p0"


class Unexpected(AssertionError):
    """The product raised what nothing in this run explains."""


class Run:
    """The world of one seed. `play` lets it run to its end; `lines` is the log."""

    def __init__(self, options: Options, clock: FakeClock, path: Path) -> None:
        self.options = options
        self.clock = clock
        self.url = f"sqlite:///{path}"
        self.lines: list[str] = []
        self.counts: Counter[str] = Counter()
        self.faults = Faults(options)
        self.ledger = Ledger()
        self.sink = Sink(clock)
        self.outages = Outages(options, clock)
        self._clients = Clients(options, self.ledger, self.note)
        self._people = People(self, self._clients)
        self._rng = Random(f"{options.seed}/schedule")
        self._processes: list[Process] = []
        self._lives = 0
        self._over = False
        self._pauses: list[str] = []
        self._fallen: asyncio.Queue[Process] = asyncio.Queue()
        self._trouble: list[str] = []
        self.seen: History | None = None
        self._observer = Database(self.url, clock=clock, executor=Inline())

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

    def _pause_in(self, work: str, subject: str, process: Process) -> None:
        """Stop a process that has begun such work, if that is to be, until soon after another has begun the same."""
        now = self.clock.monotonic()
        for other in self._processes:
            if other is not process and other.paused_over == (work, subject) and other.pause():
                other.paused_until = min(other.paused_until, now + round(self._rng.random() * SECOND))
        if work not in self._pauses or self.faults.calm:
            return
        self._pauses.remove(work)
        leases = self._rng.uniform(0.9, 2)
        self.note(f"{process.name} is stopped for {leases:.1f} leases at most in a {work}")
        self.counts["long pause"] += leases > 1
        process.paused_over = (work, subject)
        process.paused_until = now + round(leases * self.options.lease * SECOND)

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
        if [process.name for process in self._processes] != [SURVIVOR] or self._observer.read(moments.waiting):
            return False
        found = self._observer.read(tables)
        return not found["queues"] and all(row.rung_at is not None for row in found["alerts"])

    def _left(self) -> str:
        found = self._observer.read(tables)
        rows = [row for row in found["outbox"] if row.status in ("pending", "delivering")]
        rows += [row for row in found["timers"] if row.status == "armed"] + found["queues"]
        rows += [row for row in found["inbox"] if row.reason is None]
        rows += [row for row in found["alerts"] if row.rung_at is None]
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
            deeds=self._people.deeds, outages=self.outages.log, turned_away=self.outages.turned_away,
            calm=self.faults.calm, end=end, **self._observer.read(tables), **self._observer.read(instruments),
            **self._observer.read(operated),
        )  # fmt: skip
        self.counts["checks"] += 1
        verify(history)
        history.before = None
        self.seen = history

    # What processes tell us.

    def note(self, what: str) -> None:
        """Write a line of the run's log."""
        self.lines.append(f"{self.clock.monotonic() / SECOND:.6f} {what}")

    def at_statement(self, process: Process, sql: str) -> None:
        """A statement of the process is about to run: may raise Crash."""
        self.counts["statements"] += 1
        if self.faults.at_statement():
            process.die(f"before {' '.join(sql.split())[:60]}")

    def at_send(self, process: Process, when: str) -> None:
        """A message is about to arrive, or has arrived: may raise Crash."""
        if self.faults.at_send():
            process.die(f"{when} a message arrives")

    def at_failpoint(self, name: str) -> None:
        """The code that runs now has reached a failpoint: may raise Crash or CommitUnknown."""
        process = CURRENT.get()
        if process is None:
            return
        process.check_alive()
        self.counts[f"passed {name}"] += 1
        if name in ("commit.before", "commit.after") and self.faults.at_commit():
            self.counts[f"lost {name}"] += 1
            self.counts["group lost"] += process.database.writes_several
            self.note(f"{process.name} loses the answer of COMMIT, {name}")
            raise CommitUnknown("simulated")
        if self.faults.at_failpoint(name):
            self.counts[f"at {name}"] += 1
            process.die(name)

    def latency(self) -> float:
        """How long the database takes to hear, or to answer, in seconds."""
        return self.faults.latency()

    def gathers(self) -> float:
        """How long the writer is busy before it begins the next group, in seconds."""
        return self.faults.gathers()

    def grouped(self, process: Process, members: int) -> None:
        """The process is about to write so many members in one transaction."""
        self.note(f"{process.name} writes a group of {members}")
        self.counts["group of several"] += 1
        self.counts["grouped"] += members

    def arrived(self, process: Process, dispatch: Dispatch[Message]) -> None:
        """A message has arrived."""
        self.note(f"{dispatch.key} arrives from {process.name}, attempt {dispatch.attempt}")
        self.sink.arrive(
            process=process.name, id=dispatch.id, key=dispatch.key, kind=dispatch.kind, to=dispatch.to,
            attempt=dispatch.attempt, first=micros(dispatch.first_attempt_at, "first_attempt_at"),
            body=msgspec.json.encode(dispatch.body).decode(), possible_duplicate=dispatch.possible_duplicate,
        )  # fmt: skip
        self._people.got(dispatch)

    def tried(self, stream: str, turn: str, attempt: int) -> None:
        """A handler was called."""
        self.note(f"turn of {stream} runs, attempt {attempt}")
        self.sink.tried.append((stream, turn, attempt))
        process = CURRENT.get()
        assert process is not None
        self._pause_in("turn", stream, process)

    def rang(self, alert: Alert) -> None:
        """An alert has rung."""
        self.note(f"alert {alert.code} {alert.subject}")
        self.sink.ring(alert)

    def hint(self, process: Process, topics: frozenset[Topic]) -> None:
        """The process has committed something that wakes loops."""
        if self.options.hints:
            for other in self._processes:
                if other is not process:
                    other.parts.wakeups.ping(sorted(topics))

    def saw(self, process: Process, name: str, values: Mapping[str, Any]) -> None:
        """The product's telemetry said something."""
        said = {key: value for key, value in values.items() if isinstance(value, str | int) and key != "failures"}
        self.counts[name] += 1
        self.note(f"{process.name} {name} {said}")
        if name == "dispatch.sending":
            begun = Begun(values["attempt"], micros(values["dispatch"].first_attempt_at, "first_attempt_at"))
            self.sink.sends.append((process.life, values["id"], begun))
            self._pause_in("send", values["id"], process)
        elif name == "dispatch.settled" and not values["stale"]:
            self.sink.sends.append((process.life, values["id"], str(values["reason"])))
        error = values.get("error")
        if name in ("loop.error", "turn.error") and not process.dead and not _explained(error):
            self._trouble.append(f"{process.name} {name}: {type(error).__name__}: {error}")

    def died(self, process: Process, where: str) -> None:
        """The process has died and will be buried."""
        self.counts["crashes"] += 1
        self.counts["group crash"] += process.database.writes_several
        self.note(f"crash of {process.name} {where}")
        self.sink.sends.append((process.life, "", ENDED))
        self._fallen.put_nowait(process)


def _explained(error: object) -> bool:
    """Whether a loop or a turn may fail with this here: the answer of a COMMIT was lost."""
    return isinstance(error, CommitUnknown) or not isinstance(error, Exception)


def _owned_task(loop: asyncio.AbstractEventLoop, work: Any, **about: Any) -> asyncio.Task[Any]:
    """A task that its simulated process knows of, so that it ends when that dies."""
    task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **about)
    process = CURRENT.get()
    if process is not None:
        process.tasks[task] = None
        task.add_done_callback(lambda done: process.tasks.pop(done, None))
    return task
