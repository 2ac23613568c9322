"""Processes that are forked from one that has imported everything: an import takes longer than many a life here.

They are as real as any: each has its own connections, threads and signals, since nothing of these is imported.
"""

import asyncio
import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

IMPORTED = (
    "postroad.bundled_sqlite",  # before anything imports another one; passed over where its wheel is missing
    "postroad.testing.chaos.users",
    "postroad.surfaces.cli",
    "postroad.surfaces.running",
    "postroad.engine.running",
    "sqlalchemy.dialects.sqlite",
    "sqlalchemy.dialects.postgresql.psycopg",
    "psycopg",
)
PROGRAM = "postroad.testing.chaos.program:post"


def born(seed: int | None, options: Sequence[str], environment: Mapping[str, str], log: Path) -> ForkServerProcess:
    """Start a process that runs the app, or if `seed` is given its clients; `environment` is beside this one's."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    process = context.Process(target=_live, args=(seed, list(options), dict(environment), str(log)))
    process.start()
    return process


def _live(seed: int | None, options: list[str], environment: dict[str, str], log: str) -> None:
    # A session of its own: an interrupt typed at the director reaches the director alone.
    os.setsid()
    written = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for descriptor in (1, 2):
        os.dup2(written, descriptor)
    os.close(written)
    os.environ.update(environment)
    if seed is not None:
        from postroad.testing.chaos.users import ask

        asyncio.run(ask(seed))
        return
    sys.argv = ["postroad", "run", PROGRAM, *options]
    runpy.run_module("postroad", run_name="__main__", alter_sys=True)
