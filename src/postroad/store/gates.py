"""Gates: a kind, or one host of it, that is down has a row here, and only probes are sent to it.

A row is locked by who settles after the outbox's rows, in the order of its key; who claims takes it only if nobody
holds it. A probe is the one claim whose token the row names; until that claim's lease is over nobody else tries.
"""

from collections.abc import Collection, Sequence

import msgspec
from sqlalchemy import Connection

from postroad.model.gates import WHOLE_KIND, hold
from postroad.model.payload import safe_error
from postroad.model.rows import Hold, NewAlert, Settlement
from postroad.store import alerts, audit
from postroad.store.audit import Operator
from postroad.store.statements import Statement, as_json

LISTED_MAX = 1_000
# Of a row `o` that was claimed under a token: whether it may be a probe. Its gate says so once it is settled.
PROBED = (
    "(SELECT 1 FROM {p}gates AS g WHERE g.probe = :token AND g.host IN ('', coalesce(o.host, '')) LIMIT 1) AS probed"
)

_OF = Statement("SELECT host, until FROM {p}gates WHERE kind = :kind")
_LOCK = Statement("""
SELECT g.kind, g.host, g.failures, g.probe FROM {rows:asked(kind text, host text)}
JOIN {p}gates AS g ON g.kind = asked.kind AND g.host = asked.host
ORDER BY g.kind, g.host {for_update}
""")
_FREE = Statement(
    "SELECT host FROM {p}gates WHERE kind = :kind AND host {in_list:hosts} AND until <= :now {skip_locked}"
)
_TRY = Statement("""
UPDATE {p}gates SET probe = :token, until = :until, updated_at = :now WHERE kind = :kind AND host {in_list:hosts}
""")
_CLOSE = Statement("""
INSERT INTO {p}gates (kind, host, until, closed_at, failures, reason, updated_at)
SELECT new.kind, new.host, new.until, :now, 1, new.reason, :now
FROM {rows:new(kind text, host text, until int, reason text)}
WHERE true ORDER BY new.kind, new.host ON CONFLICT (kind, host) DO NOTHING RETURNING kind, host
""")
_KEEP = Statement("""
UPDATE {p}gates AS g
SET until = kept.until, failures = kept.failures, reason = coalesce(kept.reason, g.reason), probe = NULL,
    updated_at = :now
FROM {rows:kept(kind text, host text, until int, failures int, reason text)}
WHERE g.kind = kept.kind AND g.host = kept.host
""")
_OPEN = Statement("""
DELETE FROM {p}gates WHERE kind = :kind AND host = :host RETURNING closed_at, failures, reason
""")
_TRIED_BY = Statement("""
SELECT g.kind, g.host, g.failures, g.probe FROM {rows:holds(subject text, token text)}
JOIN {p}outbox AS o ON o.id = holds.subject
JOIN {p}gates AS g ON g.kind = :kind AND g.host IN ('', coalesce(o.host, '')) AND g.probe = holds.token
ORDER BY g.kind, g.host {for_update}
""")
_FORGET = Statement("DELETE FROM {p}gates WHERE kind = :kind AND host {in_list:hosts}")
_LIST = Statement("""
SELECT kind, host, until, closed_at, failures, probe IS NOT NULL AS probing, reason FROM {p}gates
ORDER BY closed_at, kind, host LIMIT :limit
""")


class GateRow(msgspec.Struct, frozen=True, kw_only=True):
    """A closed gate; `host` '' is that of the kind as a whole. `failures`: attempts in a row that found it down."""

    kind: str
    host: str
    until: int
    closed_at: int
    failures: int
    probing: bool
    reason: str


class _Gate(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    host: str
    failures: int
    probe: str | None


def of(conn: Connection, kind: str) -> dict[str, int]:
    """The closed gates of a kind by host: until when nobody tries."""
    return {row.host: row.until for row in _OF(conn, kind=kind)}


def take(conn: Connection, kind: str, hosts: Sequence[str], *, token: str, until: int, now: int) -> bool:
    """Take these gates, whose time has come, for one probe; False if somebody else has one of them, or just had."""
    listed = as_json(sorted(set(hosts)))
    if len(_FREE(conn, kind=kind, hosts=listed, now=now).all()) < len(set(hosts)):
        return False
    _TRY(conn, kind=kind, hosts=listed, token=token, until=until, now=now)
    return True


def forget(conn: Connection, kind: str, hosts: Collection[str], *, now: int) -> None:
    """Forget hosts to which nothing is to be sent any more, once their time has come: nothing would ever try them."""
    free = _FREE(conn, kind=kind, hosts=as_json(sorted(hosts)), now=now).scalars() if hosts else []
    if free:
        _FORGET(conn, kind=kind, hosts=as_json(free))


def release(conn: Connection, kind: str, holds: Sequence[Hold], *, now: int) -> None:
    """Let gates of a kind be tried at once whose probes are given back: nothing of these had begun."""
    given = _TRIED_BY(conn, kind=kind, holds=as_json(holds)).into(_Gate)
    if given:
        _KEEP(conn, kept=as_json([_as_it_was(gate, now=now) for gate in given]), now=now)


def settle(conn: Connection, settlements: Sequence[Settlement], *, now: int) -> None:
    """What attempts say about gates, in the transaction that settles them.

    An unreachable destination closes its gate, or keeps it closed for longer if the attempt was the gate's probe. Any
    other result of a probe opens what it tried; one that was cut short, or that never reached its sender, is followed
    by another. Whoever has lost the claim says nothing.
    """
    telling = [each for each in settlements if each.probe or each.result == "unreachable"]
    if not telling:
        return
    held = _locked(conn, telling)
    kept: list[dict[str, object]] = []
    opened: list[_Gate] = []
    for each in telling:
        for host in dict.fromkeys((WHOLE_KIND, each.host or WHOLE_KIND)) if each.probe else ():
            gate = held.get((each.policy.kind, host))
            if gate is None or gate.probe != each.token:
                continue
            following = _following(gate, each, now=now)
            if following is None:
                opened.append(gate)
            else:
                kept.append(following)
    if kept:
        _KEEP(conn, kept=as_json(kept), now=now)
    for gate in opened:
        _OPEN(conn, kind=gate.kind, host=gate.host)
    _close(conn, [each for each in telling if each.result == "unreachable"], held, now=now)


def _locked(conn: Connection, telling: Sequence[Settlement]) -> dict[tuple[str, str], _Gate]:
    keys = {(each.policy.kind, host) for each in telling for host in (WHOLE_KIND, each.host or WHOLE_KIND, each.gate)}
    asked = [{"kind": kind, "host": host} for kind, host in sorted(keys)]
    return {(row.kind, row.host): row for row in _LOCK(conn, asked=as_json(asked)).into(_Gate)}


def _following(gate: _Gate, each: Settlement, *, now: int) -> dict[str, object] | None:
    """The gate as its probe's result leaves it; None: it is open."""
    if each.result == "unreachable" and gate.host == each.gate:
        failures, until, reason = gate.failures + 1, now + _hold(gate.failures + 1, each), safe_error(each.error)
        return {"kind": gate.kind, "host": gate.host, "until": until, "failures": failures, "reason": reason}
    return _as_it_was(gate, now=now) if each.unsent or each.result == "cut_short" else None


def _as_it_was(gate: _Gate, *, now: int) -> dict[str, object]:
    """The gate as if its probe had not been: the next one may follow at once."""
    return {"kind": gate.kind, "host": gate.host, "until": now, "failures": gate.failures, "reason": None}


def _hold(failures: int, each: Settlement) -> int:
    return max(hold(failures, each.fraction), each.floor)


def _close(
    conn: Connection, unreachable: Sequence[Settlement], held: dict[tuple[str, str], _Gate], *, now: int
) -> None:
    """Close the gates that are open yet, and tell people so. A closed one is its probes' affair."""
    new = {(each.policy.kind, each.gate): each for each in reversed(unreachable)}
    rows = [
        {"kind": kind, "host": host, "until": now + _hold(1, each), "reason": safe_error(each.error)}
        for (kind, host), each in sorted(new.items())
        if (kind, host) not in held
    ]
    closed = _CLOSE(conn, new=as_json(rows), now=now).all() if rows else []
    told = [
        NewAlert(
            severity="warning",
            code="gate.closed",
            subject=f"{row.kind} {row.host}".strip(),
            detail="sends are held, and cost no attempts, until it can be reached: "
            + safe_error(new[row.kind, row.host].error),
        )
        for row in closed
    ]
    alerts.raise_alerts(conn, told, now=now)


def open_(conn: Connection, kind: str, host: str, *, by: Operator, now: int) -> bool:
    """Open a gate by hand, audited; False if it is not closed. What finds it down still closes it again."""
    found = _OPEN(conn, kind=kind, host=host).one_or_none()
    if found is None:
        return False
    before = {"closed_at": found.closed_at, "failures": found.failures, "reason": found.reason}
    audit.record(conn, "gate.open", f"{kind} {host}".strip(), by=by, before=before, after={}, now=now)
    return True


def list_(conn: Connection, *, limit: int = LISTED_MAX) -> list[GateRow]:
    """The closed gates, the one that has been closed longest first."""
    rows = _LIST(conn, limit=limit).mappings()
    return [msgspec.convert({**row, "probing": bool(row["probing"])}, GateRow) for row in rows]
