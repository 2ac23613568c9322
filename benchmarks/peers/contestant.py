"""What a product must be able to do to take part, and how the start of a job is noted."""

import asyncio
import importlib
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from sqlalchemy import URL, make_url

Handler = Callable[[int], Awaitable[None]]
BULK = 500
WAIT_SECONDS = 120
DIGITS = 6
TEXT = " please tell us when you expect to arrive at the gate of the warehouse, and whom to ask for" * 2

CONTESTANTS = {
    "postroad": "ours:Ours",
    "postroad-no-stream": "ours:OursWithoutStream",
    "pgqueuer": "pgqueuer:PgQueuerSide",
    "faststream-outbox": "faststream_outbox:FastStreamOutboxSide",
    "procrastinate": "procrastinate:ProcrastinateSide",
    "dbos": "dbos:DBOSSide",
}
OURS = "postroad"
VARIANT = "postroad-no-stream"


class Client(Protocol):
    """The application's side: hands over jobs. What has returned is committed."""

    async def enqueue(self, number: int) -> None:
        """One job in a transaction of its own."""

    async def bulk(self, numbers: Sequence[int]) -> None:
        """At most `BULK` jobs in one transaction, by the product's own bulk call if there is one."""

    async def seed(self, numbers: Sequence[int]) -> None:
        """Any number of jobs at one stroke: in one transaction."""


class Arrivals:
    """When each job's handler started. `note` may be called from any thread."""

    def __init__(self) -> None:
        self._all = threading.Event()
        self.expect(0)

    def expect(self, count: int) -> None:
        """From now on that many jobs are awaited, numbered from 0."""
        self.starts: dict[int, int] = {}
        self.again = 0
        self._count = count
        self._all.clear()

    def note(self, number: int) -> None:
        """The handler of a job has started."""
        if number in self.starts:
            self.again += 1
            return
        self.starts[number] = time.monotonic_ns()
        if len(self.starts) == self._count:
            self._all.set()

    def wait(self) -> dict[int, int]:
        """Wait until all have started; by number the time, in nanoseconds that all processes share.

        Raises:
            TimeoutError: They didn't within two minutes.
        """
        if not self._all.wait(WAIT_SECONDS):
            raise TimeoutError(f"{len(self.starts)} of {self._count} jobs have started")
        return self.starts


class Contestant(Protocol):
    """A product with the settings it is measured with. An instance belongs to one process."""

    package: str
    settings: str
    unfinished: str  # SQL: how many jobs are not finished yet

    def __init__(self, url: URL) -> None: ...

    def new_loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that the product's own command runs on."""

    async def install(self) -> None:
        """Make the product's tables in an empty database."""

    def client(self) -> AbstractAsyncContextManager[Client]:
        """A connected client."""

    async def serve(self, arrivals: Arrivals) -> None:
        """Carry out jobs with a handler that does nothing but note its start; ends with the process."""


class Leased(Contestant, Protocol):
    """A product whose claims end with time, so that another worker may take over."""

    state: str  # SQL: what the database says of its only job

    async def hold(self, handler: Handler, lease_seconds: float) -> None:
        """Carry out jobs with this handler, as its guide says, and with claims of that length."""


def contestant_class(name: str) -> Any:
    """A contestant's class; only its own product's packages are imported."""
    module, _, found = CONTESTANTS[name].partition(":")
    return getattr(importlib.import_module(f"benchmarks.peers.{module}"), found)


def make(name: str, url: str) -> Any:
    """A contestant of this process, on a database given by a psycopg URL."""
    return contestant_class(name)(make_url(url))


def payload(number: int) -> str:
    """About 200 bytes of text that begin with the job's number."""
    return f"{number:0{DIGITS}}{TEXT}"


def number_of(text: str | bytes) -> int:
    """The number that a payload begins with."""
    return int(text[:DIGITS])
