"""What is printed: tables for people, JSON for programs."""

from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.expectations import Verdict
from benchmarks.figures import Figure
from benchmarks.freight import Weeks
from benchmarks.machine import Machine

NOTES = (
    "streams: how many are busy at once, each with one thing in flight (bulk and timers: over how many the rows are "
    "spread). against: hand-written SQL over the raw driver that writes the same rows as durably, as many in a "
    "transaction as there are streams (bulk and timers: 500), unless the case says otherwise. SQLite: WAL, "
    "synchronous=FULL; Postgres: embedded, default durability. Rates are medians of interleaved rounds; compare only "
    "within one run. latency: from the answer to COMMIT until the sender is called."
)

# What our own processes come to: the client with its threads, the server's, a child or two.
BUSY_LOAD = 2


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All that a run has found, as `--json` prints it."""

    machine: Machine
    figures: Sequence[Figure]
    expectations: Sequence[Verdict]
    freight: Weeks | None


def as_json(report: Report) -> str:
    """The report as one JSON object; a figure has its ratio too."""
    plain = msgspec.to_builtins(report)
    for written, figure in zip(plain["figures"], report.figures, strict=True):
        written["ratio"] = None if figure.ratio is None else round(figure.ratio, 3)
    return msgspec.json.format(msgspec.json.encode(plain), indent=2).decode()


def show(report: Report, console: Console) -> None:
    """The report as tables."""
    if report.figures:
        console.print(_figures(report.figures))
        console.print(NOTES, style="dim", highlight=False)
    if report.freight is not None:
        console.print(str(report.freight), soft_wrap=True)
    for verdict in report.expectations:
        console.print(
            _said(verdict), style=None if verdict.verdict == "ok" else "bold", highlight=False, soft_wrap=True
        )
    console.print(_line(report.machine), style="dim", highlight=False, soft_wrap=True)


def _figures(figures: Sequence[Figure]) -> Table:
    table = Table(title="Postroad, measured", title_justify="left")
    for heading in ("work", "database", "case"):
        table.add_column(heading, overflow="fold")
    for heading in ("ours", "against", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("unit", no_wrap=True)
    for each in figures:
        ratio = "" if each.ratio is None else f"{each.ratio:.2f}"
        table.add_row(each.work, each.database, each.case, _number(each.ours), _number(each.against), ratio, each.unit)
    return table


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:g}"


def _said(verdict: Verdict) -> str:
    return (
        f"{verdict.what:46} {verdict.database:9} expected {verdict.expected:>20}   "
        f"measured {verdict.measured:>20}   {verdict.verdict}"
    )


def _line(machine: Machine) -> str:
    server = f", Postgres {machine.postgres}" if machine.postgres else ""
    busy = " BUSY: others have used the cores meanwhile." if max(machine.load) > machine.cores + BUSY_LOAD else ""
    before, after = machine.load
    return (
        f"{machine.date}, {machine.system}, {machine.cores} cores ({machine.cpu}), fsync {machine.fsync_us:g} us, "
        f"Python {machine.python}, SQLite {machine.sqlite}{server}; load {before:g} before, {after:g} after.{busy}"
    )
