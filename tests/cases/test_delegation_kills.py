"""Processes that die while delegations begin and end: whatever is left, each comes to one end and one report."""

import pytest

from postroad import Delegated, Postroad
from tests.cases.apps import OpenApp, Processes, idle, until

MANY = 5
APP = f"""
from postroad import TASK

@post.turn("chief", lease=1)
async def chief(turn):
    for event in turn.events:
        if event.kind == "go":
            for n in range({MANY}):
                turn.delegate(f"sub/{{n}}", n, key=f"k{{n}}", timeout=60)

@post.turn("sub", lease=1)
async def sub(turn):
    for event in turn.events:
        if task := TASK.of(event):
            turn.finish(task.data)
"""


def told(post: Postroad) -> list[tuple[str, str, int]]:
    """(key, status, result) of the ends in the chief's log."""
    ends = [end for entry in post.read("chief/1") if (end := Delegated.of(entry)) is not None]
    return [(end.key, end.status, end.result) for end in ends]


@pytest.mark.acceptance
@pytest.mark.parametrize(
    "where",
    [
        "turn.before_commit",
        "turns.delegated",
        "turn.after_commit",
        "turns.delegated:3",
        "delegations.ended",
        "turn.after_commit:4",
    ],
)
def test_a_process_that_dies_in_between(open_app: OpenApp, processes: Processes, where: str) -> None:
    """Killed where a delegation begins, where it ends and after either: the next process brings each to its end."""
    post = open_app()
    processes.write(APP)
    with post.begin() as tx:
        tx.publish("chief/1", "go", {}, key="go")
    first = processes.run(POSTROAD_FAILPOINT=where)
    assert first.wait(timeout=60) == -9
    processes.run()
    until(lambda: len(told(post)) == MANY and idle(post), "every delegation has ended")
    assert sorted(told(post)) == [(f"k{n}", "done", n) for n in range(MANY)]
    rows = post.streams.delegations("chief/1")
    assert [(row.key, row.status, row.note) for row in rows] == [(f"k{n}", "done", "") for n in range(MANY)]
