"""The benchmarks run, and compare the same rows."""

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import msgspec
import pytest

from benchmarks import __main__ as command
from benchmarks import freight, places, rounds, work
from benchmarks.limit_sqlite import SQLiteLimit
from benchmarks.ours import Ours
from benchmarks.places import Place
from benchmarks.work import Work
from postroad.store import schema
from postroad.store.dialects import SQLiteVersionWarning

SMALL = [Work(name=what.name, streams=min(what.streams, 4)) for what in work.WORKS]
LATER_THAN = 10**12  # integers above are times


@pytest.fixture(autouse=True)
def any_sqlite() -> Iterator[None]:
    """Whatever SQLite this process has may be measured."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SQLiteVersionWarning)
        yield


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a handful of everything."""
    monkeypatch.setattr(rounds, "FEW", 8)
    monkeypatch.setattr(work, "BULK", 8)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("what", SMALL, ids=lambda what: f"{what.name} {what.streams}")
def test_both_sides_write_the_same_rows(what: Work) -> None:
    """The limit leaves the very rows that ours leaves, ids and times apart."""
    with places.places("sqlite") as (ours, limit):
        left = _left(ours, Ours, what.of(8))
        assert left == _left(limit, SQLiteLimit, what.of(8))
        assert left


def _left(place: Place, side: Callable[[Place, Work], Any], what: Work) -> dict[str, Counter[tuple[object, ...]]]:
    with closing(side(place, what)) as opened:
        assert opened.run(what) > 0
    return place.database.read(_rows)


def _rows(conn: Any) -> dict[str, Counter[tuple[object, ...]]]:
    found: dict[str, Counter[tuple[object, ...]]] = {}
    for table in schema.metadata.sorted_tables:
        rows = conn.exec_driver_sql(f"SELECT * FROM {table.name}").mappings()
        found[table.name] = Counter(
            tuple((name, _masked(value)) for name, value in row.items() if name not in ("id", "position"))
            for row in rows
        )
    return {name: rows for name, rows in found.items() if rows}


def _masked(value: object) -> object:
    if isinstance(value, str):
        return re.sub(r"[0-9a-f]{32,64}", "<hex>", value)
    return "<time>" if isinstance(value, int) and value > LATER_THAN else value


@pytest.mark.usefixtures("few")
def test_the_command_prints_results_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """--json prints an array of results with rates and ratio, and nothing else on stdout."""
    command.main(["--json", "--database", "sqlite", "--rounds", "1", "--seconds", "0", "--loads", "0"])

    results = msgspec.json.decode(capsys.readouterr().out)
    assert [(r["name"], r["database"], r["streams"]) for r in results] == [
        (what.name, "sqlite", what.streams) for what in work.WORKS
    ]
    for result in results:
        assert set(result) == {"name", "database", "streams", "ours_per_s", "limit_per_s", "ratio"}
        assert result["ours_per_s"] > 0
        assert result["ratio"] == pytest.approx(result["ours_per_s"] / result["limit_per_s"], rel=0.05, abs=0.001)


def test_the_freight_run_comes_to_its_end() -> None:
    """Every ping, ask and outcome of the freight run lands in a log, and nothing is left waiting."""
    weeks = freight.run(4, days=2)

    assert weeks.waiting == 0
    assert weeks.entries > 4 * freight.PINGS * 2
    assert set(weeks.outcomes) == {"delivered", "dead_letter"}
    assert "4 loads" in str(weeks)
