"""A whole run of the benchmarks, which starts processes of its own."""

import warnings

import msgspec
import pytest

from benchmarks import __main__ as command
from benchmarks import expectations, rounds, steady, suite, work
from postroad.store.sqlite_version import SQLiteVersionWarning


@pytest.mark.acceptance
@pytest.mark.timeout(300)  # eight processes one after the other
@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_every_expectation_is_judged(
    database: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A whole run, however short, says of each expectation whether it is met."""
    monkeypatch.setattr(rounds, "FEW", 8)
    monkeypatch.setattr(work, "BULK", 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SQLiteVersionWarning)  # whatever SQLite this process has may be measured
        command.main(["--json", "--quick", "--loads", "0", "--database", database])
    found = msgspec.json.decode(capsys.readouterr().out)

    expected = [each.what for each in expectations.EXPECTATIONS if each.database == database]
    assert [each["what"] for each in found["expectations"]] == expected
    assert {each["verdict"] for each in found["expectations"]} <= {"ok", "FALLS SHORT"}
    measured = set(suite.NAMES) if database == "postgres" else set(suite.NAMES) - {steady.NAME}
    assert {each["work"] for each in found["figures"]} == measured
