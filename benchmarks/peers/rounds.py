"""Rounds: every contestant by turns, each measurement in fresh processes on a fresh database of one server."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from statistics import median
from typing import Any, Literal, get_args

import msgspec
import psycopg
from sqlalchemy import make_url

from benchmarks.peers import side
from benchmarks.peers.contestant import VARIANT, contestant_class
from benchmarks.peers.side import Latency, Task
from postroad.demo.embedded import passing_postgres

Work = Literal["enqueue", "bulk", "drain", "latency"]
WORKS: tuple[Work, ...] = get_args(Work)
DATABASE = "bench"
PILOT = 500  # jobs of a first drain that says how many make up a round
DRAIN_MAX = 20_000
LIMIT_SECONDS = 300
END_SECONDS = 10


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How long to measure: about `seconds` of each work in each round, `paced` seconds of latency."""

    rounds: int = 3
    seconds: float = 2.0
    paced: float = 8.0


QUICK = Plan(rounds=1, seconds=0.2, paced=0.4)


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The medians of a contestant's rounds. Rates a second; None: this work was not measured for it."""

    name: str
    enqueue: float | None = None
    bulk: float | None = None
    drain: float | None = None
    latency: Latency | None = None


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A run: what came of it, which measurements failed, and the server's version."""

    results: list[Result]
    failures: list[str]
    postgres: str


class Failed(RuntimeError):
    """A process of a measurement ended without an answer; its own words are on stderr."""


spawn = multiprocessing.get_context("spawn")


def measure(
    names: Sequence[str], works: Sequence[Work], plan: Plan, *, progress: Callable[[str], None] = lambda _: None
) -> Measured:
    """Measure these contestants. A measurement that fails is told of and left out."""
    found: dict[tuple[str, Work], list[Any]] = {}
    failures: list[str] = []
    with passing_postgres() as server:
        for number in range(plan.rounds):
            for what in works:
                for name in (name for name in names if _takes_part(name, what)):
                    doing = f"round {number + 1} of {plan.rounds}: {what}, {name}"
                    progress(doing)
                    try:
                        found.setdefault((name, what), []).append(_once(server, name, what, plan, found))
                    except Failed as error:
                        failures.append(f"{doing}: {error}")
                        progress(f"FAILED: {error}")
        version = _version(server)
    return Measured(results=[_result(name, works, found) for name in names], failures=failures, postgres=version)


def about(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """By contestant its release and its settings."""
    found = {name: contestant_class(name) for name in names}
    return {name: (version(made.package), made.settings) for name, made in found.items()}


def _takes_part(name: str, what: Work) -> bool:
    """Without streams ours differs in the drain only: applications outside of turns send without them anyway."""
    return name != VARIANT or what == "drain"


def _once(server: str, name: str, what: Work, plan: Plan, before: dict[tuple[str, Work], list[Any]]) -> Any:
    task = Task(name=name, url="", work=what, seconds=plan.paced if what == "latency" else plan.seconds)
    if what != "drain":
        return _run(server, task)
    rates = before.get((name, what)) or [_run(server, msgspec.structs.replace(task, count=PILOT))]
    count = min(DRAIN_MAX, max(PILOT, round(median(rates) * plan.seconds)))
    return _run(server, msgspec.structs.replace(task, count=count))


def _run(server: str, task: Task) -> Any:
    with database(server) as url:
        task = msgspec.structs.replace(task, url=url)
        with process(side.install, task) as installing:
            ended(installing)
        answer, told = spawn.Pipe(duplex=False)
        if task.work not in ("drain", "latency"):
            with process(side.ask, task, None, told) as asking:
                return _answered(answer, told, asking)
        near, far = spawn.Pipe()
        with process(side.serve, task, far), process(side.ask, task, near, told) as asking:
            # Only the two processes hold the link, so that the end of one ends the other's waiting.
            near.close()
            far.close()
            return _answered(answer, told, asking)


@contextmanager
def process(target: Callable[..., None], *arguments: object) -> Iterator[BaseProcess]:
    """A child process, ended with the block."""
    process = spawn.Process(target=target, args=arguments, daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.terminate()
        process.join(END_SECONDS)
        if process.is_alive():
            process.kill()
            process.join()


def ended(process: BaseProcess) -> None:
    process.join(LIMIT_SECONDS)
    if process.exitcode != 0:
        raise Failed(f"exit code {process.exitcode}")


def _answered(answer: Connection, told: Connection, process: BaseProcess) -> Any:
    told.close()
    if not answer.poll(LIMIT_SECONDS):
        raise Failed(f"no answer within {LIMIT_SECONDS} s")
    try:
        found = answer.recv()
    except EOFError:
        raise Failed("the client ended without an answer") from None
    ended(process)
    return found


@contextmanager
def database(server: str) -> Iterator[str]:
    """A fresh database for one measurement."""
    drop = f"DROP DATABASE IF EXISTS {DATABASE} WITH (FORCE)"
    with psycopg.connect(server.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(drop)
        connection.execute(f"CREATE DATABASE {DATABASE}")
        try:
            yield make_url(server).set(database=DATABASE).render_as_string()
        finally:
            connection.execute(drop)


def _version(server: str) -> str:
    with psycopg.connect(server.replace("+psycopg", "")) as connection:
        row = connection.execute("SHOW server_version").fetchone()
    assert row is not None
    return str(row[0])


def _result(name: str, works: Sequence[Work], found: dict[tuple[str, Work], list[Any]]) -> Result:
    measured: dict[str, Any] = {}
    for what in works:
        values = found.get((name, what))
        if values and what == "latency":
            medians = {field: median(getattr(value, field) for value in values) for field in Latency.__struct_fields__}
            measured[what] = Latency(**{field: round(value, 2) for field, value in medians.items()})
        elif values:
            measured[what] = round(median(values), 1)
    return Result(name=name, **measured)
