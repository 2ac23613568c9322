"""The command: `python -m benchmarks [--json] [--quick]`, see `--help`."""

import argparse
import sys
import time
import warnings
from collections.abc import Sequence
from typing import get_args

import msgspec
from rich.console import Console

from benchmarks import expectations, figures, freight, machine, places, report, suite
from postroad.store.sqlite_version import SQLiteVersionWarning

FREIGHT = "freight"
QUICK_LOADS = 20
WIDTH = 120


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print: what was found on stdout, progress on stderr."""
    given = _parser().parse_args(arguments)
    # The SQLite that comes with Python is the one that is measured; its version is printed.
    warnings.simplefilter("ignore", SQLiteVersionWarning)
    aside = Console(stderr=True, highlight=False)
    began, load = time.monotonic(), machine.load()

    def progress(text: str) -> None:
        aside.print(f"{time.monotonic() - began:5.0f} s  {text}", style="dim")

    names = given.work or [*suite.NAMES, FREIGHT]
    asked = suite.Suite([name for name in names if name != FREIGHT], _plan(given), progress)
    found = list(asked.run(given.database or get_args(places.Kind)))
    loads = _loads(given) if FREIGHT in names else 0
    done = report.Report(
        figures=found,
        freight=freight.run(loads, progress=progress) if loads else None,
        expectations=list(expectations.judged(found)),
        machine=machine.look(postgres=asked.postgres, load_before=load),
    )
    if given.json:
        print(report.as_json(done))
    else:
        # A file has no width; a terminal's may be too small.
        report.show(done, Console(width=None if sys.stdout.isatty() else WIDTH))


def _plan(given: argparse.Namespace) -> figures.Plan:
    """The plan, with whatever the command line says of it."""
    said = {name: getattr(given, name) for name in ("rounds", "seconds", "steady_seconds")}
    plan = figures.QUICK if given.quick else figures.Plan()
    return msgspec.structs.replace(plan, **{name: value for name, value in said.items() if value is not None})


def _loads(given: argparse.Namespace) -> int:
    if given.loads is not None:
        return int(given.loads)
    return QUICK_LOADS if given.quick else freight.LOADS


def _parser() -> argparse.ArgumentParser:
    kinds = list(get_args(places.Kind))
    plan = figures.Plan()
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Postroad against hand-written SQL.")
    parser.add_argument("--json", action="store_true", help="print all that was found as JSON")
    parser.add_argument("--quick", action="store_true", help="a few of everything: the figures are noise")
    parser.add_argument("--work", action="append", choices=[*suite.NAMES, FREIGHT], help="only this (may be repeated)")
    parser.add_argument("--database", action="append", choices=kinds, help="only there (may be repeated)")
    parser.add_argument("--rounds", type=int, help=f"rounds to take the median of, {plan.rounds} unless given")
    parser.add_argument("--seconds", type=float, help=f"length of a side's round, {plan.seconds:g} unless given")
    parser.add_argument(
        "--steady-seconds", type=float, help=f"length of the steady load, {plan.steady_seconds:g} unless given"
    )
    parser.add_argument(
        "--loads", type=int, help=f"loads of the freight run, {freight.LOADS:,} unless given, 0 for none"
    )
    return parser


if __name__ == "__main__":
    main()
