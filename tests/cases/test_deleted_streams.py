"""Conversations that are deleted while real processes are at them: the result is discarded, nothing comes back."""

from pathlib import Path

import pytest

from postroad import Kind, Postroad, StreamDeleted
from postroad.store import moments, timers
from tests.cases.apps import OpenApp, Processes, until

pytestmark = pytest.mark.acceptance
MESSAGE = Kind("message", dict[str, str])
APP = """
from pathlib import Path
from postroad import OUTCOME, Turn

@post.sender("mail")
def mail(d):
    note(sent=d.key)

post.filter("chat", OUTCOME)(lambda event: "sent")

@post.turn("chat", lease=LEASE, timeout=TIMEOUT, attempts=3)
async def chat(turn: Turn):
    note(begun=turn.stream, attempt=turn.attempt)
    while not Path("go").exists():  # a model that takes its time
        await asyncio.sleep(0.01)
    turn.record("reply", {})
    turn.send("mail", {}, key=f"{turn.stream}/{turn.events[0].key}")
    turn.set_timer(f"after {turn.events[0].key}", after=3600)
    turn.write(lambda conn: note(wrote=turn.stream))
"""


def app(lease: float = 30, timeout: float = 60) -> str:
    return APP.replace("LEASE", str(lease)).replace("TIMEOUT", str(timeout))


def say(post: Postroad, stream: str, key: str) -> None:
    with post.begin() as tx:
        tx.publish(stream, MESSAGE, {}, key=key)


def delete(post: Postroad, stream: str) -> None:
    with post.begin() as tx:
        tx.delete_stream(stream)


def noted(processes: Processes, what: str) -> list[str]:
    return [line[what] for line in processes.journal() if what in line]


def idle(post: Postroad) -> bool:
    """Whether no turn is under way and none waits."""
    return post.database.read(moments.waiting_events) == 0


def check(post: Postroad, stream: str) -> None:
    """Nothing of it came into being."""
    assert post.read(stream) == []
    assert [row.key for row in post.dispatches.list() if row.stream == stream] == []
    row = post.streams.get(stream)
    assert row is not None
    assert (row.state, row.waiting, row.version) == ("idle", (), 0)


def test_deleted_in_the_middle_of_a_turn(processes: Processes, open_app: OpenApp, tmp_path: Path) -> None:
    """Two workers, two turns under way, one conversation deleted: its reply, mail and timer are discarded, once."""
    post = open_app()
    processes.write(app())
    for _ in range(2):
        processes.run()
    say(post, "chat/gone", "m1")
    say(post, "chat/kept", "m1")
    until(lambda: len(noted(processes, "begun")) == 2, "both turns have begun")
    say(post, "chat/gone", "m2")
    delete(post, "chat/gone")
    (tmp_path / "go").touch()
    until(lambda: noted(processes, "sent"), "the other one's mail")
    with pytest.raises(StreamDeleted):
        say(post, "chat/gone", "m1")  # a client that tries again
    until(lambda: idle(post))
    check(post, "chat/gone")
    assert noted(processes, "begun").count("chat/gone") == 1
    assert noted(processes, "sent") == ["chat/kept/m1"]
    assert post.database.read(timers.list_, stream="chat/gone") == []
    say(post, "chat/kept", "m2")
    until(lambda: "chat/kept/m2" in noted(processes, "sent"), "the worker is as well as before")


def test_deleted_after_its_worker_was_killed(processes: Processes, open_app: OpenApp, tmp_path: Path) -> None:
    """The claim of a dead process runs out; nobody takes the turn up again."""
    post = open_app()
    processes.write(app(lease=3, timeout=1))
    victim = processes.run()
    say(post, "chat/gone", "m1")
    until(lambda: noted(processes, "begun"), "the turn has begun")
    victim.kill()
    victim.wait()
    delete(post, "chat/gone")
    (tmp_path / "go").touch()
    processes.run()
    say(post, "chat/kept", "m1")
    until(lambda: idle(post))
    check(post, "chat/gone")
    assert noted(processes, "begun").count("chat/gone") == 1
    until(lambda: noted(processes, "sent") == ["chat/kept/m1"], "the other one's mail")
