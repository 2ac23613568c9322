"""What the reading commands show to people."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from postroad.model.dispatches import Changed, DispatchRow
from postroad.model.streams import StreamRow
from postroad.store.status import Bounded, Snapshot
from postroad.store.stream_views import LOOKED_AT_MAX
from postroad.surfaces.dispatch_reading import Attempt, DispatchView
from postroad.surfaces.gate_reading import GateView
from postroad.surfaces.output import length, say, say_folded, say_lines, say_title, show_table, when
from postroad.surfaces.reading import StreamView

DATA_CHARACTERS = 100
SUMMARY_CHARACTERS = 160
ERROR_LINES = 40


def status(found: Snapshot) -> None:
    """How things stand, in a screenful."""
    show_table(("", ""), _overview(found))
    if found.kinds:
        say_title("unfinished dispatches")
        show_table(
            ("kind", "pending", "delivering", "oldest"),
            [
                (kind.kind, _count(Bounded(kind.pending, kind.more)), kind.delivering, length(kind.oldest_age))
                for kind in found.kinds
            ],
        )
    _counted("trouble in the last hour", found.trouble)
    _counted("runs in the last hour that did not commit", found.runs_ended)
    _counted("streams with the most conflicts", {one.stream: one.count for one in found.conflicted})
    if found.parked:
        say_title("parked streams, waiting for a person")
        for stream in found.parked:
            say(stream)


def _overview(found: Snapshot) -> list[tuple[str, str]]:
    waiting, runs = found.events_waiting, found.runs
    return [
        ("events waiting", _count(waiting) + _oldest(found.oldest_event_age, waiting.count)),
        ("events dead", _count(found.events_dead)),
        *((f"dispatches {name}", str(count)) for name, count in found.dispatches.items()),
        ("oldest dispatch", length(found.oldest_dispatch_age) if found.kinds else "none"),
        ("dead letters, last hour", str(found.dead_lately)),
        ("expired, last hour", str(found.expired_lately)),
        ("claims lost, last hour", str(found.lease_losses_lately)),
        ("stale results, last hour", str(found.stale_settles_lately)),
        ("oldest overdue timer", length(found.pump_lag) if found.pump_lag else "none"),
        ("runs, last hour", f"{_count(runs)}, {found.conflict_rate:.1%} conflicts"),
        ("alerts not rung yet", _count(found.alerts_unrung)),
    ]


def _count(bounded: Bounded) -> str:
    return f"{bounded.count} or more" if bounded.more else str(bounded.count)


def _oldest(age: int, count: int) -> str:
    return f", the oldest for {length(age)}" if count else ""


def _counted(title: str, counts: dict[str, int]) -> None:
    if counts:
        say_title(title)
        most_first = sorted(counts.items(), key=lambda item: item[1], reverse=True)
        show_table(("", ""), most_first)


def gates(found: Sequence[GateView]) -> None:
    """The closed gates."""
    if not found:
        say("(every gate is open)")
        return
    rows = [
        (gate.kind, gate.host or "(the whole kind)", when(gate.closed_at), gate.failures,
         "now" if gate.probing else when(gate.until), _short(gate.reason))
        for gate in found
    ]  # fmt: skip
    show_table(("kind", "host", "closed", "tried in vain", "next attempt", "reason"), rows)


def streams(found: Sequence[StreamRow], *, limit: int) -> None:
    """A table of streams, and how to see those behind it."""
    if not found:
        say("(no streams)")
        return
    rows = [
        (one.stream, f"{one.state}, deleted" if one.deleted_at else one.state, one.version,
         _at_least(len(one.waiting)), when(one.waiting[0].received_at if one.waiting else None), one.dead, one.why)
        for one in found
    ]  # fmt: skip
    show_table(("stream", "state", "entries", "waiting", "since", "dead", "why"), rows)
    if len(found) == limit:
        say(f"There may be more: --after {found[-1].stream}")


def _at_least(waiting: int) -> str:
    return f"{waiting} or more" if waiting == LOOKED_AT_MAX else str(waiting)


def stream(found: StreamView) -> None:
    """A stream with what is in it."""
    deleted = f", deleted at {_when(found.deleted_at)}" if found.deleted_at else ""
    say_title(f"{found.stream}: {found.version} entries{deleted}")
    say(_held(found.queue))
    if found.why:
        say(found.why)
    _events("log", found.entries, ("seq", "recorded_at"))
    _events("waiting events", found.waiting, ("position", "received_at"))
    _events("dead events", found.dead, ("position", "received_at"), reason=True)
    if found.runs:
        say_title("runs")
        show_table(
            ("started", "ended", "attempt", "end", "turn", "error"),
            [
                (
                    _when(r["started_at"]),
                    _when(r["ended_at"]),
                    r["attempt"],
                    r["end"] or "under way",
                    r["turn_id"],
                    _short(r["error"]),
                )
                for r in found.runs
            ],
        )
    _operations(found.operations)


def _operations(rows: Sequence[dict[str, Any]]) -> None:
    """Tool calls, newest first; what they got and gave as far as it fits."""
    if not rows:
        return
    say_title("tool calls")
    show_table(
        ("started", "ended", "tool", "effect", "status", "arguments", "result"),
        [
            (_when(row["started_at"]), _when(row["ended_at"]), row["tool"], row["effect"], row["status"],
             _data(row["arguments"]), _data(row["result"] or b""))
            for row in rows
        ],
    )  # fmt: skip


def _held(queue: dict[str, Any] | None) -> str:
    if queue is None:
        return "nobody holds it"
    until = f" until {_when(queue['until'])}" if queue["until"] else ", waiting for a person"
    match queue["state"]:
        case "claimed":
            return f"claimed{until}, attempt {queue['attempts']}"
        case "backoff":
            return f"backing off{until}, after attempt {queue['attempts']}"
        case "ready":
            return "ready for its next turn"
        case state:
            return f"{state}{until}"


def _events(title: str, rows: Sequence[dict[str, Any]], names: tuple[str, str], *, reason: bool = False) -> None:
    if not rows:
        return
    say_title(title)
    place, time = names
    id_name = "key" if "key" in rows[0] else "event_id"
    show_table(
        (place, time.removesuffix("_at"), "kind", "key", *(("reason",) if reason else ()), "data"),
        [
            (r[place], _when(r[time]), r["kind"], r[id_name], *((r["reason"],) if reason else ()), _data(r["data"]))
            for r in rows
        ],
    )


def _when(iso: str | None) -> str:
    return when(None if iso is None else datetime.fromisoformat(iso))


def _data(raw: Any) -> str:
    text = raw if isinstance(raw, str) else bytes(raw).decode()
    return text if len(text) <= DATA_CHARACTERS else text[: DATA_CHARACTERS - 1] + "…"


def dispatches(found: Sequence[DispatchRow], *, limit: int) -> None:
    """A table of dispatches, and how to see those behind it."""
    if not found:
        say("(no dispatches)")
        return
    show_table(
        ("key", "kind", "to", "status", "attempt", "due", "created", "last error"),
        [
            (row.key, row.kind, row.to, row.status, _attempt(row), when(row.due_at), when(row.created_at),
             _short(row.last_error))
            for row in found
        ],
    )  # fmt: skip
    if len(found) == limit:
        say(f"There may be more: --after {found[-1].cursor}")


def dispatch(found: DispatchView) -> None:
    """A dispatch with its attempts, its history and its body, and why it is not moving."""
    row = found.row
    say_title(row.key)
    say(found.why)
    show_table(("", ""), _about(found))
    if found.attempts:
        say_title("attempts")
        show_table(
            ("attempt", "epoch", "started", "ended", "what came of it"),
            [
                (
                    a.number,
                    a.epoch,
                    when(a.started_at),
                    when(a.ended_at),
                    _short(_came_of(a)),
                )
                for a in found.attempts
            ],
        )
    say_title("history")
    show_table(
        ("at", "from", "to", "reason", "summary", "by"),
        [
            (when(c["at"]), c["from_status"], c["to_status"], c["reason_code"], _short(c["summary"]),
             f"{c['source']} {c['actor']}".strip())
            for c in row.history
        ],
    )  # fmt: skip
    if row.last_error and row.last_error != _short(row.last_error):
        say_title("last error")
        say_folded(row.last_error, lines_max=ERROR_LINES)
    if any(_short(said).endswith("…") for said in _in_tables(found)):
        say("(What ends with … is longer than a table has room for: --json has all of it.)")
    cut = f", the first {len(found.body)} characters" if len(found.body.encode()) < found.body_size else ""
    say_title(f"body ({found.body_size} bytes{cut})")
    say_lines(found.body)


def _in_tables(found: DispatchView) -> list[str]:
    """What of a dispatch may be too long for a table."""
    told = [str(change["summary"]) for change in found.row.history]
    return [*map(_came_of, found.attempts), *told, found.receipt or ""]


def _came_of(attempt: Attempt) -> str:
    return "; ".join(filter(None, (attempt.summary, attempt.late)))


def _about(found: DispatchView) -> list[tuple[str, object]]:
    """What is known of a dispatch; what it has not is left out."""
    row = found.row
    horizon = None if found.horizon_seconds is None else length(round(found.horizon_seconds * 1_000_000))
    rows: list[tuple[str, object]] = [
        ("id", row.id),
        ("kind", row.kind if row.version == 1 else f"{row.kind}, version {row.version}"),
        ("to", row.to),
        ("stream", row.stream),
        ("status", row.status),
        ("reason", row.reason),
        ("attempts", _attempt(row) + (f", epoch {row.epoch}" if row.epoch else "")),
        ("retry horizon", horizon),
        ("created", when(row.created_at)),
        ("due", when(row.due_at)),
        ("expires", when(row.expires_at)),
        ("lane", row.lane),
        ("acknowledgement", "asked for" if row.ack_required else ""),
        ("origin", " ".join(f"{name}={value}" for name, value in row.origin.items())),
        ("receipt", _short(found.receipt)),
        ("last error", _short(row.last_error)),
    ]
    return [(name, value) for name, value in rows if value]


def changed(found: Changed, *, sample: bool) -> None:
    """What a command came to; of a dry run some of what is meant."""
    say(found.said)
    for why, number in found.refused.items():
        say(f"{number} left as they are: {why}")
    if sample and found.sample:
        show_table(
            ("key", "kind", "to", "status", "created", "reason"),
            [(row.key, row.kind, row.to, row.status, when(row.created_at), row.reason) for row in found.sample],
        )


def _short(said: str | None) -> str:
    """What a table's column has room for, of its first line; what is left out is told elsewhere, and by --json."""
    whole = (said or "").strip()
    line = next(iter(whole.splitlines()), "")
    return whole if len(whole) <= SUMMARY_CHARACTERS and line == whole else line[: SUMMARY_CHARACTERS - 1] + "…"


def _attempt(row: DispatchRow) -> str:
    return str(row.attempt) if row.max_attempts is None else f"{row.attempt} of {row.max_attempts}"
