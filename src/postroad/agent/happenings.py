"""What happened to an app since somebody last looked, by its database, held against expectations."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, select

from postroad.agent.scenarios import Expect, moment
from postroad.model.clock import micros
from postroad.model.clock import moment as utc
from postroad.model.events import Entry
from postroad.model.lifecycle import Reason, Status
from postroad.store import log, schema

_SENT = frozenset({Reason.TRANSPORT_OK, Reason.STALE_OK})
_DEAD = frozenset({Status.DEAD_LETTER, Status.EXPIRED})
Item = str | Mapping[str, Any]


@dataclass(slots=True)
class Seen:
    """Changes of dispatches, entries and alerts in the order in which they came; timers as they are."""

    changes: list[Mapping[str, Any]] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    alerts: list[tuple[int, str, str]] = field(default_factory=list)
    timers: dict[str, int] = field(default_factory=dict)

    def add(self, later: "Seen") -> None:
        """Take in what was seen later."""
        self.changes.extend(later.changes)
        self.entries.extend(later.entries)
        self.alerts.extend(later.alerts)
        self.timers = later.timers

    def sent(self) -> list[Mapping[str, Any]]:
        """The sends that succeeded, each as its dispatch with the number of the attempt."""
        return [change for change in self.changes if change["reason_code"] in _SENT]

    def dead(self) -> list[Mapping[str, Any]]:
        """The dispatches that died."""
        return [c for c in self.changes if c["to_status"] in _DEAD and c["from_status"] != c["to_status"]]


@dataclass(slots=True)
class Happenings:
    """Remembers what was looked at."""

    transition: int = 0
    alert: int = 0
    versions: dict[str, int] = field(default_factory=dict)

    def new(self, conn: Connection) -> Seen:
        """What has happened since the last look."""
        seen = Seen(
            changes=list(self._changes(conn)),
            entries=list(self._entries(conn)),
            alerts=list(self._alerts(conn)),
            timers=dict(_armed(conn)),
        )
        self.transition = max([self.transition, *(change["id"] for change in seen.changes)])
        return seen

    def _changes(self, conn: Connection) -> Iterator[Mapping[str, Any]]:
        history, outbox = schema.transitions, schema.outbox
        columns = (outbox.c.key, outbox.c.kind, outbox.c.destination, outbox.c.body, outbox.c.stream)
        joined = select(history, *columns).join(outbox, outbox.c.id == history.c.entity)
        for row in conn.execute(joined.where(history.c.id > self.transition).order_by(history.c.id)):
            yield {
                **row._mapping,
                "to": row.destination,
                "body": json.loads(row.body),
                **json.loads(row.metadata),
            }

    def _entries(self, conn: Connection) -> Iterator[Entry]:
        for stream in conn.execute(select(schema.streams.c.id).order_by(schema.streams.c.id)).scalars():
            for entry in log.read(conn, stream, after=self.versions.get(stream, 0), limit=10_000):
                self.versions[stream] = entry.seq
                yield entry

    def _alerts(self, conn: Connection) -> Iterator[tuple[int, str, str]]:
        alerts = schema.alerts
        for row in conn.execute(select(alerts).where(alerts.c.id > self.alert).order_by(alerts.c.id)):
            self.alert = row.id
            yield row.raised_at, row.code, row.subject


def _armed(conn: Connection) -> Iterator[tuple[str, int]]:
    timers = schema.timers
    for row in conn.execute(select(timers).where(timers.c.status == "armed").order_by(timers.c.key)):
        yield row.key, row.fire_at


def mismatches(expect: Expect, seen: Seen, waits: Mapping[str, int], now: datetime) -> list[str]:
    """Every way in which what was seen is not what was expected."""
    return [
        *_by_kind("sent", expect.sent, seen.sent()),
        *_by_kind("dead", expect.dead, seen.dead()),
        *_differ("alerts", expect.alerts, [f"{code} {subject}" for _, code, subject in seen.alerts]),
        *_timers(expect.timers, seen.timers, now),
        *_log(expect.log, seen.entries),
        *(
            f"inbox of {stream}: expected {count}, found {waits[stream]}"
            for stream, count in expect.inbox.items()
            if waits[stream] != count
        ),
    ]


def _by_kind(what: str, expected: Mapping[str, list[Any]], found: list[Mapping[str, Any]]) -> Iterator[str]:
    for kind in sorted({*expected, *(change["kind"] for change in found)}):
        wanted = sorted(expected.get(kind, []), key=_key_of)
        got = sorted((change for change in found if change["kind"] == kind), key=_key_of)
        if [_key_of(item) for item in wanted] != [_key_of(item) for item in got]:
            yield f"{what} {kind}: expected {[_key_of(i) for i in wanted]}, found {[_key_of(i) for i in got]}"
            continue
        for want, have in zip(wanted, got, strict=True):
            if isinstance(want, Mapping) and not contains(have, want):
                yield f"{what} {kind}: expected {dict(want)}, found { {name: have[name] for name in want} }"


def _key_of(item: Item) -> str:
    return item if isinstance(item, str) else str(item["key"])


def _differ(what: str, expected: Iterable[str], found: Iterable[str]) -> Iterator[str]:
    wanted, got = sorted(expected), sorted(found)
    if wanted != got:
        yield f"{what}: expected {wanted}, found {got}"


def _timers(expected: Mapping[str, str] | None, found: Mapping[str, int], now: datetime) -> Iterator[str]:
    if expected is None:
        return
    wanted = {key: micros(moment(at, now), "timers") for key, at in expected.items()}
    if wanted != found:
        shown = {key: f"{utc(at):%m-%d %H:%M:%S}" for key, at in found.items()}
        yield f"timers: expected {dict(expected)}, found {shown}"


def _log(expected: Mapping[str, list[Any]], entries: list[Entry]) -> Iterator[str]:
    for stream, wanted in expected.items():
        got = [entry for entry in entries if entry.stream == stream]
        if len(wanted) != len(got) or not all(map(_is_entry, wanted, got)):
            yield f"log of {stream}: expected {wanted}, found {[{e.kind: e.data} for e in got]}"


def _is_entry(want: Item, entry: Entry) -> bool:
    if isinstance(want, str):
        return entry.kind == want
    return all(entry.kind == kind and contains(entry.data, part) for kind, part in want.items())


def contains(whole: Any, part: Any) -> bool:
    """Whether `part` is equal to `whole` as far as it goes: mappings may leave keys out, nothing else may."""
    if isinstance(part, Mapping):
        return isinstance(whole, Mapping) and all(
            name in whole and contains(whole[name], value) for name, value in part.items()
        )
    return bool(whole == part)


def timeline(seen: Seen) -> list[str]:
    """What was seen as lines, in order of time."""
    lines = [
        *((entry_at(e), f"log   {e.stream} #{e.seq} {e.kind} {e.key} {e.raw}") for e in seen.entries),
        *((c["at"], f"{c['to_status']:<5} {c['key']}  {c['summary']}") for c in seen.changes),
        *((at, f"alert {code} {subject}") for at, code, subject in seen.alerts),
    ]
    lines.sort(key=lambda line: line[0])
    return [f"{utc(at):%m-%d %H:%M:%S}  {text}" for at, text in lines]


def entry_at(entry: Entry) -> int:
    """When an entry was committed, in microseconds."""
    return micros(entry.recorded_at, "recorded_at")
