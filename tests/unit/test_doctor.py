"""What the doctor finds in an app and its settings, before any database is looked at."""

import json
import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from postroad import Argv, Handlers, Kind, Postroad, Retry
from postroad.engine.config import settings
from postroad.model.clock import SECOND
from postroad.surfaces import app_checks, doctor
from postroad.surfaces.checks import Check
from postroad.surfaces.output import WrongUse

MAIL: Kind[Any] = Kind("mail", Any, aliases=["letter"])
CANARY = "c4n4ry"


@pytest.fixture(autouse=True)
def nothing_configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting of the machine reaches a test."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("POSTROAD_") or name == "DATABASE_URL"]:
        monkeypatch.delenv(name)


def nobody(dispatch: Any) -> None: ...


def app(**sender: Any) -> Postroad:
    post = Postroad()
    post.sender(MAIL, **sender)(nobody)
    return post


def found(checks: Iterator[Check], name: str) -> list[Check]:
    return [check for check in checks if check.name == name]


def test_the_lease_is_shown_with_what_it_must_exceed() -> None:
    """A kind is told once, whatever former names it has, with lease, timeout and margin."""
    [lease] = found(app_checks.of_kinds(app(timeout=20, lease=60)), "lease")
    assert (lease.level, lease.found) == ("ok", "mail: lease 1 min 0 s, timeout 20 s + margin 1.5 s")


def test_a_lease_that_does_not_fit_is_an_error() -> None:
    """What declarations refuse anyway is found all the same, since two processes would send one dispatch."""
    post = app()
    for name, sender in list(post._registry.senders.items()):
        post._registry.senders[name] = replace(sender, timeout=60 * SECOND)
    [lease] = found(app_checks.of_kinds(post), "lease")
    assert (lease.level, "make the lease longer" in lease.cure) == ("error", True)


STEADY = Retry(attempts=3, first=10, cap=100, jitter=False)  # 10 + 20 s between attempts of 10 s


@pytest.mark.parametrize(("window", "level"), [(60, "ok"), (59.9, "error"), (3600, "ok"), (1, "error")])
def test_the_horizon_is_held_against_the_window(window: float, level: str) -> None:
    """A destination that forgets a key before the last attempt has ended is an error that shows both figures."""
    [horizon] = found(app_checks.of_kinds(app(retry=STEADY, dedup_window=window)), "horizon")
    assert horizon.level == level
    assert "attempts go on for 1 min 0 s at the longest" in horizon.found
    assert "knows a key for" in horizon.found


@pytest.mark.parametrize(("on_unknown", "cure"), [("resend", "or on_unknown='park'"), ("park", "say dedup_window=")])
def test_an_unknown_window_is_a_note(on_unknown: str, cure: str) -> None:
    """Without a dedup_window nothing can be judged; one that is sent again is told the other way."""
    [horizon] = found(app_checks.of_kinds(app(on_unknown=on_unknown)), "horizon")
    assert (horizon.level, cure in horizon.cure) == ("note", True)
    assert ("park" in horizon.cure) == (on_unknown == "resend")


def test_a_transport_says_its_window_too() -> None:
    """`transport` takes dedup_window as `sender` does."""
    post = Postroad()
    post.transport(MAIL, Argv("true"), dedup_window=1)
    [horizon] = found(app_checks.of_kinds(post), "horizon")
    assert horizon.level == "error"


def template(command: Any) -> dict[str, Any]:
    return dict(settings({"dispatch.notify_template": command}, environ={}))


def test_kinds_without_a_sender_need_a_command() -> None:
    """Kinds that only the setting could carry out are an error without it, and nothing is said where none needs it."""
    handlers, post = Handlers(), Postroad()
    handlers.kinds("ping", MAIL)
    post.include(handlers)
    [check] = app_checks.of_notifier(post, template(None))
    assert (check.level, check.found) == ("error", "mail, ping: no notify_template configured")
    assert not list(app_checks.of_notifier(app(), template(None)))


@pytest.mark.parametrize(
    ("command", "level", "said"),
    [
        (["sh", "--", "{to}"], "ok", "/sh"),
        (["no-such-program"], "error", "'no-such-program' is no program"),
        (["./here"], "error", "'./here' is no program"),
        (["plain"], "error", "'plain' is no program"),
    ],
)
def test_the_command_is_looked_for(
    command: list[str], level: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The notifier's program is on PATH and may be executed; a relative path is no place."""
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:{tmp_path}")
    (tmp_path / "plain").write_text("not executable")
    (tmp_path / "here").write_text("#!/bin/sh\n")
    (tmp_path / "here").chmod(stat.S_IRWXU)
    [check] = app_checks.of_notifier(Postroad(), template(command))
    assert (check.level, said in check.found) == (level, True), check


def test_the_program_of_a_transport_is_looked_for() -> None:
    """An Argv of the code is looked at as the setting's."""
    post = Postroad()
    post.transport(MAIL, Argv("no-such-program"))
    [check] = found(app_checks.of_kinds(post), "program")
    assert (check.level, check.found.startswith("mail: ")) == ("error", True)


@pytest.mark.parametrize(
    ("keys", "level", "said"),
    [
        ((), "ok", "there is none"),
        (("k" * 32,), "ok", "1 of 32 characters or more"),
        (("k" * 31,), "warning", "of 1 keys 1 have less than 32"),
        (("k" * 32, "s" * 16), "warning", "of 2 keys 1 have less than 32"),
    ],
)
def test_short_keys_are_warned_of(keys: tuple[str, ...], level: str, said: str) -> None:
    """A server key, a former one too, of less than 32 characters is a warning; no key is shown."""
    given = {"secret_key": keys[0], "secret_keys_former": list(keys[1:])} if keys else {}
    [check] = app_checks.of_keys(settings(given, environ={}))
    assert (check.level, said in check.found) == (level, True)
    assert "kkk" not in check.line


@pytest.mark.parametrize(
    ("variable", "value", "name", "said"),
    [
        ("POSTROAD_POLL", "nan", "settings", "poll (POSTROAD_POLL) must be 0.001 to 30 seconds, got nan"),
        ("POSTROAD_GRACE", "-1", "settings", "grace (POSTROAD_GRACE) must be 0 seconds or more"),
        ("POSTROAD_SECRET_KEY", CANARY, "secret_key", "at least 16 characters"),
        ("POSTROAD_DISPATCH_NOTIFY_TEMPLATE", '["sh", "{to}"]', "notifier", "must come after an argument `--`"),
        ("POSTROAD_DISPATCH_NOTIFY_TEMPLATE", "[]", "notifier", "it must be a program"),
        ("POSTROAD_SCHEMA", "s", "schema", "SQLite has no schemas"),
        ("POSTROAD_DATABASE_URL", f"mysql://u:{CANARY}@h/d", "database", "must begin with sqlite"),
    ],
)
def test_what_no_loop_starts_with_is_an_error(
    variable: str, value: str, name: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `postroad run` would refuse is told once, under the name of what it is about, and the rest is looked at."""
    monkeypatch.setenv("POSTROAD_DATABASE_URL", "sqlite:///none.db")
    monkeypatch.setenv(variable, value)
    checks = list(doctor.examined(app(), database=None, schema=None))
    told = [check for check in checks if check.level == "error" and "no file" not in check.found]
    assert [(check.name, said in check.found) for check in told] == [(name, True)]
    assert told[0].cure == "no loop starts with it"
    assert found(iter(checks), "lease")
    assert CANARY not in " ".join(check.line for check in checks)


def test_wrong_settings_end_the_examination(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings that cannot be read are one error without a value, and nothing else is looked at."""
    monkeypatch.setenv("POSTROAD_SECRET_KEYS_FORMER", CANARY)
    [check] = doctor.examined(app(), database=None, schema=None)
    assert (check.level, check.name) == ("error", "settings")
    assert "POSTROAD_SECRET_KEYS_FORMER" in check.found
    assert CANARY not in check.line


def test_variables_that_are_no_settings_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt variable would be passed over in silence: it is told, with the nearest name."""
    monkeypatch.setenv("POSTROAD_SECRETKEY", CANARY)
    monkeypatch.setenv("POSTROAD_BUNDLED_SQLITE", "0")
    checks = found(doctor.examined(app(), database="sqlite:///none.db", schema=None), "settings")
    assert [check.level for check in checks] == ["ok", "warning"]
    assert checks[1].line == "POSTROAD_SECRETKEY in the environment is no setting: did you mean POSTROAD_SECRET_KEY?"
    assert CANARY not in " ".join(check.line for check in checks)


def test_a_flag_that_the_code_overrules_is_refused() -> None:
    """What the code says goes first, and a command line that says otherwise is wrong use, not passed over."""
    post = Postroad("sqlite:///mine.db")
    with pytest.raises(WrongUse, match=r"sqlite:///mine\.db, which goes before --database"):
        list(doctor.examined(post, database="sqlite:///other.db", schema=None))
    list(doctor.examined(post, database="sqlite:///mine.db", schema=None))


def test_a_database_that_is_missing_is_not_made(tmp_path: Path) -> None:
    """To look for a SQLite file makes none, whether the app has a URL or an engine."""
    from sqlalchemy import create_engine

    from postroad import sqlite

    engine = sqlite.configure(create_engine(f"sqlite:///{tmp_path / 'none.db'}"))
    for post in (Postroad("sqlite:///none.db"), Postroad(engine)):
        [check] = found(doctor.examined(post, database=None, schema=None), "database")
        assert (check.level, "There is no file" in check.found) == ("error", True)
    engine.dispose()
    assert not os.listdir(tmp_path)


def test_the_answer_to_programs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """`--json` gives every check with its four parts, and whether all is well."""
    (tmp_path / "sick.py").write_text("from postroad import Postroad\npost = Postroad('sqlite:///none.db')\n")
    assert doctor.show("sick:post", None, None, True) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is True
    assert answer["data"]["healthy"] is False
    assert all(list(check) == ["level", "name", "found", "cure"] for check in answer["data"]["checks"])
