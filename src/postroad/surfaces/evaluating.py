"""`postroad eval --json`: what came of scenarios, for programs."""

from collections.abc import Sequence
from pathlib import Path

from postroad.demo.evaluate import evaluate, on_postgres, on_sqlite
from postroad.surfaces.output import FAILED, show_json


def show(files: Sequence[Path], *, postgres: bool) -> int:
    """Play the scenarios and print a document; the exit code, 0 only if all of them passed."""
    with on_postgres() if postgres else on_sqlite() as fresh:
        reports = [evaluate(file, fresh) for file in files]
    show_json(
        [
            {"name": r.name, "passed": r.passed, "failures": list(r.failures), "timeline": list(r.timeline)}
            for r in reports
        ]
    )
    return 0 if all(report.passed for report in reports) else FAILED
