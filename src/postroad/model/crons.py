"""Crons: which fire of a schedule is run, which one comes next, and whose declaration of it holds.

A cron has one timer, in a stream of its own. It is armed for the next fire; once that is due, its event waits in the
stream; and the commit that takes the event arms the timer again. So there is one of both at any time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice, takewhile
from typing import Literal, Protocol

import msgspec

from postroad.model.clock import SECOND, micros
from postroad.model.errors import InvalidInput
from postroad.model.events import TIMER_FIRED_NAME
from postroad.model.ids import timer_event_id
from postroad.model.lifecycle import TimerStatus
from postroad.model.rows import InboxEvent, TimerChange

Missed = Literal["skip", "once", "all"]
MISSED: tuple[Missed, ...] = ("skip", "once", "all")
TYPE_PREFIX = "cron:"
TIMER = "postroad.next"
ON_TIME = 60 * SECOND
"""How late a fire may begin before "skip" takes it for missed."""
CAUGHT_UP_MAX = 1_000
"""How many missed fires "all" runs at most, the newest ones; and how far skipped ones are counted."""
CONFIRM_EVERY = 60 * SECOND
GONE_AFTER = 5 * CONFIRM_EVERY


class Schedule(Protocol):
    """When something is due."""

    def after(self, at: int) -> int:
        """The first fire later than `at`; microseconds since 1970 UTC, as all times here."""

    def fires(self, at: int) -> Iterator[int]:
        """The fires later than `at`, in order."""

    def back(self, at: int, count: int) -> int:
        """About when the last `count` fires before `at` began."""

    def local(self, at: int) -> datetime:
        """A time in the schedule's zone."""


class Declared(msgspec.Struct, frozen=True, kw_only=True):
    """A cron as the code of a process has it.

    `since`: when the newest process started that is known to have it so. `confirmed`: when one said so last.
    """

    spec: str
    tz: str
    missed: Missed
    since: int
    confirmed: int

    def is_as(self, other: "Declared") -> bool:
        """Whether both say the same."""
        return (self.spec, self.tz, self.missed) == (other.spec, other.tz, other.missed)


class Fire(msgspec.Struct, frozen=True, kw_only=True):
    """The payload of a cron's event.

    `scheduled_at` and `previous`, the fire before it, are ISO 8601 with the offset of the cron's zone. `skipped`: how
    many fires between these two were left out, counted up to a thousand.
    """

    cron: str
    scheduled_at: str
    previous: str | None = None
    skipped: int = 0
    declared: Declared

    def __post_init__(self) -> None:
        _ = self.at, self.before  # raises for what is no time

    @property
    def at(self) -> int:
        """When it was due."""
        return micros(datetime.fromisoformat(self.scheduled_at), "scheduled_at")

    @property
    def before(self) -> int | None:
        """When the one before it was."""
        return None if self.previous is None else micros(datetime.fromisoformat(self.previous), "previous")


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """Where a cron's timer stands; `status` None: it was never armed. `waiting`: the event of its last fire does."""

    stream: str
    status: str | None
    fire_at: int | None
    data: str | None
    waiting: bool
    deleted: bool

    @property
    def fire(self) -> Fire | None:
        """What the timer says; None if that is not readable."""
        return read(self.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cron:
    """A cron as it is declared in this process."""

    name: str
    spec: str
    tz: str
    missed: Missed
    schedule: Schedule

    @property
    def stream_type(self) -> str:
        return TYPE_PREFIX + self.name

    @property
    def stream(self) -> str:
        """Where its runs are turns. A type of its own, so that only who declares the cron takes its events."""
        return f"{self.stream_type}/runs"

    def declared(self, *, since: int, now: int) -> Declared:
        """What a process that started at `since` says of it now."""
        return Declared(spec=self.spec, tz=self.tz, missed=self.missed, since=since, confirmed=now)


def read(data: str | None) -> Fire | None:
    """The payload of a cron's timer or event; None if it is none."""
    if data is None:
        return None
    try:
        return msgspec.json.decode(data, type=Fire)
    except (msgspec.MsgspecError, ValueError, InvalidInput):
        return None


def is_fire(event: InboxEvent) -> bool:
    """Whether this is the event of a cron's timer."""
    return event.kind == TIMER_FIRED_NAME and event.event_id.partition("#")[0] == timer_event_id(TIMER, 0)


def holding(mine: Declared, theirs: Declared | None, now: int) -> Declared:
    """Whose declaration holds: that of the process that started last, as long as anybody confirms it.

    So processes of an old release and a new one do not undo each other's schedules while both run.
    """
    if theirs is None:
        return mine
    if mine.is_as(theirs):
        return msgspec.structs.replace(mine, since=max(mine.since, theirs.since))
    newer = mine.since > theirs.since
    return mine if newer or now - theirs.confirmed > GONE_AFTER else theirs


def reason_to_leave(schedule: Schedule, missed: Missed, fire: Fire, now: int) -> str | None:
    """Why a fire that is looked at for the first time, now, is not run; None: it is."""
    late = now - fire.at
    if missed == "skip" and late > ON_TIME:
        return f"missed, {late // SECOND} s late"
    if missed == "once" and schedule.after(fire.at) <= now:
        return "missed, a later one is due too"
    return None


def following(schedule: Schedule, missed: Missed, last: int, now: int) -> tuple[int, int]:
    """The fire to arm for after the one at `last`, and how many between the two are left out."""
    first = schedule.after(last)
    if first > now:
        return first, 0
    if missed == "all":
        chosen = _caught_up(schedule, first, now)
    else:
        chosen = _latest(schedule, last, now)
        if missed == "skip" and now - chosen > ON_TIME:
            chosen = schedule.after(now)
    return chosen, _count(schedule, last, chosen - 1)


def armed(schedule: Schedule, cron: str, declared: Declared, at: int, *, last: int | None, skipped: int = 0) -> Fire:
    """The payload of a timer that is armed for a fire at `at`."""
    return Fire(
        cron=cron,
        scheduled_at=schedule.local(at).isoformat(),
        previous=None if last is None else schedule.local(last).isoformat(),
        skipped=skipped,
        declared=declared,
    )


def change(stream: str, fire: Fire, *, first: bool = False) -> TimerChange:
    """The change that arms a cron's timer for a fire; the first one takes nobody else's place."""
    return TimerChange(
        verb="set" if first else "rearm",
        stream=stream,
        key=TIMER,
        fire_at=fire.at,
        data=written(fire),
        spec=f"at {fire.at}",
    )


def written(fire: Fire) -> str:
    """The payload as it is stored."""
    return msgspec.json.encode(fire).decode()


def kept(cron: Cron, standing: Standing, *, since: int, now: int) -> TimerChange | Fire | None:
    """What a process that declares the cron has to do about its timer: arm it, confirm its payload, or nothing.

    What is due, or has fired and waits for its turn, is left alone: that turn arms the timer again. A fire is never
    earlier than the last one, whatever the clock says.
    """
    fire = standing.fire
    due = standing.fire_at if standing.status == TimerStatus.ARMED else None
    if standing.deleted or standing.waiting or (due is not None and due <= now):
        return None
    mine, last = cron.declared(since=since, now=now), None
    if due is not None and fire is not None:
        declared = holding(mine, fire.declared, now)
        if declared.is_as(fire.declared):
            confirms = declared is not fire.declared and now - fire.declared.confirmed >= CONFIRM_EVERY
            return msgspec.structs.replace(fire, declared=declared) if confirms else None
    if fire is not None:
        last = fire.at if standing.status == TimerStatus.FIRED else fire.before
    at = cron.schedule.after(now if last is None else max(now, last))
    return change(standing.stream, armed(cron.schedule, cron.name, mine, at, last=last), first=standing.status is None)


def _latest(schedule: Schedule, last: int, now: int) -> int:
    """The last fire that is not later than `now`; there is one after `last`."""
    low, high = last, now
    while high - low > SECOND // 2:
        middle = (low + high) // 2
        if schedule.after(middle) <= now:
            low = middle
        else:
            high = middle
    return schedule.after(low)


def _caught_up(schedule: Schedule, first: int, now: int) -> int:
    """The fire at which to go on with those that are due from `first` on, so that not too many are run.

    They are counted only where the next two say that there may be more: each run asks this.
    """
    gap = schedule.after(first) - first
    if now - first < CAUGHT_UP_MAX * gap or _count(schedule, first, now) < CAUGHT_UP_MAX:
        return first
    return schedule.after(max(first, schedule.back(now, CAUGHT_UP_MAX) - SECOND))


def _count(schedule: Schedule, after: int, until: int) -> int:
    """How many fires lie between these times, `until` included; a thousand stands for more."""
    return sum(1 for _ in takewhile(lambda due: due <= until, islice(schedule.fires(after), CAUGHT_UP_MAX)))
