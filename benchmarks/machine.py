"""The machine that was measured on: absolute figures mean nothing without it."""

import os
import platform
import sqlite3
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.figures import rounded
from benchmarks.places import Place

SYNCS = 50
PAGE = b"p" * 4096


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to say of it. `fsync_us`: median of writing a page and having the disk keep it.

    `load`: processes that wanted to run in the last minute before and after; above the cores, others were measured
    as well.
    """

    date: str
    system: str
    cpu: str
    cores: int
    python: str
    sqlite: str
    postgres: str | None
    fsync_us: float
    load: Sequence[float]


def look(*, postgres: str | None, load_before: float) -> Machine:
    """Look at this machine now; `postgres` is the server's version if one was measured."""
    return Machine(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        system=platform.platform(),
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        python=platform.python_version(),
        sqlite=sqlite3.sqlite_version,
        postgres=postgres,
        fsync_us=rounded(_fsync_seconds() * 1_000_000),
        load=(rounded(load_before), rounded(load())),
    )


def load() -> float:
    """How many processes have wanted to run lately, on average."""
    return os.getloadavg()[0]


def server_version(place: Place) -> str:
    """The version of a place's Postgres."""
    found = place.database.read(lambda conn: conn.exec_driver_sql("SHOW server_version").scalar_one())
    return str(found)


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _fsync_seconds() -> float:
    """On the disk that the databases are on."""
    found = []
    with tempfile.NamedTemporaryFile(prefix="postroad-bench-") as file:
        for _ in range(SYNCS):
            began = time.perf_counter()
            os.write(file.fileno(), PAGE)
            os.fsync(file.fileno())
            found.append(time.perf_counter() - began)
    return median(found)
