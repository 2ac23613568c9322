"""`postroad delegation`: seeing what streams have delegated and ending one of it, with every loop down."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from postroad import TASK, Delegated, Kind, Postroad, Turn
from tests.acceptance import shell
from tests.cases.apps import OpenApp, open_app
from tests.engine.conftest import place

__all__ = ["open_app", "place"]
pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.filterwarnings("ignore::postroad.store.sqlite_version.SQLiteVersionWarning"),
]
MESSAGE = Kind("message", dict[str, str])
FIELDS = {
    "parent", "key", "stream", "status", "depth", "created_at", "deadline", "ended_at", "error", "note",
}  # fmt: skip


@pytest.fixture
def post(open_app: OpenApp) -> Postroad:
    """A chief that has delegated two things, one of which is done."""
    post = open_app()

    @post.turn("chief")
    def chief(turn: Turn) -> None:
        for event in turn.events:
            if MESSAGE.of(event):
                turn.delegate("scout/ford", {}, key="ford")
                turn.delegate("scout/bog", {}, key="bog\x1b[31m")

    @post.turn("scout")
    def scout(turn: Turn) -> None:
        if turn.subject == "ford" and TASK.of(turn.events[0]):
            turn.finish("clear")

    with post.begin() as tx:
        tx.publish("chief/1", MESSAGE, {"text": "go"}, key="m1")
    post.drain()
    return post


def call(place: dict[str, Any], folder: Path, *arguments: str) -> shell.Done:
    given = {"POSTROAD_DATABASE_URL": place["database"], "POSTROAD_SCHEMA": place.get("schema") or ""}
    environ = {**os.environ, **{name: value for name, value in given.items() if value}}
    return shell.here("delegation", *arguments, folder=folder, environ=environ)


def answer(place: dict[str, Any], folder: Path, *arguments: str) -> Any:
    return json.loads(call(place, folder, *arguments, "--json").stdout)


def test_they_are_listed(post: Postroad, place: dict[str, Any], tmp_path: Path) -> None:
    """Each with where it is done and how it stands, for people escaped, for programs with the promised fields."""
    rows = answer(place, tmp_path, "ls")["data"]
    assert [(row["key"], row["stream"], row["status"]) for row in rows] == [
        ("bog\x1b[31m", "scout/bog", "open"), ("ford", "scout/ford", "done"),
    ]  # fmt: skip
    assert set(rows[0]) == FIELDS
    table = call(place, tmp_path, "ls").stdout
    assert "bog\\x1b[31m" in table
    assert "\x1b" not in table
    ford = ["ford"]
    assert [row["key"] for row in answer(place, tmp_path, "ls", "--status", "done")["data"]] == ford
    assert [row["key"] for row in answer(place, tmp_path, "ls", "--to", "scout/ford")["data"]] == ford
    assert [row["key"] for row in answer(place, tmp_path, "ls", "--after", "chief/1", "c")["data"]] == ford
    assert "There may be more" in call(place, tmp_path, "ls", "--limit", "1").stdout
    assert call(place, tmp_path, "ls", "--stream", "chief/2").stdout == "(no delegations)\n"
    assert call(place, tmp_path, "ls", "--stream", "chief").returncode == 2


def test_one_is_cancelled(post: Postroad, place: dict[str, Any], tmp_path: Path) -> None:
    """It ends once, with a report that says why; once more it is left as it is, and what there is not is not found."""
    open_one, who = "bog\x1b[31m", ("--actor", "ann", "--reason", "too wet")
    done = answer(place, tmp_path, "cancel", "chief/1", open_one, *who)
    assert done["data"] == {"stream": "chief/1", "key": open_one, "status": "cancelled"}
    for key, status in ((open_one, "cancelled"), ("ford", "done")):
        again = answer(place, tmp_path, "cancel", "chief/1", key, *who)["error"]
        assert (again["kind"], again["detail"]) == (
            "conflict",
            {"stream": "chief/1", "key": key, "status": status, "refused": {f"it has ended before: {status}": 1}},
        )
    missing = answer(place, tmp_path, "cancel", "chief/1", "hill", *who)["error"]
    assert (missing["kind"], missing["detail"]) == ("not_found", {"stream": "chief/1", "key": "hill"})
    said = call(place, tmp_path, "cancel", "chief/1", "ford", *who)
    assert (said.returncode, said.stdout) == (1, "")
    assert "it has ended before: done" in said.stderr
    post.drain()
    ends = [end for entry in post.read("chief/1") if (end := Delegated.of(entry))]
    assert [(end.key, end.status, end.error) for end in ends] == [
        ("ford", "done", None), (open_one, "cancelled", "it was cancelled: too wet"),
    ]  # fmt: skip


def test_people_are_told(post: Postroad, place: dict[str, Any], tmp_path: Path) -> None:
    """Without `--json` it is one line."""
    with post.begin() as tx:
        tx.publish("chief/2", MESSAGE, {"text": "go"}, key="m1")
    post.drain(only=["turns"])
    done = call(place, tmp_path, "cancel", "chief/1", "bog\x1b[31m")
    assert (done.returncode, done.stdout) == (0, "'bog\\x1b[31m' of chief/1 is cancelled\n")
