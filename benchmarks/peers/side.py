"""What the processes of a measurement do: one is the client, and for two of the works another one the worker.

The two share a link. The client says how many jobs are to come; the worker answers that it is ready, and once
all of them have started, with their times.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from statistics import quantiles

import msgspec
import psycopg

from benchmarks.peers.contestant import BULK, WAIT_SECONDS, Arrivals, Client, Contestant, make

WARM = 50
REST_SECONDS = 0.3  # what the warm-up has left to be done in the background
LOOK_SECONDS = 0.002
PER_SECOND = 50
NS = 1_000_000_000


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """From the return of COMMIT to the start of the handler, in milliseconds."""

    p50: float
    p95: float
    p99: float


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement: of whom, where (a psycopg URL), and how long; `count`: how many jobs to drain."""

    name: str
    url: str
    work: str
    seconds: float
    count: int = 0


def serve(task: Task, link: Connection) -> None:
    """The worker's process; ends when it is terminated."""
    logging.disable()
    contestant, arrivals = make(task.name, task.url), Arrivals()
    threading.Thread(target=_answer, args=(arrivals, link), daemon=True).start()
    with asyncio.Runner(loop_factory=contestant.new_loop) as runner:
        runner.run(contestant.serve(arrivals))


def ask(task: Task, link: Connection | None, answer: Connection) -> None:
    """The client's process: what it measured goes into `answer`."""
    logging.disable()
    contestant = make(task.name, task.url)
    with asyncio.Runner(loop_factory=contestant.new_loop) as runner:
        answer.send(runner.run(_measured(contestant, task, link)))


def install(task: Task) -> None:
    """The process that makes the tables."""
    logging.disable()
    contestant = make(task.name, task.url)
    with asyncio.Runner(loop_factory=contestant.new_loop) as runner:
        runner.run(contestant.install())


def _answer(arrivals: Arrivals, link: Connection) -> None:
    with contextlib.suppress(EOFError):  # the client has ended
        while True:
            arrivals.expect(link.recv())
            link.send(None)
            link.send((arrivals.wait(), arrivals.again))


async def _measured(contestant: Contestant, task: Task, link: Connection | None) -> float | Latency:
    async with contestant.client() as client:
        match task.work:
            case "enqueue":
                return await _rate(contestant, task, client, 1)
            case "bulk":
                return await _rate(contestant, task, client, BULK)
        assert link is not None
        worker = Worker(contestant, task.url, link)
        await worker.warm_up(client)
        if task.work == "drain":
            return await worker.drain(client, task.count)
        return await worker.latency(client, task.seconds)


async def _rate(contestant: Contestant, task: Task, client: Client, size: int) -> float:
    """Jobs a second of one client that hands over `size` in a transaction, after a short warm-up."""
    warm = await _hand_over(client, task.seconds / 5, size)
    began = time.perf_counter()
    count = await _hand_over(client, task.seconds, size)
    seconds = time.perf_counter() - began
    if (there := _unfinished(contestant, task.url)) != warm + count:
        raise AssertionError(f"{warm + count} jobs were handed over, the database has {there}")
    return count / seconds


async def _hand_over(client: Client, seconds: float, size: int) -> int:
    count, until = 0, time.perf_counter() + seconds
    while time.perf_counter() < until:
        if size == 1:
            await client.enqueue(count)
        else:
            await client.bulk(range(count, count + size))
        count += size
    return count


def _unfinished(contestant: Contestant, url: str) -> int:
    with psycopg.connect(url.replace("+psycopg", "")) as connection:
        row = connection.execute(contestant.unfinished).fetchone()
    assert row is not None
    return int(row[0])


class Worker:
    """The other process, as the client sees it: through the link and through the database."""

    def __init__(self, contestant: Contestant, url: str, link: Connection) -> None:
        self._contestant = contestant
        self._url = url
        self._link = link

    async def warm_up(self, client: Client) -> None:
        """Have a few jobs carried out; then the worker is idle."""
        self._expect(WARM)
        for number in range(WARM):
            await client.enqueue(number)
        await self._started()
        await self._finished()
        await asyncio.sleep(REST_SECONDS)

    async def drain(self, client: Client, count: int) -> float:
        """Jobs a second, from the commit of all at one stroke until none is unfinished in the database."""
        self._expect(count)
        await client.seed(range(count))
        began = time.perf_counter()
        await self._started()
        await self._finished()
        return count / (time.perf_counter() - began)

    async def latency(self, client: Client, seconds: float) -> Latency:
        """One job every 20 ms."""
        count = max(10, round(seconds * PER_SECOND))
        self._expect(count)
        committed, began = [], time.monotonic_ns()
        for number in range(count):
            await asyncio.sleep(max(0, (began + number * NS // PER_SECOND - time.monotonic_ns()) / NS))
            await client.enqueue(number)
            committed.append(time.monotonic_ns())
        started = await self._started()
        return _percentiles([(started[number] - committed[number]) / 1e6 for number in range(count)])

    def _expect(self, count: int) -> None:
        self._link.send(count)
        self._link.recv()

    async def _started(self) -> dict[int, int]:
        started, again = await asyncio.to_thread(self._link.recv)
        if again:
            raise AssertionError(f"{again} jobs were carried out more than once")
        return started

    async def _finished(self) -> None:
        until = time.monotonic() + WAIT_SECONDS
        while left := _unfinished(self._contestant, self._url):
            if time.monotonic() > until:
                raise TimeoutError(f"{left} jobs are not finished")
            await asyncio.sleep(LOOK_SECONDS)


def _percentiles(values: Sequence[float]) -> Latency:
    cuts = quantiles(values, n=100, method="inclusive")
    return Latency(p50=cuts[49], p95=cuts[94], p99=cuts[98])
