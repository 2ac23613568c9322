"""The command: real processes on real databases, faults drawn from a seed, and what came of it.

Exits with 1 if an invariant was broken, or if too little happened for the run to mean anything.
"""

import argparse
import asyncio
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from postroad.testing.chaos.library import use_bundled_sqlite

if TYPE_CHECKING:
    from postroad.testing.chaos.director import Run
    from postroad.testing.chaos.places import Place
    from postroad.testing.chaos.verdict import Verdict

DATABASES = ("sqlite", "postgres")
INTERRUPTED = 130


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m postroad.testing.chaos", description=__doc__)
    parser.add_argument("--duration", type=float, default=60, help="for how many seconds there are faults")
    parser.add_argument("--seed", type=int, help="what they are drawn from; drawn itself when it is not given")
    parser.add_argument("--database", choices=(*DATABASES, "both"), default="both")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupted)
    seed = random.randrange(1_000_000) if given.seed is None else given.seed
    databases = DATABASES if given.database == "both" else (given.database,)
    print(f"seed {seed}, {given.duration:g} s, {' and '.join(databases)}", file=sys.stderr, flush=True)
    try:
        return _run(databases, seed=seed, seconds=given.duration, as_json=given.json)
    except KeyboardInterrupt:
        print("interrupted; every process was ended", file=sys.stderr)
        return INTERRUPTED


def _run(databases: Sequence[str], *, seed: int, seconds: float, as_json: bool) -> int:
    use_bundled_sqlite()
    from postroad.testing.chaos import report, verdict
    from postroad.testing.chaos.places import opened

    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    with ExitStack() as stack:
        places = [stack.enter_context(opened(name, folder / name)) for name in databases]
        verdicts = asyncio.run(_play(places, folder, seed=seed, seconds=seconds))
    lacking = verdict.lacking(verdicts, seconds)
    print(report.as_json(verdicts, lacking) if as_json else report.table(verdicts))
    for one in verdicts:
        if one.violations:
            print(report.wrong(one), file=sys.stderr)
    for said in lacking:
        print(said, file=sys.stderr)
    if any(one.violations for one in verdicts):
        return 1
    shutil.rmtree(folder)
    return bool(lacking)


async def _play(places: "Sequence[Place]", folder: Path, *, seed: int, seconds: float) -> "list[Verdict]":
    """One run on each of the databases, side by side."""
    from postroad.testing.chaos.director import Run

    runs = [Run(place, folder / place.name, seed=seed, seconds=seconds) for place in places]
    telling = asyncio.create_task(_tell(runs)) if sys.stderr.isatty() else None
    try:
        async with asyncio.TaskGroup() as group:
            played = [group.create_task(run.play()) for run in runs]
    finally:
        if telling is not None:
            telling.cancel()
            print(file=sys.stderr)
    return [task.result() for task in played]


async def _tell(runs: "Sequence[Run]") -> None:
    """Keep a line of the terminal up to date."""
    began = time.monotonic()
    while True:
        said = "; ".join(run.progress() for run in runs)
        print(f"\r{time.monotonic() - began:3.0f} s  {said}", end="\033[K", file=sys.stderr, flush=True)
        await asyncio.sleep(0.5)


def _interrupted(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
