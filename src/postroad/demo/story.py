"""The demo's story: what was decided, sent, retried, rung and taken over, told while it happens.

The lines come from the database's own history and from the services' journal, not from the code that runs.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from sqlalchemy import Connection, Row, select

from postroad.demo.journal import Line
from postroad.demo.ledger import Summary
from postroad.model import events
from postroad.model.ids import subject
from postroad.model.lifecycle import Reason
from postroad.store import schema

SECOND = 1_000_000
# Rows may be committed later than rows with a higher id: look back that far, and tell each row once.
LOOK_BACK = 5 * SECOND
COLOURS = {
    "driver": "cyan",
    "agent": "bold",
    "timer": "magenta",
    "sent": "green",
    "retry": "yellow",
    "dead": "red",
    "alert": "bold red",
    "services": "blue",
    "demo": "bold yellow",
}


@dataclass(frozen=True, slots=True)
class Told:
    """One line of the story. `at` in microseconds since 1970 UTC."""

    at: int
    who: str
    load: str
    text: str


class Narrator:
    """Writes lines with the seconds since the beginning: coloured on a terminal, plain elsewhere."""

    def __init__(self, console: Console, began: int) -> None:
        self._console = console
        self._began = began

    def tell(self, told: Told) -> None:
        """Write one line."""
        line = Text()
        line.append(f"{max(0, told.at - self._began) / SECOND:6.1f}s  ", style="dim")
        line.append(f"{told.load:<7}", style="dim")
        line.append(f"{told.who:<9}", style=COLOURS.get(told.who, ""))
        line.append(told.text)
        self._console.print(line, soft_wrap=True, highlight=False)

    def chapter(self, title: str) -> None:
        """Begin a new part."""
        self._console.print()
        self._console.print(Text(f"── {title}", style="bold"), soft_wrap=True, highlight=False)

    def summarise(self, summary: Summary, *, seconds: float) -> None:
        """Write the numbers, what was lost, and each claim that did not hold."""
        self._console.print()
        self._console.print(table(summary))
        self._console.print(Text(f"lost: {len(summary.lost)}", style="bold green" if summary.holds else "bold red"))
        for what, claims in (("lost", summary.lost), ("NOT SO", summary.broken)):
            for claim in claims:
                self._console.print(Text(f"  {what}: {claim}", style="red"), soft_wrap=True)
        self._console.print(Text(f"in {seconds:.0f} s", style="dim"))

    def say(self, text: str) -> None:
        """Write something that belongs to no moment."""
        self._console.print(Text(text), soft_wrap=True, highlight=False)


@dataclass(slots=True)
class Follow:
    """What was told already; `new` reads what has come since."""

    since: int
    seen: set[tuple[str, Any]] = field(default_factory=set)

    def new(self, conn: Connection) -> list[Told]:
        """The lines about what was committed since the last time, oldest first."""
        log, alerts, history = schema.log, schema.alerts, schema.transitions
        outbox = schema.outbox
        moved = select(history, outbox.c.key, outbox.c.stream, outbox.c.body).join(
            outbox, outbox.c.id == history.c.entity
        )
        after = self.since - LOOK_BACK
        told = [
            *self._told("log", conn.execute(select(log).where(log.c.recorded_at >= after)).all()),
            *self._told("history", conn.execute(moved.where(history.c.at >= after)).all()),
            *self._told("alerts", conn.execute(select(alerts).where(alerts.c.raised_at >= after)).all()),
        ]
        self.since = max([self.since, *(line.at for line in told)])
        return sorted(told, key=lambda line: line.at)

    def _told(self, source: str, rows: Any) -> Iterator[Told]:
        describe = {"log": of_entry, "history": of_transition, "alerts": of_alert}[source]
        for row in rows:
            name = (source, (row.stream, row.seq) if source == "log" else row.id)
            if name in self.seen:
                continue
            self.seen.add(name)
            line = describe(row)
            if line is not None:
                yield line


def of_entry(row: Row[Any]) -> Told | None:
    """The line about an entry of a log, if it is worth one."""
    load, data = subject(row.stream), json.loads(row.data)
    if row.kind == "DecisionRecorded":
        causes = ", ".join(_short(load, key) for key in data["actions"])
        refused = "".join(f"; refused {r['action']}: {r['reason']}" for r in data["refused"])
        return Told(row.recorded_at, "agent", load, f"{data['reason']} → {causes or 'nothing to do'}{refused}")
    if row.kind == "DriverSms":
        return Told(row.received_at, "driver", load, f"writes “{data['text']}”")
    if row.kind == events.TIMER_FIRED_NAME:
        return Told(row.received_at, "timer", load, f"rings for ask {data['ask']} after step {data['step']}")
    if row.kind == events.FAILED:
        return Told(row.recorded_at, "dead", load, f"events given up: {data['reason']} ({data['error']})")
    if row.kind == events.NOOP and "needs_hero_task=false" in data["reason"]:
        said = f"{_short(load, data['event'])} is a noop: {data['reason']}"
        return Told(row.recorded_at, "agent", load, said)
    return None


def of_transition(row: Row[Any]) -> Told | None:
    """The line about a change of a dispatch, if it is worth one."""
    load = subject(row.stream)
    key, attempt = _short(load, row.key), json.loads(row.metadata).get("attempt")
    nth = f" (attempt {attempt})" if attempt and attempt > 1 else ""
    match Reason(row.reason_code):
        case Reason.TRANSPORT_OK:
            return Told(row.at, "sent", load, f"{key}{nth}: {_said(load, row.body)}")
        case Reason.RETRY_BACKOFF:
            return Told(row.at, "retry", load, f"{key}: {row.summary}")
        case Reason.ATTEMPT if row.from_status == "delivering":
            return Told(row.at, "retry", load, f"{key}: its lease is over, another dispatcher takes it{nth}")
        case Reason.STALE_OK | Reason.STALE_FAILED | Reason.STALE_UNSENT:
            return Told(row.at, "retry", load, f"{key}: {row.summary}")
        case _ if row.to_status in ("dead_letter", "expired"):
            return Told(row.at, "dead", load, f"{key}: {row.summary}")
    return None


def of_alert(row: Row[Any]) -> Told:
    """The line about an alert."""
    load, _, key = row.subject.partition("/")
    return Told(row.raised_at, "alert", load, f"{row.code} {key}: {row.detail}")


def of_request(line: Line) -> Told | None:
    """The line about a request that the services answered in an odd way."""
    load, _, key = line["key"].partition("/")
    if load == "think":
        number, _, event = key.partition("/")
        said = f"asks the model about {event}, and the model takes its time"
        return Told(line["at"], "agent", number, said) if line["type"] == "held" else None
    if line["type"] == "request" and line["duplicate"]:
        return Told(
            line["at"], "services", load, f"know {key} already (attempt {line['attempt']}): same key, done once"
        )
    if line["type"] == "lost":
        return Told(line["at"], "services", load, f"did {key}, and never answer")
    return None


def _said(load: str, body: str) -> str:
    said = next(iter(json.loads(body).values()))
    return f"“{str(said).removeprefix(f'Load {load}: ')}”"


def _short(load: str, key: str) -> str:
    for prefix, instead in ((f"tmr:{load}:", "timer "), (f"cancel tmr:{load}:", "cancel timer ")):
        if key.startswith(prefix):
            return instead + key.removeprefix(prefix).replace(":", "/")
    return key.replace(f"{load}/", "", 1)


def table(summary: Summary) -> Table:
    """The numbers at the end."""
    shown = Table(title="What happened", show_header=False, title_justify="left")
    rows = {
        "events accepted": summary.events,
        "turns": summary.turns,
        "dispatches": _counts(summary.dispatches),
        "timers": _counts(summary.timers),
        "retries": summary.retries,
        "alerts": summary.alerts,
        "dispatchers killed mid-send": summary.kills,
        "duplicates, known by their key": summary.duplicates,
    }
    for name, value in rows.items():
        shown.add_row(name, str(value))
    return shown


def _counts(counted: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counted.items()))
