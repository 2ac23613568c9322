"""The command: `python -m benchmarks [--json] [--quick]`, see `--help`."""

import argparse
import sqlite3
import sys
import time
import warnings
from collections.abc import Sequence
from typing import get_args

from rich.console import Console

from benchmarks import freight, places, report, rounds, work
from postroad.store.dialects import SQLiteVersionWarning

QUICK_LOADS = 20


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print: results on stdout, progress on stderr."""
    given = _parser().parse_args(arguments)
    # The SQLite that comes with Python is the one that is measured; its version is printed.
    warnings.simplefilter("ignore", SQLiteVersionWarning)
    console, aside = Console(), Console(stderr=True, highlight=False)
    began = time.monotonic()

    def progress(text: str) -> None:
        aside.print(f"{time.monotonic() - began:5.0f} s  {text}", style="dim")

    works = [what for what in work.WORKS if what.name in (given.work or [what.name])]
    plan = rounds.QUICK if given.quick else rounds.Plan(rounds=given.rounds, seconds=given.seconds)
    results = list(rounds.measure(works, plan, kinds=given.database or get_args(places.Kind), progress=progress))
    if given.json:
        print(report.as_json(results))
    else:
        report.show(results, console)
        console.print(f"Python {sys.version.split()[0]}, SQLite {sqlite3.sqlite_version}.", style="dim")
    loads = given.loads if given.loads is not None else QUICK_LOADS if given.quick else freight.LOADS
    if loads:
        weeks = freight.run(loads, progress=progress)
        # JSON mode promises nothing but the results on stdout.
        (aside if given.json else console).print(str(weeks), soft_wrap=True)


def _parser() -> argparse.ArgumentParser:
    names = list(dict.fromkeys(what.name for what in work.WORKS))
    kinds = list(get_args(places.Kind))
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Postroad against hand-written SQL.")
    parser.add_argument("--json", action="store_true", help="print the results as a JSON array")
    parser.add_argument("--quick", action="store_true", help="a few of everything: the figures are noise")
    parser.add_argument("--work", action="append", choices=names, help="only this (may be repeated)")
    parser.add_argument("--database", action="append", choices=kinds, help="only there (may be repeated)")
    parser.add_argument("--rounds", type=int, default=rounds.Plan().rounds, help="rounds to take the median of")
    parser.add_argument("--seconds", type=float, default=rounds.Plan().seconds, help="length of a side's round")
    parser.add_argument(
        "--loads", type=int, help=f"loads of the freight run, {freight.LOADS:,} unless given, 0 for none"
    )
    return parser


if __name__ == "__main__":
    main()
