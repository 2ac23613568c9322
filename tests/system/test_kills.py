"""Processes killed by SIGKILL at the places that matter: nothing is lost, and what went out twice has a reason.

Each process dies at its place while the work of those before it is still half done; the last one finishes
everything. The invariants are the simulation's, held against the same tables.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from postroad.testing.simulation.history import History
from postroad.testing.simulation.workload import Step
from tests.acceptance.killed import Stage, producer

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.filterwarnings("ignore::postroad.store.sqlite_version.SQLiteVersionWarning"),
]

IN_TURNS = (
    "queues.claim", "queues.claimed", "turn.after_claim_commit", "turn.before_handler", "turn.before_commit",
    "turns.fenced", "turns.logged", "turns.consumed", "outbox.insert", "outbox.inserted", "turns.dispatched",
    "turns.withdrawn", "turns.timed", "turns.published", "turns.alerted", "turns.ended", "turns.freed",
    "turn.after_commit",
)  # fmt: skip
IN_SENDS = (
    "dispatch.selected", "dispatch.claimed", "dispatch.after_claim_commit", "dispatch.before_send",
    "dispatch.after_send", "settle.locked", "moves.written", "moves.told", "moves.recorded", "dispatch.after_settle",
)  # fmt: skip
BATCH = 4
IN_TIMERS = ("timers.due", "timers.published", "timers.marked", "timer.after_commit")
IN_ACCEPTING = ("accept.before_insert", "accept.after_insert", "commit.before", "commit.after", "accept.after_commit")


@pytest.fixture(params=["sqlite", "postgres"])
def empty_stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    """A program, and a database without our tables."""
    if request.param == "postgres":
        place = request.getfixturevalue("postgres_url"), request.getfixturevalue("fresh_schema")
    else:
        place = f"sqlite:///{request.getfixturevalue('sqlite_path')}", None
    post = producer(place, migrated=False)
    yield Stage(place, tmp_path, post)
    post.close()


@pytest.fixture
def stage(empty_stage: Stage) -> Stage:
    """A program, and a database with our tables and nothing in them."""
    empty_stage.post.check_schema()
    return empty_stage


def arrivals(history: History) -> Counter[str]:
    """How often each key has arrived."""
    return Counter(arrival.key for arrival in history.arrivals)


def sends(history: History) -> set[str]:
    """The keys of everything that was to be sent, but for what its destination refuses."""
    return {row.key for row in history.outbox if '"giveup"' not in row.body}


def test_killed_while_a_turn_is_processed(stage: Stage) -> None:
    """Before, in and after a handler, between the statements of its commit: each decision is there, whole and once."""
    for place in IN_TURNS:
        stage.full_order()
        stage.die_at(place)
        stage.check()
    stage.full_order()
    stage.die_when("die-in-handler")
    stage.recover()
    history = stage.check(end=True)
    assert len(sends(history)) == len(IN_TURNS) + 1
    assert {run.end_reason for run in history.runs} == {"committed", "interrupted"}


def test_killed_while_a_message_goes_out(stage: Stage) -> None:
    """Before, in and after a send, and while its result is settled: it arrives, and again only if a claim was lost."""
    for place in IN_SENDS:
        stage.order(Step("send", f"{place}.0", "sim.sms"))
        stage.die_at(place)
        stage.check()
    # Several at once: the process dies when some of them have ended and others have not.
    stage.order(*(Step("send", f"batch.{number}", "sim.sms") for number in range(BATCH)))
    stage.die_at("dispatch.after_send:2")
    stage.order(Step("send", "die-in-send", "sim.sms"))
    stage.die_when("die-in-send")
    stage.recover()
    history = stage.check(end=True)
    counts = arrivals(history)
    assert set(counts) == sends(history)
    lost = Counter(
        row.entity for row in history.transitions if (row.from_status, row.to_status) == ("delivering", "delivering")
    )
    for row in history.outbox:
        assert counts[row.key] - 1 <= lost[row.id], row.key
    # Each death between an arrival and the commit of its settle makes one that arrives again.
    assert sum(counts.values()) - len(counts) >= 6


def test_killed_while_timers_fire(stage: Stage) -> None:
    """A timer's event and the mark that it has fired are there together or not at all; each fires once."""
    for number, place in enumerate(IN_TIMERS):
        stage.order(Step("timer", f"{place}.{number}", after=0.3))
        stage.die_at(place)
        stage.check()
    stage.recover()
    history = stage.check(end=True)
    assert [row.status for row in history.timers] == ["fired"] * len(IN_TIMERS)
    rang = [row.entry_id for row in history.log if row.kind == "postroad.timer_fired"]
    assert len(rang) == len(set(rang)) == len(IN_TIMERS)


def test_killed_while_an_event_is_accepted(stage: Stage) -> None:
    """What was committed is there although nobody was told; offered again it is the same event."""
    keys = [stage.offer(place)[1] for place in IN_ACCEPTING]
    accepted = {row.event_id for row in stage.check().inbox}
    assert accepted == set(keys[3:])
    for key in keys:
        stage.offer_again(key)
        stage.offer_other(key)
    stage.recover()
    history = stage.check(end=True)
    assert arrivals(history) == {f"{key}.0": 1 for key in keys}


def test_killed_again_while_it_recovers(stage: Stage) -> None:
    """Whoever takes over what a dead process held may die of that too: each time all is there, whole and once."""
    stage.full_order()
    for place in ("turns.consumed", "queues.claimed", "turns.ended", "dispatch.after_send", "dispatch.claimed"):
        stage.die_at(place)
        stage.check()
    stage.recover()
    history = stage.check(end=True)
    (row,) = [row for row in history.outbox if row.kind == "sim.sms"]
    assert 1 <= arrivals(history)[row.key] <= 2
    assert row.attempt >= 2
    ends = Counter(run.end_reason for run in history.runs if run.stream == row.stream)
    assert ends["interrupted"] >= 2


def test_killed_while_a_turn_is_given_up_for_now(stage: Stage) -> None:
    """A stream backs off and its run is ended, both or neither; the handler's next attempt decides."""
    stage.order(Step("send", "p1.0", "sim.sms"), plan=["trouble", "trouble", "ok"])
    stage.die_at("queues.left")
    stage.check()
    stage.recover()
    history = stage.check(end=True)
    turn = [run for run in history.runs if run.turn_id == history.runs[0].turn_id]
    assert [(run.attempt, run.end_reason) for run in turn] == [(1, "interrupted"), (2, "failed"), (3, "committed")]
    assert arrivals(history) == {"p1.0": 1}


def test_killed_while_it_ends(stage: Stage) -> None:
    """A process that dies while it waits for what has begun, or gives it back, leaves it to the next one."""
    for place in ("shutdown.begun", "shutdown.abandoned"):
        stage.order(Step("send", f"{place}.0", "sim.sms"), think=1.5)
        stage.die_stopping(place)
        stage.check()
    stage.recover()
    history = stage.check(end=True)
    assert arrivals(history) == {"shutdown.begun.0": 1, "shutdown.abandoned.0": 1}


def test_killed_after_an_alert_rang(stage: Stage) -> None:
    """An alert whose sinks were told before the process died rings once more, and then never again."""
    stage.order(Step("send", "p1.0", "sim.page", plan=["giveup"]))
    stage.die_at("alert.after_ring")
    assert [alert.rung_at for alert in stage.check().alerts] == [None]
    stage.recover()
    history = stage.check(end=True)
    assert Counter(alert.subject for alert in history.rung) == {"p1.0": 2}


def test_killed_while_the_schema_is_made(empty_stage: Stage) -> None:
    """Before whatever statement of a migration the process dies: no table of ours is there, and the next migrates."""
    assert empty_stage.migrate_dying() >= 20
