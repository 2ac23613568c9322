"""The command: `python -m benchmarks.peers [--json] [--quick]`, see `--help`."""

import argparse
import time
from collections.abc import Sequence

from rich.console import Console

from benchmarks import machine
from benchmarks.peers import report, rounds
from benchmarks.peers.contestant import CONTESTANTS

WIDTH = 110  # of the table, also where there is no terminal


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print: results on stdout, progress on stderr."""
    given = _parser().parse_args(arguments)
    console, aside = Console(), Console(stderr=True, highlight=False)
    console.width = max(console.width, WIDTH)
    began = time.monotonic()

    def progress(text: str) -> None:
        aside.print(f"{time.monotonic() - began:5.0f} s  {text}", style="dim")

    plan = rounds.QUICK if given.quick else rounds.Plan(rounds=given.rounds, seconds=given.seconds)
    names = given.only or list(CONTESTANTS)
    load = machine.load()
    measured = rounds.measure(names, given.work or rounds.WORKS, plan, progress=progress)
    here = machine.look(postgres=measured.postgres, load_before=load)
    found = report.make(measured, plan, machine=here, about=rounds.about(names))
    if given.json:
        print(report.as_json(found))
    else:
        report.show(found, console)
    if measured.failures:
        raise SystemExit(1)


def _parser() -> argparse.ArgumentParser:
    plan = rounds.Plan()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description="Postroad beside its peers.")
    parser.add_argument("--json", action="store_true", help="print the run as a JSON object")
    parser.add_argument("--quick", action="store_true", help="a little of everything: the figures are noise")
    parser.add_argument("--only", action="append", choices=list(CONTESTANTS), help="only this (may be repeated)")
    parser.add_argument("--work", action="append", choices=rounds.WORKS, help="only this (may be repeated)")
    parser.add_argument("--rounds", type=int, default=plan.rounds, help="rounds to take the median of")
    parser.add_argument("--seconds", type=float, default=plan.seconds, help="length of a work in a round")
    return parser


if __name__ == "__main__":
    main()
