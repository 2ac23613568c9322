"""A program that is killed at every place of a turn that calls a tool, and then run again until it has recovered.

`python -m tests.system.tool_kills URL SCHEMA FOLDER`: each case is a stream type of its own, so that the process that
recovers one sees no other. Processes are forked, without the time that it takes to import everything again. What
came of each case is printed as JSON.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import postroad.bundled_sqlite  # noqa: F401
from postroad import Kind, Postroad, Turn
from postroad.model import failpoints
from postroad.store import alerts, operations, runs, stream_views
from postroad.testing.failpoints import kill, nth

NOTE = Kind("note", dict[str, str])
REPLY = Kind("reply", dict[str, str])
LEASE = 0.4
EFFECTS = ("read", "idempotent", "keyed", "unsafe")
# Besides the failpoints: in the handler's own work, and in the tool's.
PLACES = (
    "queues.claim", "turn.after_claim_commit", "model", "tool.before_start", "tool.started", "tool", "tool.returned",
    "tool.recorded", "turn.before_commit", "turn.after_commit",
)  # fmt: skip
IN_COMMIT = (
    "turns.fenced", "turns.logged", "turns.consumed", "turns.dispatched", "turns.timed", "turns.acknowledged",
    "turns.withdrawn", "turns.published", "turns.alerted", "turns.attached", "turns.ended", "turns.freed",
    "commit.before",
)  # fmt: skip


def cases() -> list[tuple[str, str, str]]:
    """Stream type, effect and place of each death."""
    found = [*product(EFFECTS, PLACES), *product(("keyed", "unsafe"), IN_COMMIT)]
    return [(f"chat{number}", effect, place) for number, (effect, place) in enumerate(found)]


class Program:
    """The app of one case, in a process that may be told where to die."""

    def __init__(self, url: str, schema: str | None, folder: Path, case: tuple[str, str, str]) -> None:
        self.stream_type, self.effect, self.place = case
        self.journal = folder / self.stream_type
        self.post = Postroad(url, schema=schema, migrate=False)
        self.dies = False
        self._declare()

    def _declare(self) -> None:
        if self.effect == "keyed":

            @self.post.tool(effect="keyed")
            async def act(text: str, *, key: str = "") -> str:
                return self._act(text, key)

        else:

            @self.post.tool(effect=self.effect)  # type: ignore[arg-type]
            async def act(text: str) -> str:
                return self._act(text, "")

        @self.post.turn(self.stream_type, lease=LEASE, attempts=9)
        async def chat(turn: Turn) -> None:
            self._write("model", "")
            self._die_in("model")
            said = await turn.call(act, turn.events[0].data["text"])  # type: ignore[arg-type]
            if self.dies and self.place == "commit.before":
                failpoints.arm(nth("commit.before", 1, kill))
            turn.record(REPLY, {"said": said})

    def _act(self, text: str, key: str) -> str:
        self._write("tool", key)
        self._die_in("tool")
        return text.upper()

    def _die_in(self, place: str) -> None:
        if self.dies and self.place == place:
            os.kill(os.getpid(), signal.SIGKILL)

    def _write(self, what: str, key: str) -> None:
        with self.journal.open("a") as file:
            file.write(json.dumps([what, key]) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def die(self) -> None:
        """Run until the place of its death."""
        self.dies = True
        if self.place not in ("model", "tool", "commit.before"):
            failpoints.arm(nth(self.place, 1, kill))
        self.post.drain()

    def recover(self) -> None:
        """Run until nothing is left."""
        while self._held():
            self.post.drain()
            time.sleep(0.02)  # until the dead process's lease is over

    def _held(self) -> bool:
        database, stream = self.post.database, f"{self.stream_type}/1"
        left = database.read(stream_views.waiting, stream, limit=1)
        return bool(left) or database.read(stream_views.queue, stream) is not None

    def found(self) -> dict[str, Any]:
        """What came of it."""
        database, stream = self.post.database, f"{self.stream_type}/1"
        return {
            "effect": self.effect,
            "place": self.place,
            "did": [json.loads(line) for line in self.journal.read_text().splitlines()],
            "log": [[entry.kind, entry.data] for entry in self.post.read(stream)],
            "operations": [
                [row.tool, row.status, row.key, row.run_id, row.entry]
                for row in reversed(database.read(operations.of_stream, stream))
            ],
            "runs": [[run.run_id, str(run.end)] for run in reversed(database.read(runs.of_stream, stream))],
            "alerts": [alert.code for alert in database.read(alerts.list_) if alert.subject == stream],
        }


def forked(work: Callable[[], None]) -> int:
    """Do this in a process of its own; its exit code."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(url: str, schema: str, folder: str) -> None:
    """Kill a process for each case, then recover each."""
    programs = [Program(url, schema or None, Path(folder), case) for case in cases()]
    assert forked(lambda: each(programs, publish)) == 0
    for program in programs:
        code = forked(program.die)
        assert code == -signal.SIGKILL, (program.effect, program.place, code)
    assert forked(lambda: each(programs, Program.recover)) == 0
    print(json.dumps([program.found() for program in programs]))


def each(programs: list[Program], work: Callable[[Program], None]) -> None:
    """Do this with every program, one after the other."""
    for program in programs:
        work(program)
        program.post.close()


def publish(program: Program) -> None:
    """The event that the case's turn decides on."""
    with program.post.begin() as tx:
        tx.publish(f"{program.stream_type}/1", NOTE, {"text": program.place}, key="a")


if __name__ == "__main__":
    main(*sys.argv[1:])
