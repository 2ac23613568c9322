"""What is printed: a table for people, JSON for programs."""

from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.rounds import Result

NOTES = (
    "streams: how many are busy at once, each with one thing in flight (bulk: over how many the rows are spread). "
    "limit: hand-written SQL over the raw driver that writes the same rows as durably, as many in a transaction as "
    "there are streams (bulk: 500). SQLite: WAL, synchronous=FULL; Postgres: embedded, default durability. "
    "Medians of interleaved rounds; compare only within one run."
)


def as_json(results: Sequence[Result]) -> str:
    """The results as one JSON array."""
    return msgspec.json.format(msgspec.json.encode(results), indent=2).decode()


def show(results: Sequence[Result], console: Console) -> None:
    """The results as a table."""
    table = Table(title="Postroad against hand-written SQL", title_justify="left")
    table.add_column("work")
    table.add_column("database")
    for heading in ("streams", "ours /s", "limit /s", "ratio"):
        table.add_column(heading, justify="right")
    for result in results:
        table.add_row(
            result.name,
            result.database,
            str(result.streams),
            f"{result.ours_per_s:,.0f}",
            f"{result.limit_per_s:,.0f}",
            f"{result.ratio:.2f}",
        )
    console.print(table)
    console.print(NOTES, style="dim", highlight=False)
