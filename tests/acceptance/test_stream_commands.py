"""`postroad stream`: listing, showing and deleting streams with every loop down, on both databases."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from postroad import Kind, Postroad, RetryLater, StreamDeleted, Turn
from postroad.store import audit
from tests.acceptance import shell
from tests.cases.apps import OpenApp, open_app
from tests.engine.conftest import place

__all__ = ["open_app", "place"]
pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.filterwarnings("ignore::postroad.store.sqlite_version.SQLiteVersionWarning"),
]
MESSAGE = Kind("message", dict[str, str])


@pytest.fixture
def chats(open_app: OpenApp) -> Postroad:
    """An app with one conversation that is answered, one whose model is down, and one that nobody has looked at."""
    post = open_app()

    @post.turn("chat")
    def chat(turn: Turn) -> None:
        if turn.subject == "down":
            raise RetryLater("the model is down\x1b[31m", after=600)
        turn.record("reply", {})

    with post.begin() as tx:
        for stream in ("chat/done", "chat/down", "room/new"):
            tx.publish(stream, MESSAGE, {}, key="m1")
    post.drain()
    return post


def call(place: dict[str, Any], folder: Path, *arguments: str) -> shell.Done:
    given = {"POSTROAD_DATABASE_URL": place["database"], "POSTROAD_SCHEMA": place.get("schema") or ""}
    environ = {**os.environ, **{name: value for name, value in given.items() if value}}
    return shell.here("stream", *arguments, folder=folder, environ=environ)


def data(place: dict[str, Any], folder: Path, *arguments: str) -> Any:
    return json.loads(call(place, folder, *arguments, "--json").stdout)["data"]


def test_streams_are_listed(chats: Postroad, place: dict[str, Any], tmp_path: Path) -> None:
    """By name, each with its state and what it waits for, for people escaped, for programs with the promised fields."""
    rows = data(place, tmp_path, "ls")
    assert [(row["stream"], row["state"]) for row in rows] == [
        ("chat/done", "idle"), ("chat/down", "backing_off"), ("room/new", "waiting"),
    ]  # fmt: skip
    assert set(rows[1]) == {
        "stream", "type", "version", "deleted_at", "state", "attempts", "until", "silent_since", "why", "waiting",
        "dead",
    }  # fmt: skip
    assert set(rows[1]["waiting"][0]) == {"position", "key", "kind", "received_at"}
    assert [row["stream"] for row in data(place, tmp_path, "ls", "--state", "waiting")] == ["room/new"]
    assert [row["stream"] for row in data(place, tmp_path, "ls", "--type", "chat", "--after", "chat/done")] == [
        "chat/down"
    ]
    said = call(place, tmp_path, "ls", "--limit", "2")
    assert said.returncode == 0, said.stderr
    assert "backing_off" in said.stdout
    assert "There may be more: --after chat/down" in said.stdout
    assert "\x1b" not in said.stdout
    assert call(place, tmp_path, "ls", "--type", "none").stdout == "(no streams)\n"
    assert data(place, tmp_path, "show", "chat/down")["state"] == "backing_off"


def test_what_was_withdrawn_is_not_listed_as_dead(chats: Postroad, place: dict[str, Any], tmp_path: Path) -> None:
    """A stream whose waiting messages were stopped shows none as dead; what each ended as is among its events."""
    with chats.begin() as tx:
        tx.publish("chat/stopped", MESSAGE, {}, key="m1")
        tx.stop_stream("chat/stopped")
    chats.drain()
    (row,) = [row for row in data(place, tmp_path, "ls") if row["stream"] == "chat/stopped"]
    assert (row["dead"], row["state"]) == (0, "idle")
    (event,) = data(place, tmp_path, "events", "chat/stopped", "--dead")
    assert (event["key"], event["reason"]) == ("m1", "turn.withdrawn")


def test_what_waits_is_shown(chats: Postroad, place: dict[str, Any], tmp_path: Path) -> None:
    """Each event with what it says, page by page, for people escaped; what is dead with its reason and its end."""
    with chats.begin() as tx:
        for n in range(3):
            tx.publish("room/new", MESSAGE, {"text": f"\x1b[31m{n}"}, key=f"n{n}")
        tx.publish("chat/down", MESSAGE, {}, key="m2")
    rows = data(place, tmp_path, "events", "room/new", "--limit", "2")
    assert [(row["key"], row["data"]) for row in rows] == [("m1", {}), ("n0", {"text": "\x1b[31m0"})]
    assert set(rows[0]) == {"cursor", "key", "kind", "version", "data", "received_at", "reason", "ended_at"}
    said = call(place, tmp_path, "events", "room/new", "--limit", "1", "--after", str(rows[1]["cursor"]))
    assert said.returncode == 0, said.stderr
    assert "n1 (message)" in said.stdout
    assert '{"text":"\\u001b[31m1"}' in said.stdout
    assert "There may be more: --after" in said.stdout
    assert call(place, tmp_path, "events", "chat/done").stdout == "(no events)\n"
    assert call(place, tmp_path, "events", "chat/dnoe").returncode == 1
    chats.streams.stop("chat/down", actor="ann")
    chats.drain()
    (row,) = data(place, tmp_path, "events", "chat/down", "--dead")
    assert (row["key"], row["reason"]) == ("m2", "turn.withdrawn")
    assert "ended 20" in call(place, tmp_path, "events", "chat/down", "--dead").stdout


def test_a_stream_is_deleted(chats: Postroad, place: dict[str, Any], tmp_path: Path) -> None:
    """With actor and reason in the audit; a second time it is the same success; publishing to it is refused."""
    done = call(place, tmp_path, "delete", "chat/done", "--actor", "ann", "--reason", "asked to")
    assert (done.returncode, done.stdout) == (0, "chat/done was deleted\n"), done.stderr
    assert data(place, tmp_path, "delete", "chat/done") == {"stream": "chat/done", "deleted": True, "done": False}
    assert data(place, tmp_path, "show", "chat/done")["deleted_at"] is not None
    (row,) = chats.database.read(audit.list_)
    assert (row.action, row.subject, row.actor, row.reason) == ("stream.delete", "chat/done", "ann", "asked to")
    with pytest.raises(StreamDeleted), chats.begin() as tx:
        tx.publish("chat/done", MESSAGE, {}, key="m2")
    assert [row["stream"] for row in data(place, tmp_path, "ls", "--type", "chat")] == ["chat/down"]


def test_a_name_that_is_not_there(chats: Postroad, place: dict[str, Any], tmp_path: Path) -> None:
    """A misspelt name is exit code 1 and not taken for ever; what is no stream's name, or a state, is 2."""
    missing = call(place, tmp_path, "delete", "chat/dnoe", "--json")
    assert missing.returncode == 1
    error = json.loads(missing.stdout)["error"]
    assert (error["kind"], error["detail"]) == ("not_found", {"stream": "chat/dnoe"})
    with chats.begin() as tx:
        tx.publish("chat/dnoe", MESSAGE, {}, key="m1")
    for wrong in (("delete", "chat"), ("delete",), ("ls", "--state", "asleep")):
        assert call(place, tmp_path, *wrong, "--json").returncode == 2
    assert chats.database.read(audit.list_) == []
