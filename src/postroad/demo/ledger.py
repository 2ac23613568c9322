"""What really happened, by the database and by the services' own journal, and what it is held to."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Row, func, select

from postroad.demo.journal import Line
from postroad.model.ids import outcome_id
from postroad.model.lifecycle import TERMINAL
from postroad.store import schema

UNFINISHED = ("pending", "delivering")


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """What is not finished yet."""

    events: int
    dispatches: int
    timers: int
    turns: int

    @property
    def nothing(self) -> bool:
        return not (self.events or self.dispatches or self.timers or self.turns)


def waiting(conn: Connection) -> Waiting:
    """What is still on its way."""
    inbox, outbox, timers, runs = schema.inbox, schema.outbox, schema.timers, schema.queues
    return Waiting(
        events=_count(conn, inbox, inbox.c.reason.is_(None)),
        dispatches=_count(conn, outbox, outbox.c.status.in_(UNFINISHED)),
        timers=_count(conn, timers, timers.c.status == "armed"),
        turns=_count(conn, runs, runs.c.state == "claimed"),
    )


def queued_in_version(conn: Connection, version: int) -> dict[str, int]:
    """How much waits in a version of its kind: events in inboxes, dispatches in the outbox."""
    inbox, outbox = schema.inbox, schema.outbox
    return {
        "events": _count(conn, inbox, inbox.c.version == version),
        "dispatches": _count(conn, outbox, outbox.c.status.in_(UNFINISHED), outbox.c.version == version),
    }


def has_alerts(conn: Connection) -> bool:
    """Whether an alert was raised."""
    return _count(conn, schema.alerts) > 0


def run_ends(conn: Connection, stream: str) -> list[str | None]:
    """How each attempt at this stream's turns ended, oldest first; None: it runs, or was lost."""
    runs = schema.runs
    return list(
        conn.execute(select(runs.c.end_reason).where(runs.c.stream == stream).order_by(runs.c.started_at)).scalars()
    )


def _count(conn: Connection, table: Any, *where: Any) -> int:
    return int(conn.execute(select(func.count()).select_from(table).where(*where)).scalar_one())


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything the database holds about a run of the demo, once nothing waits any more."""

    entries: Sequence[Row[Any]]
    dead_events: Sequence[Row[Any]]
    dispatches: Sequence[Row[Any]]
    timers: Sequence[Row[Any]]
    transitions: Sequence[Row[Any]]
    alerts: Sequence[Row[Any]]
    turns: int


def facts(conn: Connection) -> Facts:
    """Read it all, in one view."""
    log, inbox, runs = schema.log, schema.inbox, schema.runs
    return Facts(
        entries=conn.execute(select(log).order_by(log.c.recorded_at, log.c.stream, log.c.seq)).all(),
        dead_events=conn.execute(select(inbox).where(inbox.c.reason.is_not(None))).all(),
        dispatches=conn.execute(select(schema.outbox)).all(),
        timers=conn.execute(select(schema.timers)).all(),
        transitions=conn.execute(select(schema.transitions).order_by(schema.transitions.c.id)).all(),
        alerts=conn.execute(select(schema.alerts).order_by(schema.alerts.c.id)).all(),
        turns=_count(conn, runs, runs.c.end_reason == "committed"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The numbers at the end, and every claim that did not hold."""

    events: int
    turns: int
    dispatches: Counter[str]
    timers: Counter[str]
    duplicates: int
    retries: int
    kills: int
    alerts: int
    lost: list[str]
    broken: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether nothing was lost and the demo showed what it is there to show."""
        return not (self.lost or self.broken)


def summarise(found: Facts, journal: Iterable[Line], published: Iterable[tuple[str, str]], *, kills: int) -> Summary:
    """Hold the database against the services' journal and against what was published (stream and key)."""
    lines = list(journal)
    requests = [line for line in lines if line["type"] == "request" and line["path"] != "/think"]
    duplicates = [line for line in requests if line["duplicate"]]
    deduplicated = [line for line in lines if line["type"] == "answer" and line["deduplicated"]]
    retries = sum(row.reason_code == "dispatch.pending.retry_backoff" for row in found.transitions)
    summary = Summary(
        events=sum(row.cause is None for row in found.entries) + len(found.dead_events),
        turns=found.turns,
        dispatches=Counter(row.status for row in found.dispatches),
        timers=Counter(row.status for row in found.timers),
        duplicates=len(duplicates),
        retries=retries,
        kills=kills,
        alerts=len(found.alerts),
        lost=[*lost_events(found, published), *lost_dispatches(found, requests)],
    )
    must = {
        "no dispatcher was killed in the middle of a send": kills,
        "nothing was retried": retries,
        "no second request was recognised by its key": len(deduplicated),
    }
    summary.broken.extend(claim for claim, happened in must.items() if not happened)
    summary.broken.extend(_phantoms(found, requests))
    return summary


def lost_events(found: Facts, published: Iterable[tuple[str, str]]) -> list[str]:
    """Events that were accepted and are neither in a log nor dead; outcomes of what has ended count too."""
    seen = {(row.stream, row.entry_id) for row in found.entries}
    seen |= {(row.stream, row.event_id) for row in found.dead_events}
    ended = [row for row in found.dispatches if row.stream and row.status in TERMINAL]
    owed = {(row.stream, outcome_id(row.key, row.epoch, row.status)) for row in ended}
    return [f"event {key} of {stream}" for stream, key in sorted({*published, *owed} - seen)]


def lost_dispatches(found: Facts, requests: Iterable[Line]) -> list[str]:
    """Dispatches that never reached the services, or that are not finished."""
    reached = {line["key"] for line in requests}
    return [
        f"dispatch {row.key} ({row.status})"
        for row in found.dispatches
        if row.status not in TERMINAL or row.key not in reached
    ]


def _phantoms(found: Facts, requests: Iterable[Line]) -> list[str]:
    known = {row.key for row in found.dispatches}
    return [f"{key} was sent, but nothing committed it" for key in sorted({r["key"] for r in requests} - known)]
