"""A run at one moment, as the simulation's checkers read it, with what only real processes have: faults and lives."""

from typing import Any

import msgspec

from postroad.testing.chaos import faults
from postroad.testing.chaos.faults import Fault
from postroad.testing.chaos.sink import Sink, Told
from postroad.testing.chaos.sizes import OPTIONS
from postroad.testing.simulation.history import History


class Evidence(msgspec.Struct, kw_only=True):
    """The tables and the sink, the faults, and what processes said of their sends."""

    database: str
    history: History
    faults: list[Fault]
    told: list[Told] = []
    withdrawn: set[str] = set()
    trouble: list[str] = []


def gather(
    database: str, sink: Sink, log: list[Fault], rows: dict[str, Any], *, before: History | None, end: bool
) -> Evidence:
    """What is known now. The sink's lists are the run's own: they grow on."""
    history = History(
        options=OPTIONS, now=faults.now(), ledger=sink.ledger, arrivals=sink.arrivals, rung=list[Any](sink.rung),
        tried=sink.tried, turned_away=sink.turned_away, before=before, end=end, **rows,
    )  # fmt: skip
    return Evidence(
        database=database, history=history, faults=log, told=sink.told, withdrawn=sink.withdrawn, trouble=sink.trouble
    )
