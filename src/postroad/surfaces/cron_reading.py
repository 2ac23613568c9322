"""What the cron commands ask of a database, and show of it."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal

import msgspec
from sqlalchemy import Connection

from postroad.model import ids
from postroad.model.clock import SECOND, moment
from postroad.model.crons import GONE_AFTER, TYPE_PREFIX
from postroad.store import crons as store
from postroad.store.crons import CronRow
from postroad.surfaces.output import say, show_table, when

CronState = Literal["scheduled", "due", "waiting", "running", "backing_off", "parked", "cancelled"]
_QUEUES: dict[str, CronState] = {"claimed": "running", "backoff": "backing_off", "parked": "parked"}


class CronView(msgspec.Struct, frozen=True, kw_only=True):
    """A cron as the database knows it.

    `state`: "scheduled" for `next_at`; "due"; "waiting" for a process that declares it, "running", "backing_off" after
    a failure, or "parked" until a person decides; "cancelled" until the next process looks. `last_end` null: the run is
    under way, or its process was lost. `unseen`: for five minutes no process has said that it declares it.
    """

    name: str
    stream: str
    spec: str
    tz: str
    missed: str
    state: CronState
    next_at: datetime | None
    previous_at: datetime | None
    last_started_at: datetime | None
    last_ended_at: datetime | None
    last_end: str | None
    last_error: str | None
    unseen: bool


def crons(conn: Connection, *, limit: int, now: int) -> Sequence[CronView]:
    """Crons by name."""
    return [_view(row, now) for row in store.list_(conn, limit=limit)]


def show(found: Sequence[CronView]) -> None:
    """A table of crons."""
    if not found:
        say("(no crons)")
        return
    rows = [
        (one.name, f"{one.spec}  {one.tz}", one.missed, one.state, when(one.next_at), when(one.last_started_at),
         one.last_error or one.last_end, "seen by no process" if one.unseen else "")
        for one in found
    ]  # fmt: skip
    show_table(("cron", "schedule", "missed", "state", "next", "last run", "it ended", ""), rows)


def _view(row: CronRow, now: int) -> CronView:
    fire, last = row.fire, row.last
    scheduled = row.status == "armed"
    return CronView(
        name=ids.stream_type(row.stream).removeprefix(TYPE_PREFIX),
        stream=row.stream,
        spec="" if fire is None else fire.declared.spec,
        tz="" if fire is None else fire.declared.tz,
        missed="" if fire is None else fire.declared.missed,
        state=_state(row, now),
        next_at=moment(row.fire_at) if scheduled else None,
        previous_at=_previous(row, scheduled),
        last_started_at=None if last is None else moment(last.started_at),
        last_ended_at=None if last is None or last.ended_at is None else moment(last.ended_at),
        last_end=None if last is None else last.end,
        last_error=None if last is None else last.error,
        unseen=scheduled and fire is not None and now - fire.declared.confirmed > GONE_AFTER + SECOND,
    )


def _previous(row: CronRow, scheduled: bool) -> datetime | None:
    """The last time that was due."""
    if row.fire is None:
        return None
    said = row.fire.previous if scheduled else row.fire.scheduled_at
    return None if said is None else datetime.fromisoformat(said).astimezone(UTC)


def _state(row: CronRow, now: int) -> CronState:
    if row.status == "armed":
        return "scheduled" if row.fire_at > now else "due"
    return _QUEUES.get(row.queue or "", "waiting") if row.waiting else "cancelled"
