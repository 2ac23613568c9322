"""Programs that hang, flood, break or leave children behind, and text that looks like options: through the engine."""

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from postroad import Argv, DispatchRow, Kind, Postroad, Retry
from postroad.store.statements import Statement
from postroad.transports.argv import UNREAD
from tests.cases.apps import OpenApp, until
from tests.engine.conftest import Open
from tests.transports.test_argv import ECHO, command_lines, python, wait_until_gone

NOTE: Kind[Any] = Kind("note", Any)
ONCE = Retry(attempts=1)
RECEIPT = Statement("SELECT receipt FROM {p}outbox WHERE kind = 'note'")
LARGE = "y" * 250_000  # several times what a pipe takes


def send(post: Postroad, *keys: str, body: Any = None, to: str = "ann", ack: bool = False) -> None:
    with post.begin() as tx:
        for key in keys:
            tx.send(NOTE, body, to=to, key=key, ack=ack)


def row_of(post: Postroad, key: str = "k") -> DispatchRow:
    row = post.dispatches.get(key)
    assert row is not None
    return row


def receipt_of(post: Postroad) -> Any:
    """What is kept of a program's word."""
    return json.loads(post.database.read(RECEIPT).scalar_one())


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A program that fails as soon as it runs."""
    program = tmp_path / "broken"
    program.write_text("#!/bin/sh\necho 'unknown profile' >&2\nexit 1\n")
    program.chmod(0o755)
    return program


@pytest.mark.parametrize("what", ["missing", "fails at once"])
def test_a_program_that_cannot_begin_counts_its_attempts(harness: Open, broken: Path, what: str) -> None:
    """A failed start is an attempt like any other: it backs off, and after the last one it is dead and says why."""
    program, said = ("/no/such/program", "no such program") if what == "missing" else (str(broken), "unknown profile")
    post = Postroad()
    post.transport(NOTE, Argv(program), retry=Retry(attempts=4, first=60, jitter=False))
    h = harness(post, senders="run")
    send(post, "k")
    assert h.drain().attempted == 1
    assert h.drain().attempted == 0  # not before its delay is over
    assert h.advance(3_600).attempted == 3
    row = row_of(post)
    assert (row.status, row.attempt, row.reason) == ("dead_letter", 4, "dispatch.dead_letter.max_attempts")
    assert said in str(row.last_error)


def test_a_program_that_stays_ends_within_its_time(open_app: OpenApp, tmp_path: Path) -> None:
    """The time is over: the whole group is killed within the lease, and the attempt says so and is settled once."""
    pid = tmp_path / "pid"
    post = open_app()
    post.transport(NOTE, Argv("sh", "-c", f"sleep 300 & echo $$ $! > {pid}; wait"), timeout=2, retry=ONCE)
    send(post, "k")
    begun = time.monotonic()
    drained = post.drain()
    assert time.monotonic() - begun < 2 + 5
    assert (drained.dead_letter, drained.stale) == (1, 0)
    assert "timeout" in str(row_of(post).last_error)
    for number in pid.read_text().split():
        wait_until_gone(int(number))


def test_a_program_that_stays_does_not_hold_up_a_harness(harness: Open) -> None:
    """In a test with a clock of its own an attempt ends in real time, though nobody else would end it."""
    post = Postroad()
    post.transport(NOTE, Argv("sleep", "300"), timeout=1, retry=ONCE)
    h = harness(post, senders="run")
    send(post, "k")
    assert h.drain().dead_letter == 1
    assert str(row_of(post).last_error).startswith("timeout: sleep was not done after")


@pytest.mark.parametrize("streams", ["", "< /dev/null > /dev/null 2>&1"], ids=["our pipes", "pipes of its own"])
def test_what_a_program_leaves_behind_holds_nothing_up(open_app: OpenApp, tmp_path: Path, streams: str) -> None:
    """A program that ends well is delivered at once, whoever holds its pipes; its children are killed."""
    pid = tmp_path / "pid"
    post = open_app()
    post.transport(NOTE, Argv("sh", "-c", f"sleep 300 {streams} & echo $! > {pid}"), timeout=20, retry=ONCE)
    send(post, "k")
    begun = time.monotonic()
    assert post.drain().delivered == 1
    assert time.monotonic() - begun < 10
    wait_until_gone(int(pid.read_text()))


def test_a_large_envelope_and_a_large_output_do_not_wait_for_each_other(open_app: OpenApp, tmp_path: Path) -> None:
    """A program that writes a megabyte before it reads gets every byte."""
    read = tmp_path / "read"
    code = (
        "import sys, pathlib\nsys.stdout.write('x' * 1_000_000); sys.stdout.flush()\n"
        f"pathlib.Path({str(read)!r}).write_bytes(sys.stdin.buffer.read())"
    )
    post = open_app()
    post.transport(NOTE, python(code), retry=ONCE)
    send(post, "k", body=LARGE)
    assert post.drain().delivered == 1
    assert json.loads(read.read_bytes())["body"] == LARGE


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("pass", "delivered"),
        ("import sys; sys.exit(1)", "dead_letter"),
        ("import os, time; os.close(0); time.sleep(.1)", "delivered"),
    ],
)
def test_the_exit_code_decides_whatever_was_read(
    open_app: OpenApp, caplog: pytest.LogCaptureFixture, code: str, status: str
) -> None:
    """A program may leave its stdin alone: a note says so, and nothing is reported from the background."""
    post = open_app()
    post.transport(NOTE, python(code), retry=ONCE)
    send(post, "k", body=LARGE)
    post.drain()
    row = row_of(post)
    assert row.status == status
    said = row.last_error if status == "dead_letter" else receipt_of(post)["data"]["note"]
    assert UNREAD in str(said)
    assert not [record for record in caplog.records if record.name == "asyncio"]


@pytest.mark.parametrize("to", ["--help", "-rf", "--", "- first item", "@file", "a\nb", "$(id)"])
def test_text_that_looks_like_an_option_is_data(open_app: OpenApp, to: str) -> None:
    """Whatever a destination looks like, the program gets it unchanged, behind the `--` that a template must have."""
    post = open_app()
    post.transport(NOTE, python(ECHO, "--", "{to}"), retry=ONCE)
    send(post, "k", to=to, body="- first item")
    assert post.drain().delivered == 1
    assert json.loads(receipt_of(post)["reference"]) == ["--", to]


WAITING = """
import pathlib, sys, time
pathlib.Path({read!r}).write_bytes(sys.stdin.buffer.read())
pathlib.Path({ready!r}).touch()
while not pathlib.Path({go!r}).exists():
    time.sleep(.01)
"""


def test_payload_and_token_are_in_no_command_line(
    place: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """While a program runs, what it was given on stdin is in no process list, and in no log."""
    caplog.set_level(logging.DEBUG)
    read, ready, go = (tmp_path / name for name in ("read", "ready", "go"))
    post = Postroad(place["database"], schema=place.get("schema"), migrate=True, secret_key="a secret of the server's")
    post.transport(NOTE, python(WAITING.format(read=str(read), ready=str(ready), go=str(go)), "--", "{to}"))
    send(post, "k", body="canary-payload", ack=True)
    with post.running():
        until(ready.exists, "the program has read")
        envelope = json.loads(read.read_bytes())
        shown = command_lines()
        go.touch()
        until(lambda: row_of(post).reason == "dispatch.delivered.transport_ok", "it is sent")
    post.close()
    assert envelope["body"] == "canary-payload"
    assert b"ann" in shown  # the destination is an argument, because the template says so
    for canary in ("canary-payload", envelope["ack_token"]):
        assert canary.encode() not in shown
        assert canary not in caplog.text


ODD = r"import os, sys; os.write({stream}, b'\xff\xfe\xb2\x00 cause \xe2\x82'); sys.exit({code})"


def test_output_that_is_no_text_hides_nothing(open_app: OpenApp) -> None:
    """Bytes that are no text are replaced: the failure keeps its exit code and cause, and the row its next attempt."""
    post = open_app()
    post.transport(NOTE, python(ODD.format(stream=2, code=3)), retry=Retry(attempts=2, first=60, jitter=False))
    post.transport("well", python(ODD.format(stream=1, code=0)))
    send(post, "k")
    with post.begin() as tx:
        tx.send("well", {})
    drained = post.drain()
    assert (drained.retried, drained.delivered) == (1, 1)
    row = row_of(post)
    assert (row.status, row.last_error) == ("pending", "\ufffd\ufffd\ufffd\ufffd cause \ufffd (exit 3)")


def test_a_cut_inside_a_character_hides_nothing(open_app: OpenApp) -> None:
    """The bound on what is kept may fall inside a character: the error is text, bounded, and ends with the cause."""
    code = r"import sys; sys.stderr.buffer.write(b'a' + b'\xe2\x82\xac' * 100_000 + b' cause'); sys.exit(3)"
    post = open_app()
    post.transport(NOTE, python(code), retry=ONCE)
    send(post, "k")
    assert post.drain().dead_letter == 1
    said = str(row_of(post).last_error)
    assert said.endswith("\u20ac cause (exit 3)")
    assert len(said) <= 2_000
