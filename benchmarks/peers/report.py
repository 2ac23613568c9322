"""What is printed: a table for people, JSON for programs, ours against the best peer in both."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.machine import Machine
from benchmarks.peers.contestant import OURS, VARIANT
from benchmarks.peers.rounds import Measured, Plan, Result

COLUMNS: Mapping[str, Callable[[Result], float | None]] = {
    "enqueue /s": lambda result: result.enqueue,
    "bulk /s": lambda result: result.bulk,
    "drain /s": lambda result: result.drain,
    "p50 ms": lambda result: result.latency and result.latency.p50,
    "p95 ms": lambda result: result.latency and result.latency.p95,
    "p99 ms": lambda result: result.latency and result.latency.p99,
}
# How many times the best peer ours should be at least (rates), or at most (milliseconds).
MARKS = {"enqueue /s": 1 / 1.3, "bulk /s": 1.5, "drain /s": 1.5, "p50 ms": 1.3, "p95 ms": 1.3, "p99 ms": 1.3}
NOTES = (
    "enqueue: one client, one job a transaction. bulk: 500 jobs a transaction. drain: one worker that was idle, from "
    "the commit of all at one stroke until none is unfinished in the database. ms: from the return of COMMIT to the "
    "start of the handler in another process, 50 jobs a second. postroad's compared drain writes history and outcomes; "
    f"{VARIANT} has no outcomes, as the peers. Medians of interleaved rounds; compare only within one run."
)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A run, as `--json` prints it."""

    machine: Machine
    plan: Plan
    releases: dict[str, str]
    settings: dict[str, str]
    results: list[Result]
    ratios: dict[str, float]
    failures: list[str]


def make(measured: Measured, plan: Plan, *, machine: Machine, about: Mapping[str, tuple[str, str]]) -> Report:
    """A run with the facts of its machine. `about`: by contestant its release and its settings."""
    return Report(
        machine=machine,
        plan=plan,
        releases={name: release for name, (release, _) in about.items()},
        settings={name: settings for name, (_, settings) in about.items()},
        results=measured.results,
        ratios=_ratios(measured.results),
        failures=measured.failures,
    )


def as_json(report: Report) -> str:
    """The run as one JSON object."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2).decode()


def show(report: Report, console: Console) -> None:
    """The run as a table."""
    table = Table(title="Postroad beside its peers", title_justify="left")
    table.add_column("", no_wrap=True)
    for heading in COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True, min_width=9)
    for result in report.results:
        values = [_text(heading, value(result)) for heading, value in COLUMNS.items()]
        table.add_row(f"{result.name} {report.releases[result.name]}", *values)
    if report.ratios:
        table.add_section()
        for title, cell in (("ours to the best peer", _ratio), ("mark", _mark), ("met", _met)):
            table.add_row(title, *(cell(report, heading) for heading in COLUMNS))
    console.print(table)
    for name, settings in report.settings.items():
        console.print(f"{name}: {settings}", style="dim", highlight=False)
    console.print(NOTES, style="dim", highlight=False)
    machine = report.machine
    load = " and ".join(str(each) for each in machine.load)
    console.print(
        f"{machine.date}: {machine.cpu}, {machine.cores} cores, Python {machine.python}, Postgres {machine.postgres}, "
        f"a synced page {machine.fsync_us:.0f} µs, load before and after {load} (above the cores, others were measured "
        f"too), rounds: {report.plan.rounds}.",
        style="dim",
        highlight=False,
    )
    for failure in report.failures:
        console.print(f"FAILED: {failure}", style="red", highlight=False)


def _ratios(results: Sequence[Result]) -> dict[str, float]:
    """By column ours divided by the best peer's, where both were measured."""
    found: dict[str, float] = {}
    for heading, value in COLUMNS.items():
        ours = [value(result) for result in results if result.name == OURS]
        peers = [each for result in results if result.name not in (OURS, VARIANT) if (each := value(result))]
        if peers and ours and ours[0]:
            found[heading] = round(ours[0] / (max(peers) if _is_rate(heading) else min(peers)), 2)
    return found


def _is_rate(heading: str) -> bool:
    return heading.endswith("/s")


def _text(heading: str, value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if _is_rate(heading) else f"{value:.1f}"


def _ratio(report: Report, heading: str) -> str:
    ratio = report.ratios.get(heading)
    return "" if ratio is None else f"{ratio:.2f}"


def _mark(report: Report, heading: str) -> str:
    return f"{'≥' if _is_rate(heading) else '≤'} {MARKS[heading]:.2f}"


def _met(report: Report, heading: str) -> str:
    ratio, mark = report.ratios.get(heading), MARKS[heading]
    if ratio is None:
        return ""
    return "yes" if (ratio >= mark if _is_rate(heading) else ratio <= mark) else "no"
