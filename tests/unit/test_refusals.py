"""What of the settings no loop would start with."""

from pathlib import Path
from typing import Any

import pytest

from postroad.engine.config import settings, unknown_variables
from postroad.engine.refusals import grace, poll, refusals
from postroad.model.clock import SECOND

CANARY = "c4n4ry"
WRONG: list[tuple[str, Any, str]] = [
    ("poll", float("nan"), "must be 0.001 to 30 seconds, got nan"),
    ("poll", float("inf"), "must be 0.001 to 30 seconds, got inf"),
    ("poll", -1.0, "must be 0.001 to 30 seconds, got -1.0"),
    ("poll", 0.0, "must be 0.001 to 30 seconds, got 0.0"),
    ("poll", 30.01, "must be 0.001 to 30 seconds"),
    ("grace", -1.0, "must be 0 seconds or more, and not for ever, got -1.0"),
    ("grace", float("nan"), "must be 0 seconds or more"),
    ("grace", float("inf"), "must be 0 seconds or more"),
    ("secret_key", CANARY, "at least 16 characters"),
    ("schema", 'a"b', "without quotes"),
    ("database_url", f"mysql://u:{CANARY}@h/d", "must begin with sqlite"),
    ("database_url", f"postgresql://u:{CANARY}@h:port/d", "must be a URL such as"),
    ("database_url", "sqlite://", "must be a SQLite file"),
    ("database_url", f"postgresql://u:{CANARY}@h/d?no_such_option=1", "options that its driver takes"),
    ("dispatch.notify_template", ["sh", "{to}"], "must come after an argument `--`"),
    ("dispatch.notify_template", [], "it must be a program"),
]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings file of the machine is read."""
    monkeypatch.chdir(tmp_path)


def told(**given: Any) -> list[tuple[str, str]]:
    """What is refused of these settings: (setting, sentence)."""
    named = {name.replace("__", "."): value for name, value in given.items()}
    return [(error.about["field"], error.detail) for error in refusals(settings(named, environ={}))]


def test_what_is_well_is_not_refused() -> None:
    """Defaults, bounds, keys of sixteen characters, databases of both kinds."""
    assert told() == []
    assert told(poll=0.001, grace=0.0, secret_key="k" * 16, secret_keys_former=["f" * 16]) == []
    assert told(poll=30.0, grace=3_600.0, database_url="postgres://u:p@h:5432/d", schema="shop") == []
    assert told(database_url="sqlite:///shop.db", dispatch__notify_template=["sh", "--", "{to}"]) == []
    assert told(secret_keys_former=["f"]) == []  # without a key of today no token is made or read


@pytest.mark.parametrize(("name", "value", "said"), WRONG)
def test_what_is_wrong_is_named_with_its_place(name: str, value: Any, said: str) -> None:
    """Each as one sentence with the setting and the place that says it, and without any part of a secret."""
    [(field, sentence)] = told(**{name.replace(".", "__"): value})
    assert field == name
    assert "(command line)" in sentence
    assert said in sentence
    assert CANARY not in sentence


def test_a_former_key_that_is_short() -> None:
    """It is the former one that is named."""
    assert [field for field, _ in told(secret_key="k" * 32, secret_keys_former=["f" * 32, CANARY])] == [
        "secret_keys_former"
    ]


def test_sqlite_has_no_schemas() -> None:
    """A schema beside a SQLite file is refused, beside a Postgres it is one."""
    [(field, sentence)] = told(database_url="sqlite:///shop.db", schema="s")
    assert (field, "SQLite has no schemas" in sentence) == ("schema", True)


def test_all_that_is_wrong_is_told() -> None:
    """One mistake hides no other."""
    assert [field for field, _ in told(poll=-1.0, grace=-1.0, secret_key="short")] == ["secret_key", "grace", "poll"]


def test_what_the_code_says_was_checked_there() -> None:
    """A database of the code's own engine is looked at by itself, however its URL is written."""
    assert list(refusals(settings(code={"database_url": "sqlite+aiosqlite:///x.db"}, environ={}))) == []


def test_lengths_are_microseconds() -> None:
    """As the loops take them."""
    found = settings({"grace": 2.5, "poll": 0.25}, environ={})
    assert (grace(found), poll(found)) == (2.5 * SECOND, SECOND // 4)


def test_variables_that_are_no_settings() -> None:
    """What looks like one of ours is told with the nearest name there is; what is another's, or ours, is not."""
    environ = {
        "POSTROAD_POL": CANARY, "POSTROAD_XYZZY": CANARY, "POSTROAD_BUNDLED_SQLITE": "1", "POSTROAD_POLL": "1",
        "POSTROAD_RETENTION_ACKED": "7d", "POSTROAD_FAILPOINT": "x", "DATABASE_URL": "sqlite:///d.db", "PATH": "",
    }  # fmt: skip
    assert unknown_variables(environ) == [
        "POSTROAD_POL in the environment is no setting: did you mean POSTROAD_POLL?",
        "POSTROAD_XYZZY in the environment is no setting: remove it",
    ]
