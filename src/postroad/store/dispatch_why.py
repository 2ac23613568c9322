"""Why a dispatch is not moving, in one sentence."""

from collections.abc import Mapping

import msgspec
from sqlalchemy import Connection

from postroad.model.clock import SECOND, moment
from postroad.model.errors import shown
from postroad.model.lifecycle import Reason, Status
from postroad.store import dispatch_views, transitions
from postroad.store.statements import Row, Statement, as_json

_BEFORE = Statement("""
SELECT first.dispatch, o.key, o.status,
    (SELECT count(*) FROM {p}lane_members AS m WHERE m.lane = own.lane AND m.number < own.number) AS number
FROM {p}lane_members AS own
JOIN {p}lane_members AS first ON first.lane = own.lane AND first.number < own.number
LEFT JOIN {p}outbox AS o ON o.id = first.dispatch
WHERE own.dispatch = :id ORDER BY first.number LIMIT 1
""")
_GATE = Statement("""
SELECT host, until, reason, probe FROM {p}gates
WHERE kind = :kind AND host IN ('', :host) AND until > :now ORDER BY until DESC LIMIT 1
""")
_LAST_WORD = Statement("""
SELECT reason_code, actor, metadata, at FROM {p}transitions
WHERE entity = :id AND reason_code IN (SELECT value FROM {list:reasons}) ORDER BY id DESC LIMIT 1
""")
ERROR_CHARACTERS = 200
_UNSENT = "nothing of it was sent, resolve it with --resend"
_HOW_TO_RESOLVE = "look at its destination, then resolve it with --sent, --resend or --discard"


class Takes(msgspec.Struct, frozen=True):
    """What an app carries out: kind to the newest version that it knows."""

    versions: Mapping[str, int]


def why(conn: Connection, id_or_key: str, *, takes: Takes | None = None, now: int) -> str:
    """One sentence on why a dispatch, named by id or key, is not moving; `takes`: as far as this app goes."""
    row = dispatch_views.find(conn, id_or_key)
    if row is None:
        return f"There is no dispatch {id_or_key}."
    match Status(row.status):
        case Status.PENDING:
            return _pending(conn, row, takes, now=now)
        case Status.DELIVERING:
            return _delivering(row, now=now)
        case Status.DEAD_LETTER:
            return _dead(conn, row)
        case Status.EXPIRED:
            return f"Expired by {row.reason} at {_at(row.updated_at)}{_error(row)}{_arrived(conn, row)}."
        case Status.DELIVERED | Status.ACKED:
            return f"Finished: {row.status} at {_at(row.updated_at)}."


def _pending(conn: Connection, row: Row, takes: Takes | None, *, now: int) -> str:
    if row.expires_at is not None and row.expires_at <= now:
        return f"Its deadline passed at {_at(row.expires_at)}; the next pump or dispatcher ends it."
    if row.due_at is None:
        return _in_lane(conn, row)
    if row.reason == Reason.TRANSPORT_OK:
        return _awaiting_ack(row)
    if row.due_at > now:
        return _not_due(conn, row, now=now)
    return _held(conn, row, now=now) or _not_taken(row, takes, now=now)


def _in_lane(conn: Connection, row: Row) -> str:
    lane = f"its lane {shown(row.lane)}" if row.lane else "its lane"
    before = _BEFORE(conn, id=row.id).one_or_none()
    if before is None:
        return f"It waits in {lane} for the one before it."
    first = f"{before.key} ({before.dispatch}), {before.status or 'purged'}"
    if before.number == 1:
        return f"It waits in {lane} for the one before it: {first}."
    return f"It waits in {lane} behind {before.number} others, the first of them {first}."


def _awaiting_ack(row: Row) -> str:
    last = row.max_attempts is not None and row.attempt >= row.max_attempts
    then = "then it is given up" if last else "then it is sent again"
    return f"Sent by {_attempt(row)}; its acknowledgement is waited for until {_at(row.due_at)}, {then}."


def _not_due(conn: Connection, row: Row, *, now: int) -> str:
    when = f"until {_at(row.due_at)}, due in {_seconds(row.due_at - now)}"
    if row.attempt == 0:
        return f"It waits for its time {when}."
    return f"Backing off {when}, after {_attempt(row)}{_error(row)}{_arrived(conn, row)}."


def _held(conn: Connection, row: Row, *, now: int) -> str:
    gate = _GATE(conn, kind=row.kind, host=row.host or "", now=now).one_or_none()
    if gate is None:
        return ""
    what = f"to host {gate.host} of kind {row.kind}" if gate.host else f"of kind {row.kind}"
    said = f": {_first_line(gate.reason)}" if gate.reason else ""
    if gate.probe is not None:
        return f"All sends {what} are held while one of them is tried{said}."
    return f"All sends {what} are held until one of them is tried at {_at(gate.until)}{said}."


def _not_taken(row: Row, takes: Takes | None, *, now: int) -> str:
    since = f"Due for {_seconds(now - row.due_at)}, but no dispatcher has taken kind {row.kind}"
    if takes is None:
        written = f", version {row.version}," if row.version > 1 else ""
        return f"{since}{written} since."
    known = takes.versions.get(row.kind)
    if known is None:
        return f"{since} since: this app carries out no dispatches of it."
    if known < row.version:
        return f"{since} since: it was written as version {row.version}, this app knows it up to {known}."
    return f"{since} since: is a dispatcher of this app running?"


def _delivering(row: Row, *, now: int) -> str:
    if row.due_at > now:
        return f"Delivering: {_attempt(row)} runs under a lease until {_at(row.due_at)}."
    return f"The lease of {_attempt(row)} was over at {_at(row.due_at)}; the next dispatcher of {row.kind} takes it."


def _dead(conn: Connection, row: Row) -> str:
    since = _at(row.updated_at)
    if row.reason in transitions.RESOLVED:
        word = _LAST_WORD(conn, id=row.id, reasons=as_json(sorted(transitions.RESOLVED))).one()
        return f"Resolved as {row.reason.rpartition('.')[2]} by {word.actor} at {_at(word.at)}; dead since {since}."
    arrived = _arrived(conn, row)
    if row.reason == Reason.UNKNOWN_OUTCOME and not arrived and (word := _unsent(conn, row)):
        return f"Parked since {since}, but {_attempt(row)} had not begun, as was heard at {_at(word.at)}: {_UNSENT}."
    if row.reason == Reason.UNKNOWN_OUTCOME and not arrived:
        return f"Parked since {since}, since it may have arrived{_error(row)}: {_HOW_TO_RESOLVE}."
    return f"Dead by {row.reason} since {since}{_error(row)}{arrived}."


def _arrived(conn: Connection, row: Row) -> str:
    late = _LAST_WORD(conn, id=row.id, reasons=as_json([Reason.STALE_OK])).one_or_none()
    return f"; an attempt whose claim was over has sent it, as was heard at {_at(late.at)}" if late else ""


def _unsent(conn: Connection, row: Row) -> Row | None:
    """The word that the last attempt was lost before it had begun."""
    word = _LAST_WORD(conn, id=row.id, reasons=as_json([Reason.STALE_UNSENT])).one_or_none()
    own = {"attempt": row.attempt, "epoch": row.epoch}
    return word if word is not None and msgspec.json.decode(word.metadata) == own else None


def _attempt(row: Row) -> str:
    return f"attempt {row.attempt} of {row.max_attempts}" if row.max_attempts else f"attempt {row.attempt}"


def _error(row: Row) -> str:
    return f": {_first_line(row.last_error)}" if row.last_error else ""


def _first_line(said: str) -> str:
    """What a sentence has room for: what follows, if anything, is a traceback, or somebody's page of HTML."""
    line = next(iter(said.splitlines()), "")
    return line if len(line) <= ERROR_CHARACTERS else line[: ERROR_CHARACTERS - 1] + "…"


def _at(stamp: int) -> str:
    return moment(stamp).isoformat(timespec="seconds")


def _seconds(length: int) -> str:
    return f"{length / SECOND:.0f} s"
