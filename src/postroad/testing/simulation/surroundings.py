"""What simulated processes tell the world around them, and where it lets them die, pause or lose an answer."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from random import Random
from typing import Any

import msgspec

from postroad.engine.wakeups import Topic
from postroad.model.clock import SECOND, FakeClock, micros
from postroad.model.dispatches import Alert, Dispatch
from postroad.model.errors import CommitUnknown
from postroad.testing.simulation.connections import Shelf
from postroad.testing.simulation.errands import CREW
from postroad.testing.simulation.faults import Faults
from postroad.testing.simulation.options import Options
from postroad.testing.simulation.outages import Outages
from postroad.testing.simulation.process import CURRENT, Process
from postroad.testing.simulation.sink import ENDED, Begun, Sink
from postroad.testing.simulation.toolbox import Handled, Who
from postroad.testing.simulation.workload import Message


class Surroundings:
    """The faults, the sink and the log of one seed. Who acts upon it is a matter of `got` and `begun`."""

    def __init__(self, options: Options, clock: FakeClock) -> None:
        self.options = options
        self.clock = clock
        self.lines: list[str] = []
        self.counts: Counter[str] = Counter()
        self.faults = Faults(options)
        self.sink = Sink(clock)
        self.outages = Outages(options, clock)
        self.shelf = Shelf()
        self._rng = Random(f"{options.seed}/schedule")
        self._processes: list[Process] = []
        self._pauses: list[str] = []
        self._fallen: asyncio.Queue[Process] = asyncio.Queue()
        self._trouble: list[str] = []

    def got(self, dispatch: Dispatch[Message]) -> None:
        """A message has arrived: consumers act upon it."""
        raise NotImplementedError

    def note(self, what: str) -> None:
        """Write a line of the run's log."""
        self.lines.append(f"{self.clock.monotonic() / SECOND:.6f} {what}")

    def begun(self, stream: str) -> None:
        """A turn of a stream has begun: people act upon it."""
        raise NotImplementedError

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
        if name == "dispatch.claimed" and self.counts[f"passed {name}"] % 3 == 0:
            self._pause_in("claim", f"{process.name}'s own", process)
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
        self.got(dispatch)

    def tried(self, stream: str, turn: str, attempt: int) -> None:
        """A handler was called."""
        self.note(f"turn of {stream} runs, attempt {attempt}")
        self.sink.tried.append((stream, turn, attempt))
        process = CURRENT.get()
        assert process is not None
        self._pause_in("turn", stream, process)

    def handled(self, handled: Handled) -> None:
        """A handler was called with these events."""
        self.sink.handled.append(handled)
        # Most of what is delegated is begun when it is calm, and is called back all the same: that is no fault.
        if not self.faults.calm or handled.stream.startswith(CREW):
            self.begun(handled.stream)

    def asked(self, tool: str, name: str) -> int:
        """A tool was called with this name; how often it was by now."""
        return self.sink.asked(tool, name)

    def happened(self, process: Process, who: Who, tool: str, name: str, key: str) -> int:
        """A tool does its work: may raise Crash before and after."""
        self._in_a_tool(process, "before")
        self.note(f"{tool} {name} {key} happens for {who.stream}")
        number = self.sink.happen(who, tool, name, key)
        self._in_a_tool(process, "after")
        return number

    def _in_a_tool(self, process: Process, when: str) -> None:
        if self.faults.at_send():
            self.counts[f"crash {when} a tool's work"] += 1
            process.die(f"{when} a tool has done its work")

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

    def _pause_in(self, work: str, subject: str, process: Process) -> None:
        """Stop a process that has begun such work, if that is to be, until soon after another has begun the same."""
        now = self.clock.monotonic()
        for other in self._processes:
            if other is not process and other.paused_over == (work, subject) and other.pause():
                other.paused_until = min(other.paused_until, now + round(self._rng.random() * SECOND))
        planned = "send" if work == "claim" else work
        if planned not in self._pauses or self.faults.calm:
            return
        self._pauses.remove(planned)
        leases = self._rng.uniform(0.9, 2)
        self.note(f"{process.name} is stopped for {leases:.1f} leases at most in a {work}")
        self.counts["long pause"] += leases > 1
        process.paused_over = (work, subject)
        process.paused_until = now + round(leases * self.options.lease * SECOND)


def _explained(error: object) -> bool:
    """Whether a loop or a turn may fail with this here: the answer of a COMMIT was lost."""
    return isinstance(error, CommitUnknown) or not isinstance(error, Exception)
