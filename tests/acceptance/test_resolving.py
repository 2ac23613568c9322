"""`postroad stream stop` and `postroad stream resolve`: a person's word with every loop down, on both databases."""

from pathlib import Path
from typing import Any

import pytest

from postroad import Kind, Postroad, RetryLater, Turn
from postroad.store import audit
from tests.acceptance.test_stream_commands import call, data
from tests.cases.apps import OpenApp, open_app
from tests.engine.conftest import place

__all__ = ["open_app", "place"]
pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.filterwarnings("ignore::postroad.store.sqlite_version.SQLiteVersionWarning"),
]
MESSAGE = Kind("message", dict[str, str])
REPLY = Kind("reply", dict[str, str])


class Desk:
    """A conversation whose turn has mailed somebody and is parked; `mails` are those that went out."""

    def __init__(self, post: Postroad) -> None:
        self.post = post
        self.mails: list[str] = []
        fails = [True]

        @post.tool(effect="unsafe")
        async def mail(to: str) -> str:
            self.mails.append(to)
            return "sent"

        @post.turn("chat", when_interrupted="park")
        async def chat(turn: Turn) -> None:
            said = await turn.call(mail, "bob")
            if fails:
                fails.pop()
                raise RetryLater("the model is down")
            turn.record(REPLY, {"text": said})

        with post.begin() as tx:
            tx.publish("chat/1", MESSAGE, {}, key="m1")
        post.drain()

    def kinds(self) -> list[str]:
        """What stands in the log once loops have run."""
        self.post.drain()
        return [entry.kind for entry in self.post.read("chat/1")]


@pytest.fixture
def desk(open_app: OpenApp) -> Desk:
    """A parked conversation."""
    return Desk(open_app())


WHO = ("--actor", "ops", "--reason", "looked it up")


def test_a_parked_stream_says_so(desk: Desk, place: dict[str, Any], tmp_path: Path) -> None:
    """`stream ls --state parked` finds it, with a sentence on what it waits for."""
    (row,) = data(place, tmp_path, "ls", "--state", "parked")
    assert row["stream"] == "chat/1"
    assert "parked" in row["why"]


@pytest.mark.parametrize(
    ("how", "kinds", "mails"),
    [
        ("retry", ["message", "reply"], 2),
        ("continue", ["message", "reply"], 1),
        ("discard", ["message", "postroad.interrupted"], 1),
    ],
)
def test_a_person_lets_it_go(
    desk: Desk, place: dict[str, Any], tmp_path: Path, how: str, kinds: list[str], mails: int
) -> None:
    """Each way does what it says, is audited with who and why, and says how much the turn had called."""
    assert data(place, tmp_path, "resolve", "chat/1", f"--{how}", *WHO) == {"stream": "chat/1", "how": how, "calls": 1}
    assert desk.kinds() == kinds
    assert len(desk.mails) == mails
    (row,) = desk.post.database.read(audit.list_)
    assert (row.action, row.actor, row.reason) == (f"stream.resolve.{how}", "ops", "looked it up")


def test_what_cannot_be_resolved_is_left(desk: Desk, place: dict[str, Any], tmp_path: Path) -> None:
    """An unknown stream is exit 1, one that is not parked a conflict, and no or two ways are wrong use."""
    assert call(place, tmp_path, "resolve", "chat/9", "--retry", *WHO).returncode == 1
    assert call(place, tmp_path, "resolve", "chat/1", *WHO).returncode == 2
    assert call(place, tmp_path, "resolve", "chat/1", "--retry", "--discard", *WHO).returncode == 2
    assert call(place, tmp_path, "resolve", "chat/1", "--discard", *WHO).returncode == 0
    desk.post.drain()
    again = call(place, tmp_path, "resolve", "chat/1", "--discard", *WHO)
    assert again.returncode == 1
    assert "not parked" in again.stderr


def test_a_deleted_stream_is_not_resolved(desk: Desk, place: dict[str, Any], tmp_path: Path) -> None:
    """Nobody is told that a turn goes on whose stream was deleted: it never does."""
    desk.post.streams.delete("chat/1", actor="ops")
    refused = call(place, tmp_path, "resolve", "chat/1", "--retry", *WHO)
    assert refused.returncode == 1
    assert "was deleted" in refused.stderr
    assert desk.kinds() == []
    assert [row.action for row in desk.post.database.read(audit.list_)] == ["stream.delete"]


def test_a_stream_is_stopped(desk: Desk, place: dict[str, Any], tmp_path: Path) -> None:
    """`stream stop` ends the parked turn with an entry on what it did, and withdraws what waits."""
    with desk.post.begin() as tx:
        tx.publish("chat/1", MESSAGE, {}, key="m2")
    assert data(place, tmp_path, "stop", "chat/1", *WHO) == {"stream": "chat/1", "stopped": True}
    assert desk.kinds() == ["message", "postroad.interrupted", "postroad.stop", "postroad.noop"]
    assert desk.mails == ["bob"]
    shown = data(place, tmp_path, "show", "chat/1")
    assert [(event["event_id"], event["reason"]) for event in shown["dead"]] == [("m2", "turn.withdrawn")]
    assert call(place, tmp_path, "stop", "chat/9", *WHO).returncode == 1


def test_tool_calls_are_shown(desk: Desk, place: dict[str, Any], tmp_path: Path) -> None:
    """`stream show` lists the calls of a stream's turns, with what they got and gave."""
    (row,) = data(place, tmp_path, "show", "chat/1")["operations"]
    assert (row["tool"], row["effect"], row["status"]) == ("mail", "unsafe", "finished")
    assert (row["arguments"], row["result"]) == ({"to": "bob"}, "sent")
    shown = call(place, tmp_path, "show", "chat/1").stdout
    assert "tool calls" in shown
    assert '{"to":"bob"}' in shown
