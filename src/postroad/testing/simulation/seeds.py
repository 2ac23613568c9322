"""Playing seeds: each in a folder of its own, with its own clock and loop, and a verdict."""

import gc
import hashlib
import logging
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Connection

from postroad.model.clock import FakeClock
from postroad.model.failpoints import arm
from postroad.store import migrations
from postroad.store.database import Database
from postroad.store.executor import Inline
from postroad.testing.simulation.history import INSTRUMENTS, History, operated, tables
from postroad.testing.simulation.options import OPERATIONS, TROUBLES, Options, draw
from postroad.testing.simulation.virtual import VirtualLoop
from postroad.testing.simulation.world import Run

_INVARIANT = re.compile(r"^([A-Z]+\d+ [a-z ]+):", re.MULTILINE)
COMMAND = "python -m postroad.testing.simulation"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a seed. `error` is None if every invariant held; `history` is the last moment that was checked."""

    options: Options
    without: Sequence[str] = ()
    error: str | None
    lines: list[str]
    digest: str
    counts: Counter[str]
    virtual_seconds: float
    history: History | None = None

    @property
    def invariants(self) -> list[str]:
        """The invariants that did not hold, each once."""
        return list(dict.fromkeys(_INVARIANT.findall((self.error or "").partition(": ")[2])))

    @property
    def broken(self) -> list[str]:
        """The invariants that did not hold, or the name of what was raised instead."""
        return [] if self.error is None else self.invariants or [self.error.partition(":")[0]]

    @property
    def replay(self) -> str:
        """The command that plays this seed again."""
        without = f" --without {','.join(self.without)}" if self.without else ""
        return f"{COMMAND} --seed {self.options.seed} --operations {self.options.operations}{without}"

    def failure(self, *, last: int = 40) -> str:
        """The story of a failed seed: what is wrong, the end of its log, and how to play it again."""
        told = "\n".join(self.lines[-last:])
        return f"seed {self.options.seed}: {self.error}\n{self.options}\n{told}\nreplay: {self.replay}"


def play(seed: int, *, operations: int = OPERATIONS, without: Sequence[str] = ()) -> Verdict:
    """Play one seed, without some of its troubles if so asked."""
    options = draw(seed, operations=operations, without=without)
    # Inside it no settings' file is found: a seed is the same wherever it is played.
    with tempfile.TemporaryDirectory(prefix="postroad-sim-") as folder, chdir(folder), _quiet():
        path = Path(folder) / "sim.db"
        path.write_bytes(_template())
        clock = FakeClock()
        run, error = _play(options, clock, path)
        counts = Counter(run.counts)
        counts["arrivals"] = len(run.sink.arrivals)
        return Verdict(
            options=options, without=without, error=error, lines=run.lines, digest=_digest(run, path), counts=counts,
            virtual_seconds=clock.monotonic() / 1e6, history=run.seen,
        )  # fmt: skip


def _play(options: Options, clock: FakeClock, path: Path) -> tuple[Run, str | None]:
    loop = VirtualLoop(clock)
    loop.set_exception_handler(lambda loop, context: None)  # a dead process's tasks are never asked
    run = Run(options, clock, path)
    arm(run.at_failpoint)
    try:
        loop.run_until_complete(run.play())
    except Exception as error:
        return run, f"{type(error).__name__}: {error}"
    finally:
        arm(None)
        loop.close()
    return run, None


def _digest(run: Run, path: Path) -> str:
    """A fingerprint of the whole log and of everything in the database."""
    database = Database(f"sqlite:///{path}", clock=run.clock, executor=Inline())
    found = database.read(tables) | database.read(operated)
    database.close()
    return hashlib.sha256("\n".join([*run.lines, str(sorted(found.items()))]).encode()).hexdigest()


@cache
def _template() -> bytes:
    """An empty database with our tables and the simulation's instruments, made once."""
    folder = Path(tempfile.mkdtemp(prefix="postroad-sim-"))
    try:
        database = Database(f"sqlite:///{folder / 'template.db'}", clock=FakeClock(), executor=Inline())
        migrations.migrate(database)
        database.transact(_instrument)
        database.close()
        return (folder / "template.db").read_bytes()
    finally:
        shutil.rmtree(folder)


def _instrument(conn: Connection, *, now: int) -> None:
    for statement in INSTRUMENTS:
        conn.exec_driver_sql(statement)


@contextmanager
def _quiet() -> Iterator[None]:
    """No log, for the failures here are planned by the hundred; no collector of garbage, for a run is soon over."""
    logger = logging.getLogger("postroad")
    before, collecting = logger.disabled, gc.isenabled()
    logger.disabled = True
    gc.disable()
    try:
        yield
    finally:
        logger.disabled = before
        if collecting:
            gc.enable()


def play_twice(seed: int, *, operations: int = OPERATIONS, without: Sequence[str] = ()) -> Verdict:
    """Play one seed twice: a difference in log or database is hidden nondeterminism, and fails the seed."""
    first, second = (play(seed, operations=operations, without=without) for _ in range(2))
    if first.digest == second.digest:
        return first
    pairs: Any = zip([*first.lines, "(end)"], [*second.lines, "(end)"], strict=False)
    split = next((pair for pair in pairs if pair[0] != pair[1]), ("same log", "other rows"))
    return msgspec.structs.replace(first, error=f"Nondeterminism: two runs differ\n  {split[0]}\n  {split[1]}")


def shrink(failed: Verdict) -> Verdict:
    """A smaller run that breaks one of the same invariants: fewer operations, and no trouble that it does not need."""
    smallest = failed
    for without in [()] + [(name,) for name in TROUBLES if getattr(failed.options, name)]:
        smallest = _smaller(smallest, smallest.options.operations, without)
        smallest = _shorter(smallest)
    return smallest


def _shorter(failed: Verdict) -> Verdict:
    """The same with as few operations as still fail, if more never hide what fewer show."""
    enough, smallest = 0, failed
    while smallest.options.operations - enough > 1:
        middle = (enough + smallest.options.operations) // 2
        tried = _smaller(smallest, middle)
        if tried is smallest:
            enough = middle
        smallest = tried
    return smallest


def _smaller(failed: Verdict, operations: int, without: Sequence[str] = ()) -> Verdict:
    """The smaller run if it fails in the same way, else the one given."""
    tried = play(failed.options.seed, operations=operations, without=(*failed.without, *without))
    return tried if set(tried.broken) & set(failed.broken) else failed
