"""Schedules over changes of clocks, outages, kills and busy processes: each time once, none lost, none twice."""

import json
import signal
import time
from datetime import date, datetime, timedelta
from itertools import pairwise

import pytest

from postroad import Entry, Kind, Postroad, Turn
from postroad.store import log
from tests.cases.apps import OpenApp, Processes, until
from tests.engine.conftest import Open

NOTE = Kind("note", dict[str, int])
HOUR = 3_600
STREAM = "cron:tick/runs"
EVERY_SECOND = """
@post.cron("tick", "* * * * * *", tz="UTC", missed="all", lease=2)
async def tick(turn):
    note(at=turn.events[0].data["scheduled_at"], attempt=turn.attempt, process=os.getpid())
    await asyncio.sleep(0.3)
"""


def fired(entries: "list[Entry]") -> list[datetime]:
    """What the runs of a log were for, in its order."""
    return [datetime.fromisoformat(e.data["scheduled_at"]) for e in entries if e.kind == "postroad.timer_fired"]


def runs(post: Postroad) -> list[datetime]:
    return fired(post.database.read(log.read, STREAM, limit=1_000))


def gaps(found: list[datetime]) -> set[timedelta]:
    return {late - early for early, late in pairwise(found)}


@pytest.mark.parametrize(
    ("spec", "tz", "start"),
    [
        ("0 0 * * *", "America/Los_Angeles", "2022-03-11T20:00Z"),
        ("30 1 * * *", "America/New_York", "2025-10-31T12:00Z"),
        ("30 2 * * *", "America/New_York", "2026-03-06T12:00Z"),
        ("30 2 * * *", "Europe/Berlin", "2026-10-23T12:00Z"),
        ("45 1 * * *", "Australia/Lord_Howe", "2026-04-03T12:00Z"),
        ("15 2 * * *", "Australia/Lord_Howe", "2026-10-02T12:00Z"),
    ],
)
def test_a_daily_job_runs_once_on_each_local_date(harness: Open, spec: str, tz: str, start: str) -> None:
    """Over the night in which clocks change: one run on each date, also on that one, never two."""
    post = Postroad()
    dates: list[date] = []

    @post.cron("tick", spec, tz=tz)
    def tick(turn: Turn) -> None:
        dates.append(datetime.fromisoformat(turn.events[0].data["scheduled_at"]).date())

    harness(post, start=start).advance(4 * 24 * HOUR)
    assert dates == [dates[0] + timedelta(days=n) for n in range(4)]


def test_a_clock_that_jumps_ahead_and_back_runs_no_time_twice(harness: Open) -> None:
    """At three, set to five and run, set back to a minute past three: four and five are over, six comes in time."""
    post = Postroad()
    hours: list[int] = []

    @post.cron("tick", "0 * * * *", tz="UTC", missed="all")
    def tick(turn: Turn) -> None:
        hours.append(datetime.fromisoformat(turn.events[0].data["scheduled_at"]).hour)

    h = harness(post, start="2026-01-01T14:30Z")
    h.advance(HOUR)
    assert hours == [15]
    h.clock.jump(2 * HOUR)
    h.drain()
    assert hours == [15, 16, 17]
    h.clock.jump(-2 * HOUR)
    h.advance(2 * HOUR)
    assert hours == [15, 16, 17]
    h.advance(HOUR)
    assert hours == [15, 16, 17, 18]


def test_processes_whose_clocks_differ_fire_each_time_once(harness: Open) -> None:
    """One is seven minutes ahead, one seven behind: what comes next is counted from what was due, by no clock."""
    at: list[str] = []
    hs = []
    for seed, start in enumerate(("2026-01-01T12:00Z", "2026-01-01T11:53Z", "2026-01-01T12:07Z")):
        post = Postroad()
        post.cron("tick", "*/5 * * * *", tz="UTC")(lambda turn: at.append(turn.events[0].data["scheduled_at"]))
        hs.append(harness(post, start=start, seed=seed))
    for step in range(60):
        for h in hs[step % 3 :] + hs[: step % 3]:
            h.clock.advance(60)
            h.drain()
    found = [datetime.fromisoformat(each) for each in at]
    assert gaps(found) == {timedelta(minutes=5)}
    assert len(found) in (12, 13)


def test_a_loop_that_was_blocked_makes_up_for_every_time(open_app: OpenApp) -> None:
    """A handler blocks the loop for three fires: afterwards each is run on its own, with its own time."""
    post = open_app()
    post.cron("tick", "* * * * * *", tz="UTC", missed="all")(lambda turn: None)

    @post.turn("chat")
    async def chat(turn: Turn) -> None:
        time.sleep(3.2)  # noqa: ASYNC251  # blocks on purpose

    with post.running():
        until(lambda: runs(post), "the first run")
        with post.begin() as tx:
            tx.publish("chat/1", NOTE, {"n": 1})
        until(lambda: len(runs(post)) >= 6, "six runs")
    assert gaps(runs(post)) == {timedelta(seconds=1)}


@pytest.mark.acceptance
def test_killed_processes_lose_no_time_and_run_none_twice(processes: Processes, open_app: OpenApp) -> None:
    """Two processes of a job that is due every second; the one that runs it is killed: every second is run, in order.

    What was under way is run again, by the other, once its lease is over; nothing else is.
    """
    post = open_app()
    processes.write(EVERY_SECOND)
    alive = {process.pid: process for process in (processes.run(), processes.run())}
    until(lambda: len(runs(post)) >= 2, "two runs")
    noted = len(processes.journal())
    until(lambda: len(processes.journal()) > noted, "a run has begun")
    victim = alive.pop(processes.journal()[-1]["process"])
    victim.kill()
    assert victim.wait() == -signal.SIGKILL
    until(lambda: len(runs(post)) >= 8, "the other has caught up")
    assert gaps(runs(post)) == {timedelta(seconds=1)}
    begun = [(each["at"], each["attempt"]) for each in processes.journal()]
    assert len(begun) == len(set(begun)), "no attempt twice"
    assert len([attempt for _, attempt in begun if attempt > 1]) <= 1


@pytest.mark.acceptance
def test_a_release_that_lost_the_job_leaves_it_to_the_one_that_has_it(processes: Processes, open_app: OpenApp) -> None:
    """Beside a process that declares it runs one that does not: it fires the timers, and takes none of the runs."""
    post = open_app()
    processes.write('post.recorded("room")\n')
    processes.run("--only", "turns,timers")
    post.cron("tick", "* * * * * *", tz="UTC")(lambda turn: None)
    with post.running():
        until(lambda: len(runs(post)) >= 4, "four runs")
    assert gaps(runs(post)) == {timedelta(seconds=1)}


def test_a_job_that_ends_in_a_refusal_keeps_its_schedule(harness: Open) -> None:
    """A timer of its own that cannot be set fails every run: each is given up visibly, and each time is run."""
    post, seen = Postroad(), set[str]()

    @post.cron("tick", "0 * * * *", tz="UTC", attempts=1)
    def tick(turn: Turn) -> None:
        seen.add(turn.events[0].data["scheduled_at"])
        turn.set_timer("once", at=datetime.fromisoformat("2030-01-01T00:00+00:00"), data={"n": len(seen)})

    h = harness(post, start="2026-01-01T00:30Z")
    h.advance(4 * HOUR)
    assert len(seen) == 4
    failed = [json.loads(e.raw)["reason"] for e in h.entries(STREAM) if e.kind == "postroad.failed"]
    assert failed == ["turn.dead.max_attempts"] * 3
