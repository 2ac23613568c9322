"""A process that is told to end does so in time, whatever holds it up, and loses nothing by it."""

import signal
import socket
import time
from collections.abc import Iterator

import pytest

from postroad import Postroad
from tests.cases.apps import OpenApp, Processes, idle, until

pytestmark = pytest.mark.acceptance
GRACE = "0.2"
HARD_END = 4.2  # the grace and four seconds


def send(post: Postroad, *keys: str) -> None:
    post.elsewhere("mail")
    with post.begin() as tx:
        for key in keys:
            tx.send("mail", {}, key=key)


def ended_within(process: "object", seconds: float) -> int:
    """The exit code of a process that was just told to end, within these seconds and what a busy machine adds."""
    began = time.monotonic()
    code: int = process.wait(60)  # type: ignore[attr-defined]
    assert time.monotonic() - began < seconds + 5
    return code


def test_a_handler_that_swallows_cancellation_keeps_no_process_alive(processes: Processes, open_app: OpenApp) -> None:
    """It is left behind when the grace is over: the process gives its row back and ends with 0."""
    processes.write("""
@post.sender("mail", timeout=60)
async def mail(d):
    note(key=d.key)
    while True:
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            pass
""")
    post = open_app()
    send(post, "k")
    process = processes.run("--grace", GRACE)
    until(processes.journal)
    process.terminate()
    assert ended_within(process, HARD_END) == 0, processes.said()
    row = post.dispatches.get("k")
    assert row is not None
    assert (row.status, row.attempt) == ("pending", 1)


def test_what_is_left_behind_is_said_in_one_line(processes: Processes, open_app: OpenApp) -> None:
    """Of a send, a turn, a thread and a task of the program's own that end for nobody it says so, and nothing else."""
    processes.write("""
async def deaf():
    while True:
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            pass

tasks = []

@post.sender("mail", timeout=60)
async def mail(d):
    tasks.append(asyncio.create_task(deaf()))
    note(key=d.key)
    await deaf()

@post.sender("sms", timeout=60)
def sms(d):
    note(key=d.key)
    time.sleep(100)

@post.turn("chat")
async def chat(turn):
    note(key="chat")
    await deaf()
""")
    post = open_app()
    post.elsewhere("sms")
    send(post, "k")
    with post.begin() as tx:
        tx.send("sms", {}, key="s")
        tx.publish("chat/1", "note", {}, key="n")
    process = processes.run("--grace", GRACE)
    until(lambda: len(processes.journal()) == 3)
    process.terminate()
    assert ended_within(process, HARD_END) == 0, processes.said()
    said = [line.partition("postroad ")[2] for line in processes.said().splitlines() if "left behind" in line]
    assert said == [
        "WARNING: left behind, since it goes on although it was ended: app.chat, app.mail, app.sms",
        "WARNING: left behind, since they ignore their cancellation: tasks of deaf",
    ]
    assert "asyncio" not in processes.said()
    assert "Traceback" not in processes.said()


@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
def test_a_handler_that_blocks_the_loop_for_ever_is_ended_hard(processes: Processes, open_app: OpenApp) -> None:
    """One signal is enough: shortly after the grace the process is gone as after a crash, its row under its lease."""
    processes.write("""
@post.sender("mail", timeout=60)
async def mail(d):
    note(key=d.key)
    while True:
        time.sleep(0.01)
""")
    post = open_app()
    send(post, "k")
    process = processes.run("--grace", GRACE)
    until(processes.journal)
    process.terminate()
    assert ended_within(process, HARD_END) == 130
    assert "its leases will free what it held" in processes.said()
    row = post.dispatches.get("k")
    assert row is not None
    assert row.status == "delivering"


@pytest.fixture
def silent_server() -> Iterator[str]:
    """The URL of a server that accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"postgresql://postgres@127.0.0.1:{server.getsockname()[1]}/postgres"


@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
def test_a_database_that_never_answers_keeps_no_start_alive(processes: Processes, silent_server: str) -> None:
    """A process that hangs while it starts ends hard after one signal, too."""
    processes.write("note(imported=True)")
    process = processes.run("--grace", GRACE, database=silent_server)
    until(processes.journal)
    process.terminate()
    assert ended_within(process, HARD_END) == 130, processes.said()


def test_a_restart_after_a_clean_end_repeats_nothing(processes: Processes, open_app: OpenApp) -> None:
    """What was under way at SIGTERM is settled before the end, so that the next process sends only the rest."""
    processes.write("""
@post.sender("mail", timeout=10, concurrency=2)
def mail(d):
    note(key=d.key, attempt=d.attempt)
    time.sleep(0.3)
""")
    post = open_app()
    send(post, *(f"k{n}" for n in range(8)))
    first = processes.run("--grace", "30")
    until(lambda: len(processes.journal()) >= 3)
    first.send_signal(signal.SIGTERM)
    assert first.wait(60) == 0, processes.said()
    second = processes.run()
    until(lambda: idle(post))
    second.terminate()
    assert second.wait(60) == 0, processes.said(1)
    assert sorted((line["key"], line["attempt"]) for line in processes.journal()) == [(f"k{n}", 1) for n in range(8)]
