"""Kinds without a sender of their own, carried out by the command of the settings."""

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from postroad import Handlers, Kind, Postroad, Receipt, Refused
from postroad.engine.config import BadSetting
from postroad.engine.declarations import Elsewhere, Sender
from tests.engine.conftest import Open

PING: Kind[dict[str, int]] = Kind("ping", dict[str, int], aliases=["pong"])
TEMPLATE = "POSTROAD_DISPATCH_NOTIFY_TEMPLATE"


@pytest.fixture(autouse=True)
def nothing_configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting of the machine reaches a test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(TEMPLATE, raising=False)


def notifier(folder: Path) -> tuple[Path, Path]:
    """A program that writes down its arguments and its stdin, and the file where it does."""
    program, file = folder / "notify", folder / "said"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {file}\ncat >> {file}\necho "noted $2"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program, file


def send(post: Postroad, kind: Any = PING) -> None:
    with post.begin() as tx:
        tx.send(kind, {"n": 1}, to="--seat=3", key="k")


def row(post: Postroad) -> Any:
    found = post.dispatches.get("k")
    assert found is not None
    return found


def test_a_kind_without_a_sender_is_carried_out_by_the_command(
    harness: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command gets the destination as a whole argument and the envelope on stdin, and its word is the receipt."""
    program, file = notifier(tmp_path)
    monkeypatch.setenv(TEMPLATE, json.dumps([str(program), "--", "{to}"]))
    post = Postroad()
    post.kinds(PING)
    h = harness(post, senders="run")
    send(post)
    assert h.drain().delivered == 1
    first, second, envelope = file.read_text().split("\n", 2)
    assert (first, second) == ("--", "--seat=3")
    assert json.loads(envelope)["body"] == {"n": 1}


def test_without_a_command_attempts_fail_until_there_is_one(
    harness: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No notify_template is a failed attempt with that reason, bounded as any; the loop goes on, other kinds too."""
    post = Postroad()
    post.kinds("ping")
    post.sender("mail")(lambda d: "250 ok")
    h = harness(post, senders="run")
    send(post)
    with post.begin() as tx:
        tx.send("mail", {}, key="m")
    drained = h.drain()
    assert (drained.attempted, drained.delivered, drained.retried) == (2, 1, 1)
    assert row(post).status == "pending"
    assert row(post).last_error.endswith("no notify_template configured")
    assert h.advance(100_000).dead_letter == 1
    assert (row(post).status, row(post).attempt) == ("dead_letter", 8)
    assert row(post).reason == "dispatch.dead_letter.max_attempts"


@pytest.mark.parametrize(
    "template", [["notify", "{to}"], [""], [], ["notify", "--", "x{to}"], ["notify", "--", "{payload}"]]
)
def test_a_template_that_is_none_is_refused_at_the_start(
    template: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notify_template that is present but invalid lets no loop begin, whether a kind needs it or not."""
    monkeypatch.setenv(TEMPLATE, json.dumps(template))
    post = Postroad(f"sqlite:///{tmp_path / 'app.db'}")
    with pytest.raises(BadSetting, match=rf"dispatch.notify_template \({TEMPLATE}\)"):
        post.drain()
    with pytest.raises(BadSetting), post.running():
        pass
    post.close()


def test_the_payload_as_an_argument_needs_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`{payload}` in the template is allowed by the setting payload_in_argv only."""
    monkeypatch.setenv(TEMPLATE, '["notify", "--", "{payload}"]')
    monkeypatch.setenv("POSTROAD_DISPATCH_PAYLOAD_IN_ARGV", "true")
    post = Postroad(f"sqlite:///{tmp_path / 'app.db'}")
    assert post.drain().attempted == 0
    post.close()


@pytest.mark.parametrize("order", ["kinds first", "sender first", "included"])
def test_a_sender_goes_before_the_default(harness: Open, order: str) -> None:
    """A kind that has a sender is carried out by it, wherever and whenever it was declared without one."""
    post, handlers = Postroad(), Handlers()
    given = [lambda: post.kinds(PING), lambda: post.sender(PING)(lambda d: Receipt("by hand"))]
    if order == "included":
        given = [given[1], lambda: handlers.kinds(PING), lambda: post.include(handlers), given[0]]
    for declare in given if order != "sender first" else reversed(given):
        declare()
    h = harness(post, senders="run")
    send(post)
    assert h.drain().delivered == 1
    assert {type(post.declared(name)) for name in PING.names} == {Sender}
    with pytest.raises(Refused, match="declared twice"):
        post.sender(PING)(lambda d: None)


def test_kinds_of_other_apps_are_left_alone(harness: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command is for `kinds`; what is sent elsewhere waits for the app that carries it out."""
    monkeypatch.setenv(TEMPLATE, json.dumps([str(notifier(tmp_path)[0])]))
    post = Postroad()
    post.elsewhere(PING)
    h = harness(post, senders="run")
    send(post)
    assert h.drain().attempted == 0
    assert (row(post).status, type(post.declared("ping"))) == ("pending", Elsewhere)


def test_a_harness_captures_what_the_command_would_carry(harness: Open) -> None:
    """In a user's test a kind without a sender is captured as any other."""
    post = Postroad()
    post.kinds(PING)
    h = harness(post)
    send(post)
    h.drain()
    assert [d.body for d in h.sent(PING)] == [{"n": 1}]
