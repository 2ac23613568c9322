"""`postroad cron ls`: what is to run when and how it went, with every loop down, on both databases."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from postroad import GiveUp, Postroad, Turn
from tests.acceptance import shell
from tests.cases.apps import OpenApp, open_app, until
from tests.engine.conftest import place

__all__ = ["open_app", "place"]
pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.filterwarnings("ignore::postroad.store.sqlite_version.SQLiteVersionWarning"),
]


def call(place: dict[str, Any], folder: Path, *arguments: str) -> shell.Done:
    given = {"POSTROAD_DATABASE_URL": place["database"], "POSTROAD_SCHEMA": place.get("schema") or ""}
    environ = {**os.environ, **{name: value for name, value in given.items() if value}}
    return shell.here("cron", *arguments, folder=folder, environ=environ)


@pytest.fixture
def scheduled(open_app: OpenApp) -> Postroad:
    """An app with a job far ahead, and one that fails every second."""
    post = open_app()
    post.cron("far", "0 7 1 1 *", tz="Europe/Berlin", missed="skip")(lambda turn: None)

    @post.cron("bad\x1b[31m", "* * * * * *", tz="UTC", attempts=1)
    def bad(turn: Turn) -> None:
        raise GiveUp("no\x1b[32m")

    with post.running():
        until(lambda: post.read("cron:bad\x1b[31m/runs"), "a run")
    return post


def test_crons_are_listed(scheduled: Postroad, place: dict[str, Any], tmp_path: Path) -> None:
    """What they are, when they come next, how the last run ended: for people escaped, for programs as objects."""
    said = call(place, tmp_path, "ls")
    assert said.returncode == 0, said.stderr
    assert "0 7 1 1 *  Europe/Berlin" in said.stdout
    assert "\x1b" not in said.stdout + said.stderr
    found = json.loads(call(place, tmp_path, "ls", "--json").stdout)
    bad, far = found["data"]
    assert (found["ok"], bad["name"], bad["state"] in ("scheduled", "due", "waiting")) == (True, "bad\x1b[31m", True)
    assert (bad["last_end"], bad["last_error"]) == ("failed", "no\x1b[32m")
    assert bad["previous_at"].endswith("Z")
    assert {name: far[name] for name in ("name", "spec", "tz", "missed", "state", "last_started_at", "unseen")} == {
        "name": "far", "spec": "0 7 1 1 *", "tz": "Europe/Berlin", "missed": "skip", "state": "scheduled",
        "last_started_at": None, "unseen": False,
    }  # fmt: skip
    assert far["next_at"].endswith("-01-01T06:00:00Z")


def test_no_crons_is_said(open_app: OpenApp, place: dict[str, Any], tmp_path: Path) -> None:
    """An empty list says so."""
    open_app().check_schema()
    said = call(place, tmp_path, "ls")
    assert (said.returncode, said.stdout) == (0, "(no crons)\n")
