"""Crons as a program uses them: durable, one run at a time, every next fire armed, whatever becomes of a run."""

import asyncio
import gc
import logging
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

import pytest

from postroad import GiveUp, Handlers, InvalidInput, Kind, Postroad, Refused, RetryLater, Turn
from postroad.model import crons as rules
from postroad.model import failpoints
from postroad.model.clock import SECOND
from postroad.model.rows import Hold
from postroad.store import alerts, crons, queues, timers
from postroad.testing import Harness
from tests.engine.conftest import Open

REPORT = Kind("report", dict[str, str])
MINUTE, HOUR, DAY = 60, 3_600, 86_400
STREAM = "cron:report/runs"
Handler = Callable[[Turn], Any]


class Job:
    """An app with the one cron "report", and the times that it was run for."""

    def __init__(self, spec: str = "0 * * * *", *, tz: str = "UTC", act: Handler | None = None, **more: Any) -> None:
        self.post = Postroad()
        self.runs: list[str] = []
        self.at: list[datetime] = []

        @self.post.cron("report", spec, tz=tz, **more)
        def report(turn: Turn) -> Any:
            (event,) = turn.events
            self.runs.append(event.data["scheduled_at"])
            self.at.append(turn.now)
            return None if act is None else act(turn)

    @property
    def hours(self) -> list[int]:
        return [datetime.fromisoformat(each).hour for each in self.runs]

    def timer(self) -> timers.TimerRow:
        (found,) = self.post.database.read(timers.list_, stream=STREAM)
        return found


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the product has logged."""
    return [record.getMessage() for record in caplog.records if record.name == "postroad"]


def nobody_asks() -> None:
    """Ask the tasks of what has died here how they ended, or a later test's log would have it."""
    for task in [one for one in gc.get_objects() if isinstance(one, asyncio.Task)]:
        if task.done() and not task.cancelled():
            task.exception()


def raised(post: Postroad) -> list[str]:
    return [alert.code for alert in post.database.read(alerts.list_)]


def test_it_runs_at_its_time_on_every_day(harness: Open) -> None:
    """At seven in Berlin, on the day before the clocks change, on that day and after: once each, and never early."""
    job = Job("0 7 * * *", tz="Europe/Berlin")
    h = harness(job.post, start="2026-03-28T05:59:59Z")
    assert h.drain().turns == 0
    h.advance(1)
    assert job.runs == ["2026-03-28T07:00:00+01:00"]
    h.advance(2 * DAY)
    assert job.runs[1:] == ["2026-03-29T07:00:00+02:00", "2026-03-30T07:00:00+02:00"]
    assert [at.isoformat() for at in job.at[1:]] == ["2026-03-29T05:00:00+00:00", "2026-03-30T05:00:00+00:00"]


def test_what_a_run_does_is_one_commit(harness: Open) -> None:
    """What a run sends, publishes and records is there with the next fire, and its event stands in the log."""

    def act(turn: Turn) -> None:
        turn.send(REPORT, {"for": turn.events[0].data["scheduled_at"]}, to="ops", key=turn.events[0].key)
        turn.publish("room/chief", "note", {"text": "sent"})
        turn.record("done", {})

    job = Job(act=act)
    job.post.sender(REPORT)(lambda d: None)
    job.post.recorded("room")
    h = harness(job.post)
    h.advance(2 * HOUR)
    assert [d.body["for"] for d in h.sent(REPORT)] == job.runs
    assert [d.key for d in h.sent(REPORT)] == ["evt:postroad.next", "evt:postroad.next#1"]
    assert len(h.entries("room/chief")) == 2
    assert [entry.kind for entry in h.entries(STREAM)] == ["postroad.timer_fired", "done"] * 2


@pytest.mark.parametrize(("missed", "hours"), [("once", [3, 9]), ("all", [3, 4, 5, 6, 7, 8, 9]), ("skip", [3, 10])])
def test_fires_that_found_no_process_are_treated_by_the_policy(
    harness: Open, missed: rules.Missed, hours: list[int]
) -> None:
    """Down from half past three to half past nine: the latest is made up for, or all are in order, or none is."""
    job = Job(missed=missed)
    h = harness(job.post, start="2026-01-01T02:30Z")
    h.advance(HOUR)
    h.clock.advance(6 * HOUR)
    h.drain()
    if missed == "skip":
        assert job.hours == [3]
        h.advance(HOUR)
    assert job.hours == hours
    assert job.timer().status == "armed"


def test_what_was_left_out_is_seen_in_the_log(harness: Open) -> None:
    """A fire that is not run is a noop with the reason, and the next one says how many were left out before it."""
    job = Job()
    h = harness(job.post, start="2026-01-01T02:30Z")
    h.drain()
    h.clock.advance(7 * HOUR)
    h.drain()
    entries = h.entries(STREAM)
    assert [entry.kind for entry in entries] == ["postroad.timer_fired", "postroad.noop", "postroad.timer_fired"]
    assert entries[1].data["reason"] == "missed, a later one is due too"
    last = entries[2].data
    assert (last["previous"], last["scheduled_at"], last["skipped"]) == (
        "2026-01-01T03:00:00+00:00", "2026-01-01T09:00:00+00:00", 5,
    )  # fmt: skip


@pytest.mark.parametrize(("missed", "hours"), [("once", [1, 3, 4]), ("all", [1, 2, 3, 4]), ("skip", [1, 4])])
def test_a_run_that_takes_long_moves_no_later_one(harness: Open, missed: rules.Missed, hours: list[int]) -> None:
    """A run of two hours and a half: what fell into it is treated as missed, what comes then is on time."""

    def act(turn: Turn) -> None:
        if len(job.runs) == 1:
            h.clock.advance(2 * HOUR + 1_800)

    job = Job(missed=missed, act=act)
    h = harness(job.post, start="2026-01-01T00:30Z")
    h.advance(HOUR)
    h.advance(HOUR)
    assert job.hours == hours
    assert job.at[-1].isoformat() == "2026-01-01T04:00:00+00:00"


def fails(turn: Turn) -> None:
    raise RetryLater("the source is away")


def gives_up(turn: Turn) -> None:
    raise GiveUp("no")


def returns(turn: Turn) -> Any:
    return "something"


def takes_a_taken_key(turn: Turn) -> None:
    turn.send(REPORT, {}, key="taken")


@pytest.mark.parametrize("act", [fails, gives_up, returns, takes_a_taken_key], ids=lambda act: act.__name__)
def test_a_run_that_ends_badly_takes_no_later_one_along(harness: Open, act: Handler) -> None:
    """Whatever a run fails of, it is given up with an alert and an entry, and the next fire is armed and run."""
    job = Job(attempts=2, act=lambda turn: act(turn) if job.hours[-1] == 1 else None)
    job.post.sender(REPORT)(lambda d: None)
    h = harness(job.post, start="2026-01-01T00:30Z")
    with job.post.begin() as tx:
        tx.send(REPORT, {}, key="taken")
    h.advance(3 * HOUR)
    assert job.hours[-2:] == [2, 3]
    assert set(job.hours[:-2]) == {1}
    assert [code for code in raised(job.post) if code.startswith("turn.")] != []
    assert "postroad.failed" in [entry.kind for entry in h.entries(STREAM)]


async def test_a_run_that_must_not_be_repeated_takes_no_later_one_along(harness: Open) -> None:
    """A run that fails after an unsafe tool is shown, not repeated, and the next fire is run."""
    post, hours = Postroad(), []

    @post.tool(effect="unsafe")
    async def pay(amount: int) -> None: ...

    @post.cron("report", "0 * * * *", tz="UTC")
    async def report(turn: Turn) -> None:
        hours.append(datetime.fromisoformat(turn.events[0].data["scheduled_at"]).hour)
        await turn.call(pay, 1)
        if hours[-1] == 1:
            raise RetryLater("after the payment")

    h = harness(post, start="2026-01-01T00:30Z")
    await h.aadvance(2 * HOUR)
    assert hours == [1, 2]
    assert "postroad.interrupted" in [entry.kind for entry in h.entries(STREAM)]


def test_a_run_that_a_person_stops_takes_no_later_one_along(harness: Open) -> None:
    """A run that backs off and is stopped is over, with an entry that says so; the next one comes in time."""

    def act(turn: Turn) -> None:
        if job.hours[-1] == 1:
            raise RetryLater("away", after=10 * MINUTE)

    job = Job(act=act)
    h = harness(job.post, start="2026-01-01T00:30Z")
    h.advance(1_800)
    with job.post.begin() as tx:
        tx.stop_stream(STREAM)
    h.advance(2 * HOUR)
    assert job.hours == [1, 2, 3]
    assert "postroad.interrupted" in [entry.kind for entry in h.entries(STREAM)]


def test_what_has_begun_is_tried_again_however_late(harness: Open) -> None:
    """A run that fails for a while past its minute is not taken for missed: it had begun."""

    def act(turn: Turn) -> None:
        if turn.attempt < 3:
            raise RetryLater("away", after=10 * MINUTE)

    job = Job(missed="skip", act=act)
    h = harness(job.post, start="2026-01-01T00:59Z")
    h.advance(HOUR - MINUTE)
    assert job.hours == [1, 1, 1]
    assert raised(job.post) == []


def test_what_a_shutdown_gave_back_is_run_however_late(harness: Open) -> None:
    """A run that a deployment has cut off had begun: what it did outside stands, so the next process runs it again."""
    job = Job(missed="skip")
    h = harness(job.post, start="2026-01-01T00:59Z")
    h.drain()
    h.clock.advance(MINUTE)
    job.post.drain(only=["timers"])
    (held,) = job.post.database.transact(
        queues.claim, token="t", stream_type="cron:report", limit=1, batch=10, lease=MINUTE * SECOND
    ).claims  # fmt: skip
    job.post.database.transact(queues.release, Hold(STREAM, held.token))
    h.clock.advance(10 * MINUTE)
    h.drain()
    assert job.hours == [1]


@pytest.mark.parametrize(
    "place_of_death", ["turns.fenced", "turns.consumed", "turns.timed", "turns.freed", "commit.before"]
)
def test_a_process_that_dies_in_the_commit_loses_no_fire(harness: Open, place_of_death: str) -> None:
    """Wherever in the commit it dies, the fire is either taken with the next one armed, or not at all."""
    job = Job()
    h = harness(job.post, start="2026-01-01T00:30Z")
    h.drain()
    h.clock.advance(1_800)
    deaths: list[str] = []

    def die(name: str) -> None:
        if name == "turn.before_commit" or deaths:
            deaths.append(name)
        if deaths and name == place_of_death:
            raise KeyboardInterrupt

    failpoints.arm(die)
    try:
        with pytest.raises(KeyboardInterrupt):
            h.drain()
    finally:
        failpoints.arm(None)
    nobody_asks()
    assert job.timer().status == "fired"
    again = Job()
    successor = harness(again.post, seed=1, start=h.clock.now)
    successor.advance(HOUR)
    assert (job.hours, again.hours) == ([1], [1, 2])
    assert [e.key for e in successor.entries(STREAM)] == ["evt:postroad.next", "evt:postroad.next#1"]


def together(hs: Sequence[Harness], seconds: int, *, steps: int) -> None:
    """Let time pass in all of these processes at once, each of them the first to look in its turn."""
    for step in range(steps):
        first = step % len(hs)
        for h in hs:
            h.clock.advance(seconds / steps)
        for h in (*hs[first:], *hs[:first]):
            h.drain()


def test_several_processes_run_it_once(harness: Open) -> None:
    """Three processes with the same cron: each fire is run by one of them, and all of them get some."""
    jobs = [Job() for _ in range(3)]
    hs = [harness(job.post, seed=n, start="2026-01-01T00:30Z") for n, job in enumerate(jobs)]
    together(hs, 9 * HOUR, steps=108)
    assert sorted(hour for job in jobs for hour in job.hours) == list(range(1, 10))


def test_a_changed_schedule_takes_effect_with_the_deployment(harness: Open) -> None:
    """A release with another time runs at that one only, from its start on; so does the former one, put back."""
    old, new, back = Job("0 7 * * *"), Job("0 9 * * *"), Job("0 7 * * *")
    harness(old.post, start="2026-01-01T06:30Z").drain()
    assert old.timer().data.count("07:00")
    harness(new.post, start="2026-01-01T06:31Z", seed=1).advance(DAY)
    harness(back.post, start="2026-01-02T06:32Z", seed=2).advance(DAY)
    assert (old.hours, new.hours, back.hours) == ([], [9], [7])


def test_a_fire_that_is_due_during_the_deployment_is_run_once(harness: Open) -> None:
    """The old time came while no process was up: the new release makes up for it, then goes by its own time."""
    old, new = Job("0 7 * * *"), Job("30 7 * * *")
    harness(old.post, start="2026-01-01T06:30Z").drain()
    harness(new.post, start="2026-01-01T07:10Z", seed=1).advance(DAY)
    assert [run[11:16] for run in new.runs] == ["07:00", "07:30"]


def test_two_releases_side_by_side_do_not_undo_each_other(harness: Open) -> None:
    """While both run, the schedule of the one that started last holds, whoever runs it; the timer is armed once a fire.

    When that one is gone, the other's holds again some minutes later.
    """
    old, new = Job("0 * * * *"), Job("20 * * * *")
    h_old = harness(old.post, start="2026-01-01T00:30Z")
    h_old.drain()
    h_old.clock.advance(1)
    h_new = harness(new.post, start="2026-01-01T00:30:01Z", seed=1)
    h_new.drain()
    armed = old.timer().generation
    together([h_old, h_new], 3 * HOUR, steps=180)
    runs = [run[11:16] for run in sorted(old.runs + new.runs)]
    assert runs == ["01:20", "02:20", "03:20"]
    assert old.timer().generation == armed + 3
    together([h_old], 2 * HOUR, steps=120)
    assert [run[11:16] for run in old.runs if run > "2026-01-01T03:30"] == ["04:00", "05:00"]


def test_an_old_process_that_starts_again_does_not_keep_its_schedule_for_ever(harness: Open) -> None:
    """In the middle of a deployment an old process starts again and its schedule holds; once it is gone it does not."""
    new, old = Job("20 * * * *"), Job("0 0 1 1 *")
    h = harness(new.post, start="2026-01-01T00:30Z")
    h.drain()
    harness(old.post, start="2026-01-01T00:31Z", seed=1).drain()
    assert "2027-01-01" in new.timer().data
    together([h], HOUR, steps=60)
    assert [run[11:16] for run in new.runs] == ["01:20"]


def test_a_cron_that_is_declared_no_more_runs_no_more(harness: Open, caplog: pytest.LogCaptureFixture) -> None:
    """Without its declaration nothing is run or armed; put back, what was missed is treated by the policy."""
    job, back = Job(), Job()
    harness(job.post, start="2026-01-01T00:30Z").drain()
    without = Postroad()
    without.recorded("room")
    h = harness(without, start="2026-01-01T00:31Z", seed=1)
    h.advance(3 * DAY)
    assert h.entries(STREAM) == []
    assert job.timer().status == "fired"
    assert job.timer().generation == 0
    harness(back.post, start=h.clock.now, seed=2).advance(HOUR)
    assert (job.runs, back.hours) == ([], [0, 1])
    assert told(caplog) == []


def test_a_clock_that_is_set_back_runs_nothing_twice(harness: Open) -> None:
    """Two hours back: every hour that was run is not run again, and the next one is run when it comes."""
    job = Job()
    h = harness(job.post, start="2026-01-01T00:30Z")
    h.advance(3 * HOUR)
    h.clock.jump(-2 * HOUR)
    h.advance(2 * HOUR)
    assert job.hours == [1, 2, 3]
    h.advance(HOUR)
    assert job.hours == [1, 2, 3, 4]


def test_a_clock_that_is_set_back_brings_no_cancelled_timer_back_in_time(harness: Open) -> None:
    """A timer that somebody cancelled is armed again within a minute, for a time that was not run yet."""
    job = Job()
    h = harness(job.post, start="2026-01-01T00:30Z")
    h.advance(3 * HOUR)
    h.clock.jump(-2 * HOUR)
    with job.post.begin() as tx:
        tx.cancel_timer(rules.TIMER, stream=STREAM)
    h.advance(MINUTE)
    assert job.timer().status == "armed"
    h.advance(4 * HOUR)
    assert job.hours == [1, 2, 3, 4, 5]


def test_how_a_message_of_it_ended_is_no_reason_to_run_it(harness: Open) -> None:
    """What a run sends belongs to no stream: delivered or dead it comes back to no run, and a dead one is an alert."""

    def act(turn: Turn) -> None:
        turn.send(REPORT, {}, key=f"r{len(job.runs)}", origin={"team": "ops"})

    job = Job(act=act)
    job.post.sender(REPORT)(lambda d: None)
    h = harness(job.post, start="2026-01-01T00:30Z")
    h.fail(REPORT, GiveUp("gone"))
    h.advance(2 * HOUR)
    assert job.hours == [1, 2]
    rows = [job.post.dispatches.get(key) for key in ("r1", "r2")]
    assert [(row.stream, row.status, row.origin) for row in rows if row is not None] == [
        ("", "dead_letter", {"cron": "report", "team": "ops"}), ("", "delivered", {"cron": "report", "team": "ops"}),
    ]  # fmt: skip
    assert raised(job.post) == ["dispatch.dead_letter"]
    assert [entry.kind for entry in h.entries(STREAM)] == ["postroad.timer_fired"] * 2


def test_other_events_of_its_stream_are_for_it_and_arm_nothing(harness: Open) -> None:
    """What is published into its stream is a run by hand; the schedule stays as it is."""
    post, seen = Postroad(), []

    @post.cron("report", "0 * * * *", tz="UTC")
    def report(turn: Turn) -> None:
        seen.append([event.kind for event in turn.events])

    h = harness(post, start="2026-01-01T00:30Z")
    h.drain()
    with post.begin() as tx:
        tx.publish(STREAM, "by hand", {})
    h.drain()
    assert seen == [["by hand"]]
    (timer,) = post.database.read(timers.list_, stream=STREAM)
    assert (timer.status, timer.generation) == ("armed", 0)
    h.advance(HOUR)
    assert seen == [["by hand"], ["postroad.timer_fired"]]


def test_a_deleted_stream_ends_it_for_good(harness: Open, caplog: pytest.LogCaptureFixture) -> None:
    """Deleted by its own run, it is not armed again, by any process; the log says once why it never runs."""
    job, again = Job(act=lambda turn: turn.delete_stream(turn.stream)), Job()
    h = harness(job.post, start="2026-01-01T00:30Z")
    h.advance(3 * HOUR)
    harness(again.post, start=h.clock.now, seed=1).advance(3 * HOUR)
    assert (job.hours, again.hours) == ([1], [])
    assert raised(job.post) == []
    said = told(caplog)
    assert len(said) == 2
    assert all("was deleted, so that it never runs" in each for each in said), said


def test_a_schedule_that_does_not_hold_is_told_once(harness: Open, caplog: pytest.LogCaptureFixture) -> None:
    """A process whose declaration does not hold says so once, and what does."""
    new, old = Job("20 7 * * *", tz="Europe/Berlin"), Job()
    old_h = harness(old.post, start="2026-01-01T00:30Z")
    harness(new.post, start="2026-01-01T00:30:01Z", seed=1).drain()
    with caplog.at_level(logging.WARNING):
        together([old_h], 3 * MINUTE, steps=3)
    (said,) = told(caplog)
    assert said == "cron report: a process that started later has it as '20 7 * * *' in Europe/Berlin, which holds"


def test_a_schedule_of_a_newer_release_that_is_not_understood_is_not_followed(harness: Open) -> None:
    """A process that cannot read the newer schedule goes on by its own, so that the fire after it is armed."""
    job = Job()
    h = harness(job.post, start="2026-01-01T00:30Z")
    h.drain()
    data = job.timer().data.replace('"tz":"UTC"', '"tz":"Moon/Base"').replace('"since":', '"since":9')
    fire = rules.read(data)
    assert fire is not None
    job.post.database.transact(timers.apply, [rules.change(STREAM, fire)])
    h.advance(2 * HOUR)
    assert job.hours == [1, 2]


async def test_looking_after_the_timers_costs_a_write_a_minute(harness: Open) -> None:
    """Ten minutes in which nothing is due, looked at every six seconds: ten writes for each cron, and no other."""
    post, written = Postroad(), []
    for n in range(3):
        post.cron(f"c{n}", "0 7 * * *", tz="UTC")(lambda turn: None)
    h = harness(post)
    await h.adrain()
    (scheduler,) = [loop for loop in h._loops if loop.name == "scheduler"]
    failpoints.arm(lambda name: written.append(name) if name == "commit.before" else None)
    try:
        for _ in range(100):
            h.clock.advance(6)
            assert not await scheduler.step()
    finally:
        failpoints.arm(None)
    assert len(written) == 30


def test_handlers_bring_their_crons_along() -> None:
    """A registry's crons are the app's once it is included; the same name twice is refused."""
    handlers, post = Handlers(), Postroad()
    handlers.cron("report", "0 7 * * *", tz="UTC")(lambda turn: None)
    post.include(handlers)
    with pytest.raises(Refused, match="declared twice"):
        post.cron("report", "0 8 * * *", tz="UTC")(lambda turn: None)
    post.cron("other", "0 8 * * *", tz="UTC")(lambda turn: None)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"timeout": 0}, "timeout must be above 0"),
        ({"attempts": 0}, "attempts must be a whole number"),
        ({"spec": "0 7 * *"}, "spec must be a cron expression"),
        ({"tz": "Berlin"}, "tz must be a time zone"),
        ({"missed": "never"}, "missed must be one of"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_declared(given: dict[str, Any], said: str) -> None:
    """A wrong value is refused where it is written down, before anything runs."""
    right: dict[str, Any] = {"name": "report", "spec": "0 7 * * *", "tz": "UTC"}
    with pytest.raises(InvalidInput, match=said):
        Postroad().cron(**{**right, **given})(lambda turn: None)


def test_a_generator_is_no_cron() -> None:
    """A function that yields would run nothing of itself, and is refused."""
    with pytest.raises(InvalidInput, match="cron must not `yield`"):

        @Postroad().cron("report", "0 7 * * *", tz="UTC")
        def report(turn: Turn) -> Any:
            yield


def test_the_database_knows_its_crons(harness: Open) -> None:
    """Name, schedule, what comes next and how the last run ended are there without any declaration."""
    job = Job("0 7 * * *", tz="Europe/Berlin")
    h = harness(job.post, start="2026-01-01T05:00Z")
    h.drain()
    (row,) = job.post.database.read(crons.list_, limit=10)
    assert (row.stream, row.status, row.last) == (STREAM, "armed", None)
    h.advance(2 * HOUR)
    (row,) = job.post.database.read(crons.list_, limit=10)
    assert row.fire is not None
    assert row.last is not None
    assert (row.fire.declared.spec, row.fire.previous) == ("0 7 * * *", "2026-01-01T07:00:00+01:00")
    assert (row.last.end, row.queue, row.waiting) == ("committed", None, False)
