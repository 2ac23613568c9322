"""A run on one database: processes that work while everything around them fails, then calm, then the checks."""

import asyncio
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from postroad.engine.app import Postroad
from postroad.model.lifecycle import Reason, Status
from postroad.store import moments
from postroad.store.dialects import is_away
from postroad.testing.chaos import checks, faults, instruments
from postroad.testing.chaos.crew import END_SECONDS, Crew
from postroad.testing.chaos.disturbance import Disturbance
from postroad.testing.chaos.evidence import Evidence, gather
from postroad.testing.chaos.places import Place
from postroad.testing.chaos.sink import Sink
from postroad.testing.chaos.sizes import CLIENT, EVERYBODY, FINISH, PROCESSES
from postroad.testing.chaos.verdict import Verdict, stories
from postroad.testing.simulation.history import History

HEAL_SECONDS = 45.0
LOOK_SECONDS = 0.25
PAGE = 1_000
SAMPLE = 50


class Run:
    """One run of `seconds` amid faults. `play` plays it, once."""

    def __init__(self, place: Place, folder: Path, *, seed: int, seconds: float) -> None:
        self._place = place
        self._folder = folder
        self._seed = seed
        self._seconds = seconds
        self._post = Postroad(place.url, migrate=True)
        self._sink = Sink(folder)
        self._crew = Crew(folder, url=place.url, socket=self._sink.socket, seed=seed)
        self._disturbance = Disturbance(self._crew, place, self._sink, folder, self._look)
        self._counts = self._disturbance.counts
        self._wrong: list[str] = []
        self._calm = False
        self._before: History | None = None

    async def play(self) -> Verdict:
        """Work amid faults for as long as was asked for, then until nothing is left to do, then check everything."""
        try:
            self._post.database.transact(instruments.install)
            await self._sink.start()
            for name in EVERYBODY:
                self._crew.start(name)
            await self._met(EVERYBODY)
            watch = asyncio.create_task(self._watch())
            drawn = (self._seed, self._place.name, self._seconds)
            await self._disturbance.run([*faults.plan(*drawn), *faults.outages(*drawn)], self._seconds)
            self._calm = True
            began = time.monotonic()
            await self._heal()
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch
            await self._end()
            return await asyncio.to_thread(self._verdict, time.monotonic() - began)
        finally:
            self._crew.close()
            await self._sink.close()
            self._post.close()

    def progress(self) -> str:
        """How far it is, in a few words."""
        ledger = f"{len(self._sink.ledger.calls)} calls, {len(self._sink.arrivals)} arrivals"
        did = f"{self._counts['kills']} kills, {self._counts['stops']} stops, {self._counts['crashes']} crashes"
        return f"{self._place.name}{' (calm)' if self._calm else ''}: {ledger}, {did}"

    async def _met(self, names: tuple[str, ...]) -> None:
        """Wait until these have said that they are there."""
        lives = {self._crew.life(name) for name in names}
        await self._until(lambda: lives <= self._sink.met, END_SECONDS, f"{lives} to begin")

    async def _until(self, true: Callable[[], object], seconds: float, what: str) -> None:
        end = time.monotonic() + seconds
        while not true():
            if time.monotonic() > end:
                logs = "\n".join(f"{name}: {self._crew.said(name)}" for name in EVERYBODY)
                raise TimeoutError(f"{self._place.name}: waited too long for {what}\n{logs}")
            await asyncio.sleep(0.02)

    async def _watch(self) -> None:
        """Start again what could not begin because its database was away; whatever else ends by itself is wrong."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for name in EVERYBODY:
                code = self._crew.exit_code(name)
                if code is None or code == -signal.SIGKILL or (name == CLIENT and self._calm and code == 0):
                    continue
                if self._crew.life(name) in self._sink.met or not self._was_away(self._crew.begun[name]):
                    self._wrong.append(f"X1 no surprise: {name} has ended with {code}: {self._crew.said(name)}")
                self._counts["restarts"] += 1
                self._crew.start(name)

    def _was_away(self, since: int) -> bool:
        """Whether the database could not be had at some time since then."""
        # A process that is stopped may hold SQLite's write lock for longer than others wait for it.
        kinds = ("database", "stop") if self._place.name == "sqlite" else ("database",)
        ends = [fault.ended for fault in self._disturbance.log if fault.kind in kinds]
        return any(ended is None or ended >= since for ended in ends)

    async def _look(self) -> None:
        """Hold what tables alone can tell against what is committed now."""
        try:
            rows = await self._post.database.aread(instruments.everything)
        except Exception as error:
            if is_away(error):
                return
            raise
        history = self._evidence(rows).history
        self._wrong += await asyncio.to_thread(checks.steady, history)
        history.before = None
        self._before = history
        self._counts["looks"] += 1

    def _evidence(self, rows: dict[str, Any], *, end: bool = False) -> Evidence:
        log = self._disturbance.log
        return gather(self._place.name, self._sink, log, rows, before=self._before, end=end)

    async def _heal(self) -> None:
        """Have what clients began be answered, then wait until nothing is left to do."""
        self._crew.kill(CLIENT)
        # All that the killed clients have written is taken in, so that nothing is asked for twice.
        last = self._crew.life(CLIENT)
        await self._until(lambda: not self._sink.hears(last), END_SECONDS, "the clients' last words")
        self._crew.start(CLIENT, {FINISH: "1"})
        end = time.monotonic() + HEAL_SECONDS
        quiet = 0
        while quiet < 2:
            await asyncio.sleep(LOOK_SECONDS)
            answered = self._crew.exit_code(CLIENT) == 0
            quiet = quiet + 1 if answered and await asyncio.to_thread(self._is_quiet) else 0
            if time.monotonic() > end:
                self._wrong.append(f"G3 liveness: after {HEAL_SECONDS:.0f} s of calm\n{self._left()}")
                return

    def _is_quiet(self) -> bool:
        if self._post.database.read(moments.waiting):
            return False
        rows = self._post.database.read(instruments.everything)
        return not rows["queues"] and all(row.rung_at is not None for row in rows["alerts"])

    def _left(self) -> str:
        rows = self._post.database.read(instruments.everything)
        left = [row for row in rows["outbox"] if row.status in (Status.PENDING, Status.DELIVERING)]
        left += [row for row in rows["timers"] if row.status == "armed"]
        left += rows["queues"] + [row for row in rows["inbox"] if row.reason is None]
        left += [row for row in rows["alerts"] if row.rung_at is None]
        return "\n".join(map(str, left[:20]))

    async def _end(self) -> None:
        """Have the processes end as an operator would, and take in the last that they said."""
        self._crew.terminate(PROCESSES)
        await self._until(lambda: not self._crew.running(), END_SECONDS, "the processes to end")
        for name in PROCESSES:
            if code := self._crew.exit_code(name):
                self._wrong.append(f"X1 no surprise: {name} has ended with {code}: {self._crew.said(name)}")
        await self._until(lambda: not self._sink.hears(), END_SECONDS, "their last words")

    def _verdict(self, heal_seconds: float) -> Verdict:
        """Read everything through connections of their own, and check it."""
        self._post.close()
        rows = self._post.database.read(instruments.everything)
        evidence = self._evidence(rows, end=True)
        violations = self._wrong + checks.verdict(evidence) + self._disagreements(evidence.history)
        self._count(evidence.history)
        for cause, number in checks.duplicates(evidence).items():
            self._counts[f"duplicates {cause or 'unexplained'}"] = number
        return Verdict(
            database=self._place.name, seed=self._seed, seconds=self._seconds, heal_seconds=round(heal_seconds, 1),
            counts=self._counts, violations=violations, stories=stories(evidence, violations), folder=str(self._folder),
        )  # fmt: skip

    def _count(self, history: History) -> None:
        self._counts["dispatches"] = len(history.outbox)
        self._counts["sends"] = len(history.arrivals)
        self._counts["events"] = len(history.log)
        down = [step for step in history.transitions if step.reason_code == Reason.HELD]
        self._counts["held"] = len(down)
        self._counts["gates"] = sum(log.did == "close" for log in history.gate_log)
        self._counts["turns"] = sum(run.end_reason == "committed" for run in history.runs)
        self._counts["interrupted"] = sum(run.end_reason == "interrupted" for run in history.runs)
        self._counts["timers"] = sum(timer.status == "fired" for timer in history.timers)
        self._counts["calls"] = len(history.ledger.calls)
        self._counts["unanswered"] = sum(call.ended is None for call in history.ledger.calls)

    def _disagreements(self, history: History) -> list[str]:
        """Where the public way to read and the tables differ."""
        wrong = []
        for stream, rows in history.logs.items():
            read: list[tuple[int, str]] = []
            while page := self._post.read(stream, after=len(read), limit=PAGE):
                read += [(entry.seq, entry.key) for entry in page]
            if read != [(row.seq, row.entry_id) for row in rows]:
                wrong.append(f"L5 durable: read({stream!r}) says something else than the log")
        for row in history.outbox[:: max(1, len(history.outbox) // SAMPLE)]:
            found: Any = self._post.dispatches.get(row.key)
            if found is None or (found.id, found.status, found.attempt) != (row.id, row.status, row.attempt):
                wrong.append(f"L5 durable: get({row.key!r}) says {found}")
        return wrong
