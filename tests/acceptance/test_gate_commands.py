"""`postroad gate`: what is down and opening it by hand, with every loop down, on both databases."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from postroad import Dispatch, Kind, Postroad, Unreachable
from postroad.store import audit
from tests.acceptance import shell
from tests.cases.apps import OpenApp, open_app
from tests.engine.conftest import place

__all__ = ["open_app", "place"]
pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.filterwarnings("ignore::postroad.store.sqlite_version.SQLiteVersionWarning"),
]
HOOK = Kind("hook", dict[str, str])


@pytest.fixture
def down(open_app: OpenApp) -> Postroad:
    """An app that has found one host down."""
    post = open_app()

    @post.sender(HOOK)
    def hook(d: Dispatch[dict[str, str]]) -> None:
        raise Unreachable("refused\x1b[31m")

    with post.begin() as tx:
        tx.send(HOOK, {}, to="https://API.example/x?token=canary", key="k")
    post.drain()
    return post


def call(place: dict[str, Any], folder: Path, *arguments: str) -> shell.Done:
    given = {"POSTROAD_DATABASE_URL": place["database"], "POSTROAD_SCHEMA": place.get("schema") or ""}
    environ = {**os.environ, **{name: value for name, value in given.items() if value}}
    return shell.here("gate", *arguments, folder=folder, environ=environ)


def test_what_is_down_is_listed(down: Postroad, place: dict[str, Any], tmp_path: Path) -> None:
    """The host, since when, when it is tried next and why: for people escaped, for programs as one object."""
    said = call(place, tmp_path, "ls")
    assert said.returncode == 0, said.stderr
    assert "api.example" in said.stdout
    assert "\x1b" not in said.stdout + said.stderr
    assert "canary" not in said.stdout + said.stderr
    answer = json.loads(call(place, tmp_path, "ls", "--json").stdout)
    (gate,) = answer["data"]
    assert (gate["kind"], gate["host"], gate["failures"], gate["probing"]) == ("hook", "api.example", 1, False)
    assert gate["closed_at"] < gate["until"]


def test_a_person_opens_it(down: Postroad, place: dict[str, Any], tmp_path: Path) -> None:
    """Once, audited, by the host's name in any case; then it is not closed any more, and that is exit code 1."""
    opened = call(place, tmp_path, "open", "hook", "Api.Example", "--actor", "ann", "--reason", "they are back")
    assert (opened.returncode, opened.stdout) == (0, "The gate of host api.example of kind hook is open.\n")
    assert call(place, tmp_path, "ls").stdout == "(every gate is open)\n"
    again = call(place, tmp_path, "open", "hook", "api.example", "--json")
    assert again.returncode == 1
    assert json.loads(again.stdout)["error"]["kind"] == "not_found"
    (row,) = down.database.read(audit.list_)
    assert (row.action, row.subject, row.actor, row.reason) == ("gate.open", "hook api.example", "ann", "they are back")


def test_wrong_use_is_told(down: Postroad, place: dict[str, Any], tmp_path: Path) -> None:
    """Without a kind it is exit code 2, and nothing is opened."""
    assert call(place, tmp_path, "open").returncode == 2
    assert len(json.loads(call(place, tmp_path, "ls", "--json").stdout)["data"]) == 1
