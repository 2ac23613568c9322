"""The rules of crons over schedules that are easy to count: what is run, what comes next, whose declaration holds."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from typing import Any

import msgspec
import pytest

from postroad.model import crons
from postroad.model.clock import SECOND, moment
from postroad.model.crons import CAUGHT_UP_MAX, GONE_AFTER, ON_TIME, Cron, Declared, Fire, Missed, Standing
from postroad.model.events import TIMER_FIRED_NAME
from postroad.model.rows import InboxEvent, TimerChange

HOUR = 3_600 * SECOND
T = 480_000 * HOUR


@dataclass(frozen=True)
class Every:
    """Due at each multiple of a length of time."""

    length: int = HOUR

    def after(self, at: int) -> int:
        return (at // self.length + 1) * self.length

    def fires(self, at: int) -> Iterator[int]:
        return count(self.after(at), self.length)

    def back(self, at: int, count: int) -> int:
        return at // self.length * self.length - (count - 1) * self.length

    def local(self, at: int) -> datetime:
        return moment(at)


def cron(missed: Missed = "once", spec: str = "hourly") -> Cron:
    return Cron(name="c", spec=spec, tz="UTC", missed=missed, schedule=Every())


def declared(since: int = T, confirmed: int = T, spec: str = "hourly") -> Declared:
    return Declared(spec=spec, tz="UTC", missed="once", since=since, confirmed=confirmed)


def fire(at: int = T, **more: Any) -> Fire:
    return Fire(cron="c", scheduled_at=moment(at).isoformat(), declared=declared(**more))


def standing(status: str | None = "armed", at: int = T, **more: Any) -> Standing:
    given = {"stream": "cron:c/runs", "status": status, "fire_at": at, "waiting": False, "deleted": False}
    return Standing(**{**given, "data": crons.written(fire(at)), **more})


@pytest.mark.parametrize(
    ("missed", "late", "run"),
    [
        ("once", 0, True), ("once", HOUR - 1, True), ("once", HOUR, False), ("once", 9 * HOUR, False),
        ("skip", 0, True), ("skip", ON_TIME, True), ("skip", ON_TIME + 1, False), ("skip", 9 * HOUR, False),
        ("all", 0, True), ("all", 9 * HOUR, True),
    ],
)  # fmt: skip
def test_what_is_run_depends_on_how_late_it_is(missed: Missed, late: int, run: bool) -> None:
    """ "once" runs what has no later fire behind it, "skip" what is at most a minute late, "all" everything."""
    assert (crons.reason_to_leave(Every(), missed, fire(), T + late) is None) is run


@pytest.mark.parametrize(
    ("missed", "late", "hours", "skipped"),
    [
        ("once", 0, 1, 0), ("once", HOUR // 2, 1, 0), ("once", HOUR, 1, 0), ("once", 5 * HOUR + 1, 5, 4),
        ("all", 5 * HOUR + 1, 1, 0), ("all", 0, 1, 0),
        ("skip", HOUR + ON_TIME, 1, 0), ("skip", HOUR + ON_TIME + 1, 2, 1), ("skip", 5 * HOUR, 5, 4),
        ("skip", 5 * HOUR + ON_TIME + 1, 6, 5),
        ("all", 1_000 * HOUR, 1, 0), ("all", 1_002 * HOUR, 3, 2),
        ("all", 2_000 * HOUR, 2_000 - CAUGHT_UP_MAX + 1, 2_000 - CAUGHT_UP_MAX),
        ("once", 10_000 * HOUR, 10_000, CAUGHT_UP_MAX),
    ],
)  # fmt: skip
def test_what_comes_next_depends_on_what_was_missed(missed: Missed, late: int, hours: int, skipped: int) -> None:
    """The next fire is the first one, or by the policy a later one; what lies between is counted, up to a thousand."""
    at, left = crons.following(Every(), missed, T, T + late)
    assert ((at - T) / HOUR, left) == (hours, min(skipped, CAUGHT_UP_MAX))


def test_whoever_started_last_is_followed_while_somebody_says_so() -> None:
    """The declaration of the process that started last holds, until five minutes have passed without a word of it."""
    old, new = declared(since=T, spec="a"), declared(since=T + 1, confirmed=T + 10, spec="b")
    assert crons.holding(new, old, T + 10) == new
    assert crons.holding(old, new, T + 10 + GONE_AFTER) == new
    assert crons.holding(old, new, T + 11 + GONE_AFTER) == old
    assert crons.holding(old, None, T) == old
    tie = msgspec.structs.replace(old, spec="b")
    assert crons.holding(old, tie, T) == tie, "whoever is there already stays"


def test_an_older_process_of_the_same_release_keeps_the_newer_ones_date() -> None:
    """Who says the same confirms it, and does not make it older than it is."""
    mine, theirs = declared(since=T, confirmed=T + 50), declared(since=T + 9, confirmed=T + 10)
    assert crons.holding(mine, theirs, T + 50) == declared(since=T + 9, confirmed=T + 50)


def kept(found: Standing, *, now: int, since: int = T, **own: Any) -> TimerChange | Fire | None:
    return crons.kept(cron(**own), found, since=since, now=now)


def test_a_new_cron_is_armed_for_the_next_time() -> None:
    """What was never armed is, and does not take the place of what another process has armed meanwhile."""
    done = kept(standing(None, at=0, data=None, fire_at=None), now=T + 5)
    assert isinstance(done, TimerChange)
    assert (done.verb, done.stream, done.fire_at) == ("set", "cron:c/runs", T + HOUR)


@pytest.mark.parametrize(
    "found",
    [
        standing(at=T + HOUR),
        standing(at=T + 5),
        standing(at=T),
        standing("fired", waiting=True),
        standing(None, at=0, data=None, fire_at=None, deleted=True),
    ],
    ids=["armed", "due now", "overdue", "waits for its turn", "its stream is deleted"],
)
def test_what_stands_right_is_left_alone(found: Standing) -> None:
    """A timer that is armed or due, an event that waits, a stream that was deleted: there is nothing to do."""
    assert kept(found, now=T + 5) is None


@pytest.mark.parametrize("found", [standing(at=T + 5), standing("fired", waiting=True)], ids=["due", "waits"])
def test_what_is_due_is_not_taken_back_by_another_schedule(found: Standing) -> None:
    """A change of the schedule leaves a fire that is due to its turn, which arms the timer by the new one."""
    assert kept(found, now=T + 5, since=T + 1, spec="other") is None


@pytest.mark.parametrize(
    ("status", "at"), [("fired", T), ("cancelled", T + HOUR)], ids=["its event is gone", "it was cancelled"]
)
def test_what_was_lost_is_armed_again_after_its_last_time(status: str, at: int) -> None:
    """A timer whose event is gone, or that was cancelled, is armed again, never for a time that it had already."""
    data = crons.written(msgspec.structs.replace(fire(at), previous=moment(at - HOUR).isoformat()))
    for now, due in ((T + 5, T + HOUR), (T - 3 * HOUR, T + HOUR), (T + 7 * HOUR + 1, T + 8 * HOUR)):
        done = kept(standing(status, at=at, data=data), now=now)
        assert isinstance(done, TimerChange)
        assert (done.verb, done.fire_at) == ("rearm", due)
        assert msgspec.json.decode(done.data, type=Fire).previous == moment(T).isoformat()


def test_a_schedule_that_changed_takes_the_armed_timers_place() -> None:
    """The newer code arms it by its own schedule; the older one, started before, leaves that as it is."""
    done = kept(standing(at=T + 9 * HOUR), now=T + 5, since=T + 1, spec="other")
    assert isinstance(done, TimerChange)
    assert (done.verb, done.fire_at) == ("rearm", T + HOUR)
    assert kept(standing(at=T + 9 * HOUR), now=T + 5, since=T - 1, spec="other") is None


def test_a_declaration_is_confirmed_once_a_minute() -> None:
    """Whoever has the same code writes down now and then that it is still there."""
    found = standing(at=T + HOUR)
    assert kept(found, now=T + 59 * SECOND) is None
    done = kept(found, now=T + 60 * SECOND)
    assert isinstance(done, Fire)
    assert (done.declared.confirmed, done.declared.since, done.at) == (T + 60 * SECOND, T, T + HOUR)


@pytest.mark.parametrize(
    "data", ["{}", "[]", '{"cron": "c"}', crons.written(fire()).replace("2024", "20-4"), "nonsense"]
)
def test_a_timer_that_says_nothing_readable_is_armed_anew(data: str) -> None:
    """A payload of anybody else's is no fire; the timer is armed again."""
    assert crons.read(data) is None
    done = kept(standing(at=T + HOUR, data=data), now=T + 5)
    assert isinstance(done, TimerChange)
    assert done.fire_at == T + HOUR


def test_a_fire_is_told_from_other_timers() -> None:
    """Only the events of a cron's own timer are fires, whatever their generation."""
    event = InboxEvent(
        position=1, event_id="evt:postroad.next#7", kind=TIMER_FIRED_NAME, version=1, data="{}", received_at=0
    )
    assert crons.is_fire(event)
    assert crons.is_fire(msgspec.structs.replace(event, event_id="evt:postroad.next"))
    assert not crons.is_fire(msgspec.structs.replace(event, event_id="evt:postroad.nextone"))
    assert not crons.is_fire(msgspec.structs.replace(event, kind="note"))
