"""`postroad report`: telling a conversation something from a shell, with every loop down or up, on both databases."""

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from postroad import Kind, Postroad
from tests.acceptance import shell
from tests.cases.apps import OpenApp, open_app
from tests.engine.conftest import place

__all__ = ["open_app", "place"]
pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.filterwarnings("ignore::postroad.store.sqlite_version.SQLiteVersionWarning"),
]
ROOM = "room/chief"
NOTE = Kind("note", dict[str, int])
APP = """
from postroad import Postroad

post = Postroad()

@post.stream_owner
def owner(conn, stream):
    return {"chat/7": "ann"}.get(stream)
"""


class Unreadable(io.BufferedIOBase):
    """stdin as it is after `0>file`."""

    def __init__(self, number: int) -> None:
        self._number = number

    def read(self, size: int | None = -1, /) -> bytes:
        return os.read(self._number, 1 if size is None else size)

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._number


@pytest.fixture
def post(open_app: OpenApp) -> Postroad:
    """An app on the command's database, its loops down."""
    made = open_app()
    made.recorded("room", "chat")
    assert made.database  # the command creates nothing
    return made


def call(place: dict[str, Any], folder: Path, *arguments: str) -> shell.Done:
    given = {"POSTROAD_DATABASE_URL": place["database"], "POSTROAD_SCHEMA": place.get("schema") or ""}
    environ = {**os.environ, **{name: value for name, value in given.items() if value}}
    return shell.here("report", *arguments, folder=folder, environ=environ)


def test_it_is_accepted_with_every_loop_down(post: Postroad, place: dict[str, Any], tmp_path: Path) -> None:
    """It waits no longer than it was told to, says what came of it, and a retry finds what has landed."""
    for arguments in (("disk full",), ("disk full", "--wait", "0.1s"), ("other words",)):
        done = call(place, tmp_path, ROOM, *arguments, "--key", "cron:backup:1")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == "cron:backup:1 is accepted; it has not landed yet\n"
    post.drain()
    done = call(place, tmp_path, ROOM, "disk full", "--key", "cron:backup:1")
    assert done.stdout == "cron:backup:1 is entry 1 of room/chief\n"
    assert [entry.data["data"] for entry in post.read(ROOM)] == ["disk full"]


def test_it_waits_for_its_entry(post: Postroad, place: dict[str, Any], tmp_path: Path) -> None:
    """Where a loop runs it lands meanwhile, and programs are told which entry it is."""
    with post.running():
        done = call(place, tmp_path, ROOM, "disk full", "--key", "k", "--wait", "60s", "--json")
    assert json.loads(done.stdout) == {
        "ok": True, "contract_version": 1, "error": None,
        "data": {"stream": ROOM, "key": "k", "landed": True, "seq": 1},
    }  # fmt: skip


def test_a_text_from_a_pipe(
    post: Postroad, place: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`-` takes what stands on stdin, without the end of its last line; what cannot be stored is refused."""
    for number, (piped, code) in enumerate([(b"one\ntwo \xc3\xa4\n", 0), (b"\xff\n", 2), (b"x" * 300_000, 2)]):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(piped)))
        assert call(place, tmp_path, ROOM, "-", "--key", f"k{number}").returncode == code
    post.drain()
    assert [entry.data["data"] for entry in post.read(ROOM)] == ["one\ntwo ä"]


@pytest.mark.parametrize("command", [("report", ROOM, "-", "--key", "k"), ("ack",)])
@pytest.mark.parametrize("stdin", ["closed", "write-only"])
def test_a_stdin_that_cannot_be_read_is_wrong_use(
    post: Postroad, place: dict[str, Any], tmp_path: Path, command: tuple[str, ...], stdin: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """`<&-` and the like: what reads stdin says in one line what to do, also to programs; nothing is stored."""
    with (tmp_path / "out").open("wb", buffering=0) as out:
        monkeypatch.setattr(sys, "stdin", None if stdin == "closed" else io.TextIOWrapper(Unreadable(out.fileno())))
        for more in ((), ("--json",)):
            given = {"POSTROAD_DATABASE_URL": place["database"], "POSTROAD_SCHEMA": place.get("schema") or ""}
            environ = {**os.environ, **{name: value for name, value in given.items() if value}}
            environ["POSTROAD_SECRET_KEY"] = "a secret of some length"
            done = shell.here(*command, *more, folder=tmp_path, environ=environ)
            said = json.loads(done.stdout)["error"] if more else {"kind": "invalid_input", "message": done.stderr}
            assert (done.returncode, said["kind"]) == (2, "invalid_input")
            assert "pipe it in, or give it as an argument" in said["message"]
            assert "Traceback" not in done.stderr
    post.drain()
    assert post.read(ROOM) == []


def test_a_source_that_is_refused(post: Postroad, place: dict[str, Any], tmp_path: Path) -> None:
    """It is wrong use, nothing is stored, and --json names the source; an app's own word on its streams counts."""
    with post.begin() as tx:
        tx.publish("chat/ann/1", NOTE, {}, key="m1")
    post.drain()
    (tmp_path / "rooms.py").write_text(APP)
    for source, owner, app in (
        ("chat/none", None, None), ("chat/ann/1", "bob", None), ("chat/ann/1", None, "rooms:post"),
        ("chat/7", "bob", "rooms:post"),
    ):  # fmt: skip
        more = [*(["--owner", owner] if owner else []), *(["--app", app] if app else [])]
        done = call(place, tmp_path, ROOM, "x", "--key", "k", "--source", source, *more, "--json")
        assert done.returncode == 2
        error = json.loads(done.stdout)["error"]
        assert (error["kind"], error["detail"]["source"]) == ("invalid_input", source)
    for number, (source, app) in enumerate([("chat/ann/1", None), ("chat/7", "rooms:post")]):
        more = ["--owner", "ann", *(["--app", app] if app else [])]
        assert call(place, tmp_path, ROOM, "x", "--key", f"k{number}", "--source", source, *more).returncode == 0
    post.drain()
    assert [(entry.key, entry.data["source"]) for entry in post.read(ROOM)] == [("k0", "chat/ann/1"), ("k1", "chat/7")]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ((ROOM, "x"), 2),
        (("room", "x", "--key", "k"), 2),
        ((ROOM, "x", "--key", "evt:k"), 2),
        ((ROOM, "x", "--key", "k", "--wait", "soon"), 2),
        ((ROOM, "x", "--key", "k", "--wait", "-1"), 2),
        ((ROOM, "x", "--key", "m1"), 1),
        (("chat/gone", "x", "--key", "k"), 2),
        ((ROOM, "x", "--key", "k", "--app", "nothing:here"), 2),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    post: Postroad, place: dict[str, Any], tmp_path: Path, arguments: tuple[str, ...], code: int
) -> None:
    """Wrong use ends with 2, a key that a message has taken with 1; nothing is stored, and no trace is shown."""
    with post.begin() as tx:
        tx.publish(ROOM, NOTE, {}, key="m1")
        tx.delete_stream("chat/gone")
    done = call(place, tmp_path, *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert "Traceback" not in done.stderr
    post.drain()
    assert [entry.key for entry in post.read(ROOM)] == ["m1"]


def test_a_database_that_is_not_there(tmp_path: Path) -> None:
    """It is not made: a misspelt path would take the report and never land it."""
    done = shell.here(
        "report", ROOM, "x", "--key", "k", "--database", f"sqlite:///{tmp_path}/none.db", folder=tmp_path,
        environ=os.environ,
    )  # fmt: skip
    assert done.returncode == 1
    assert list(tmp_path.iterdir()) == []
