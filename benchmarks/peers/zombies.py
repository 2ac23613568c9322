"""A zombie: a worker that is paused in a job, wakes after its claim was over, and then reports what it did.

`python -m benchmarks.peers.zombies`: one job; the first worker starts it and is stopped (SIGSTOP) until a second
one has started it too; then the first goes on (SIGCONT) and finishes while the second still works, and at last
the second finishes. Printed is what the database and the logs said at each point; nothing is judged.
"""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from multiprocessing.connection import Connection

import msgspec
import psycopg
from rich.console import Console
from rich.table import Table

from benchmarks.peers import rounds
from benchmarks.peers.contestant import Leased, contestant_class, make
from postroad.demo.embedded import passing_postgres

NAMES = ("postroad", "pgqueuer", "faststream-outbox", "procrastinate")
LEASE_SECONDS = 6.0
TAKEN_SECONDS = 60
SEEN_SECONDS = 2.0  # time for a worker to write what it has to write


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of a product: its job as the database had it, and the warnings of the two workers."""

    name: str
    release: str
    executions: int
    taken: str  # both work
    woken: str  # the first has finished, the second works
    ended: str  # both have finished
    first_said: list[str]
    second_said: list[str]


class Said(logging.Handler):
    """Passes warnings on to the parent."""

    def __init__(self, link: Connection) -> None:
        super().__init__(logging.WARNING)
        self._link = link

    def emit(self, record: logging.LogRecord) -> None:
        error = f" ({record.exc_info[1]})" if record.exc_info else ""
        self._link.send(f"{record.levelname}: {record.getMessage()}{error}".splitlines()[0])


def prepare(name: str, url: str) -> None:
    """The process that makes the tables and one job."""
    contestant = make(name, url)

    async def main() -> None:
        await contestant.install()
        async with contestant.client() as client:
            await client.enqueue(0)

    with asyncio.Runner(loop_factory=contestant.new_loop) as runner:
        runner.run(main())


def work(name: str, url: str, link: Connection) -> None:
    """A worker's process: each job says that it has started, and goes on when it is told to."""
    logging.getLogger().addHandler(Said(link))
    contestant: Leased = make(name, url)

    async def handler(_: int) -> None:
        link.send(None)
        await asyncio.to_thread(link.recv)

    with asyncio.Runner(loop_factory=contestant.new_loop) as runner:
        runner.run(contestant.hold(handler, LEASE_SECONDS))


class Paused:
    """One of the two workers, as the parent sees it."""

    def __init__(self, pid: int, link: Connection) -> None:
        self._pid = pid
        self._link = link
        self.executions = 0
        self.said: list[str] = []

    def wait_started(self) -> None:
        """Wait until it has started the job."""
        until = time.monotonic() + TAKEN_SECONDS
        while not self.executions:
            self.look(until - time.monotonic())
            if time.monotonic() > until:
                raise TimeoutError("the job was not started")

    def look(self, seconds: float) -> None:
        """Take in what it says, and wait for that if need be."""
        if self._link.poll(max(0, seconds)):
            said = self._link.recv()
            if said is None:
                self.executions += 1
            else:
                self.said.append(said)

    def watch(self, seconds: float) -> None:
        """Take in all that it says in this time."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.look(left)

    def stop(self) -> None:
        """Stop the whole process, as a paused machine would."""
        os.kill(self._pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Wake it."""
        os.kill(self._pid, signal.SIGCONT)

    def finish(self) -> None:
        """Have its job's handler return."""
        self._link.send(None)


@contextmanager
def worker(name: str, url: str) -> Iterator[Paused]:
    """A worker's process, for as long as the block lasts."""
    near, far = rounds.spawn.Pipe()
    with rounds.process(work, name, url, far) as process:
        far.close()
        assert process.pid is not None
        yield Paused(process.pid, near)


def watch(name: str, server: str) -> Seen:
    """One product's zombie."""
    with rounds.database(server) as url:
        with rounds.process(prepare, name, url) as preparing:
            rounds.ended(preparing)
        contestant: type[Leased] = contestant_class(name)
        with worker(name, url) as first:
            first.wait_started()
            first.stop()
            with worker(name, url) as second:
                second.wait_started()
                taken = _state(contestant, url)
                first.finish()
                first.go_on()
                first.watch(SEEN_SECONDS)
                woken = _state(contestant, url)
                second.finish()
                second.watch(SEEN_SECONDS)
                first.watch(0.1)
                ended = _state(contestant, url)
                return Seen(
                    name=name, release=version(contestant.package), executions=first.executions + second.executions,
                    taken=taken, woken=woken, ended=ended, first_said=first.said, second_said=second.said,
                )  # fmt: skip


def _state(contestant: type[Leased], url: str) -> str:
    with psycopg.connect(url.replace("+psycopg", "")) as connection:
        row = connection.execute(contestant.state).fetchone()
    return str(row[0]) if row else "deleted"


def main() -> None:
    """Print what was seen of each."""
    table = Table(title="A worker wakes after its claim was over", title_justify="left", show_lines=True)
    for heading in ("product", "runs", "both work", "the first has finished", "both have finished", "warnings"):
        table.add_column(heading)
    with passing_postgres() as server:
        for name in NAMES:
            seen = watch(name, server)
            said = [f"first: {text}" for text in seen.first_said] + [f"second: {text}" for text in seen.second_said]
            table.add_row(
                f"{name} {seen.release}", str(seen.executions), seen.taken, seen.woken, seen.ended,
                "\n".join(said) or "none",
            )  # fmt: skip
    Console(width=180).print(table)


if __name__ == "__main__":
    main()
