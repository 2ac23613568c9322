"""What a zombie leaves behind: everything that a store holds, before and after, and whether it was told."""

from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import Connection, Table

from postroad.model.clock import FakeClock
from postroad.model.errors import StaleClaim
from postroad.store.schema import PREFIX, metadata
from postroad.store.statements import Statement

Run = Callable[..., Any]
Rows = list[dict[str, Any]]
Tables = Mapping[str, Rows]
# What a zombie does in a transaction, at a time in microseconds.
Late = Callable[[Connection, int], object]


def _all_of(table: Table) -> Statement:
    order = ", ".join(column.name for column in table.primary_key)
    return Statement(f"SELECT * FROM {{p}}{table.name.removeprefix(PREFIX)} ORDER BY {order}")


# From the schema itself: no table of a release to come is left out.
_TABLES = {table.name.removeprefix(PREFIX): _all_of(table) for table in metadata.sorted_tables}


def added(before: Tables, after: Tables) -> dict[str, Rows]:
    """The rows that have come, by table; AssertionError if one that was there has changed or is gone."""
    for name, rows in before.items():
        lost = [row for row in rows if row not in after[name]]
        assert not lost, f"{name} has lost {lost}"
    come = {name: [row for row in rows if row not in before[name]] for name, rows in after.items()}
    return {name: rows for name, rows in come.items() if rows}


def about(tables: Tables, subject: str) -> Tables:
    """The rows that have a subject in one of their columns."""
    return {name: [row for row in rows if subject in row.values()] for name, rows in tables.items()}


def is_told(conn: Connection, late: Late, *, now: int) -> bool:
    """Whether StaleClaim is raised. The transaction goes on and is committed: nothing may have been written."""
    try:
        late(conn, now)
    except StaleClaim:
        return True
    return False


def over(conn: Connection, clock: FakeClock) -> Run:
    """Runs on a connection whose transaction stays open."""

    def run(fn: Run, *args: Any, **kwargs: Any) -> Any:
        return fn(conn, *args, now=clock.wall(), **kwargs)

    return run


class Zombies:
    """What the suites have in common."""

    @staticmethod
    def everything(conn: Connection) -> Tables:
        """Every row of every table, by the table's name; a store that has more than our tables adds its own."""
        return {name: [dict(row) for row in rows(conn).mappings()] for name, rows in _TABLES.items()}
