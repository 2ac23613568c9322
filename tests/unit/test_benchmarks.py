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
from benchmarks import expectations, freight, latency, places, rounds, work
from benchmarks.figures import Figure
from benchmarks.limit_sqlite import SQLiteLimit
from benchmarks.ours import Ours
from benchmarks.places import Place
from benchmarks.work import Work
from postroad.store import schema
from postroad.store.sqlite_version import SQLiteVersionWarning

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
        assert left == _left(limit, lambda place, _: SQLiteLimit(place), what.of(8))
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


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    command.main(["--json", "--quick", "--loads", "0", *arguments])
    return msgspec.json.decode(capsys.readouterr().out)


@pytest.mark.usefixtures("few")
def test_the_command_prints_figures_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """--json prints one object with the machine, rates and their ratios, and nothing else on stdout."""
    rates = list(dict.fromkeys(what.name for what in work.WORKS))

    found = _run(capsys, "--database", "sqlite", "--seconds", "0", *(f"--work={name}" for name in rates))

    assert [(each["work"], each["case"]) for each in found["figures"]] == [
        (what.name, "1 stream" if what.streams == 1 else f"{what.streams} streams") for what in work.WORKS
    ]
    for each in found["figures"]:
        assert each["ours"] > 0
        assert each["ratio"] == pytest.approx(each["ours"] / each["against"], rel=0.05, abs=0.001)
    assert found["machine"]["cores"] >= 1
    assert found["freight"] is None


@pytest.mark.parametrize(
    ("ours", "against", "verdict"), [(50, 100, "ok"), (49, 100, "FALLS SHORT")], ids=["met", "short of it"]
)
def test_an_expectation_is_held_against_what_was_measured(ours: float, against: float, verdict: str) -> None:
    """A ratio that only reaches its bound meets it; below it falls short; what was not measured is not judged."""
    drain = Figure(work="drain", database="sqlite", case="64 streams", unit="/s", ours=ours, against=against)

    (judged,) = expectations.judged([drain])

    assert (judged.what, judged.verdict) == ("drain, 64 streams, of the limit", verdict)
    assert (judged.expected, judged.measured) == (">= 0.5x", f"{ours / against:g}x")


def test_both_sides_of_the_latency_write_the_same_rows() -> None:
    """A dispatch that goes from one process to its sender leaves by hand the very rows that ours leaves."""
    with places.places("sqlite") as (ours, limit):
        left = [_carried(place, side) for place, side in ((ours, "ours"), (limit, "sqlite"))]

    assert left[0] == left[1]
    assert set(left[0]) == {"postroad_outbox", "postroad_transitions"}


def _carried(place: Place, side: str) -> dict[str, Counter[tuple[object, ...]]]:
    with closing(latency.SIDES[side](place.url, place.schema)) as both:
        with both.receiving() as arrivals:
            both.send("m1")
            latency.await_all(arrivals, ["m1"])
        return place.database.read(_rows)


def test_the_freight_run_comes_to_its_end() -> None:
    """Every ping, ask and outcome of the freight run lands in a log, and nothing is left waiting."""
    weeks = freight.run(4, days=2)

    assert weeks.waiting == 0
    assert weeks.entries > 4 * freight.PINGS * 2
    assert set(weeks.outcomes) == {"delivered", "dead_letter"}
    assert "4 loads" in str(weeks)
