"""Which due dispatches may be claimed: the oldest ones, unless a gate, a rate or a host's room holds some back.

Where nothing is held back this is one statement. Where something is, dispatches are looked up host by host, so that
one that is down or slow holds up no other; that costs a look at each host that has unfinished ones.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from typing import NamedTuple

from sqlalchemy import Connection

from postroad.model.gates import WHOLE_KIND
from postroad.model.rows import HostRoom, SendPolicy
from postroad.store import gates, moves, rates
from postroad.store.statements import Statement

HOSTS_MAX = 16  # in one pass; those that have waited longest
COLUMNS = moves.COLUMNS + ", o.version, o.body, o.headers, o.origin, o.created_at, o.host"
# Whoever finds something due is told so of lanes too; whoever finds nothing has to look.
_UNSEEN = "(SELECT 1 FROM {p}lane_members AS m WHERE m.kind = :kind AND m.fresh = 1 LIMIT 1) AS unseen"
_IS_DUE = (
    "o.kind = :kind AND o.status IN ('pending', 'delivering') AND o.due_at <= :now "
    "AND (:takeover = 1 OR o.status = 'pending') AND o.version <= :version "
)

# Rows are chosen and locked here and changed by their ids in a later statement: as one statement, a plan may
# run the choice again for each row and claim more than the limit. Rows that newer code has written are left to it:
# in a rolling update, or after one is taken back, older code could only spend their attempts.
_OLDEST = Statement(
    "SELECT " + COLUMNS + ", " + _UNSEEN + " FROM {p}outbox AS o WHERE " + _IS_DUE + "AND "
    "(:gated = '' OR (SELECT 1 FROM {p}gates AS g WHERE g.kind = :gated LIMIT 1) IS NULL) "
    "ORDER BY o.due_at LIMIT :limit {skip_locked}"
)
_OF_HOST = Statement(
    "SELECT " + COLUMNS + ", " + _UNSEEN + " FROM {p}outbox AS o WHERE " + _IS_DUE + "AND o.host = :host "
    "AND o.due_at IS NOT NULL ORDER BY o.due_at LIMIT :limit {skip_locked}"
)
_OF_NO_HOST = Statement(
    "SELECT " + COLUMNS + ", " + _UNSEEN + " FROM {p}outbox AS o WHERE " + _IS_DUE + "AND o.host IS NULL "
    "AND o.due_at IS NOT NULL ORDER BY o.due_at LIMIT :limit {skip_locked}"
)
# From one host to the next in the index, then each one's first that is due, if any is. "Unfinished" is said as the
# index says it.
_UNFINISHED = "o.kind = :kind AND o.status IN ('pending', 'delivering') AND o.due_at IS NOT NULL AND o.host IS NOT NULL"
_HOSTS = Statement(f"""
WITH RECURSIVE hosts(host) AS (
    SELECT (SELECT o.host FROM {{p}}outbox AS o WHERE {_UNFINISHED} ORDER BY o.kind, o.host LIMIT 1)
    UNION ALL
    SELECT (SELECT o.host FROM {{p}}outbox AS o WHERE {_UNFINISHED} AND o.host > hosts.host
            ORDER BY o.kind, o.host LIMIT 1)
    FROM hosts WHERE hosts.host IS NOT NULL
)
SELECT host, head FROM (
    SELECT host, (
        SELECT o.due_at FROM {{p}}outbox AS o WHERE {_UNFINISHED} AND o.host = hosts.host AND o.due_at <= :now
        AND (:takeover = 1 OR o.status = 'pending') AND o.version <= :version ORDER BY o.due_at LIMIT 1
    ) AS head FROM hosts WHERE host IS NOT NULL
) AS heads
""")


class Due(moves.Standing, frozen=True, kw_only=True, array_like=True):
    """A dispatch that is due, with what its sender needs."""

    version: int
    body: str
    headers: str
    origin: str
    created_at: int
    host: str | None
    unseen: int | None = None
    probed: int | None = None


class Ready(NamedTuple):
    """Due dispatches, locked; `closed`: the gates that must be taken for a probe, where they concern one of these.

    `again_at`: there are others, which may go then. `limits`: the rates under which these may start, by what they are
    kept for; `waits`: their kind's rate holds back others.
    """

    rows: list[Due]
    closed: frozenset[str] = frozenset()
    again_at: int | None = None
    limits: tuple[rates.Limits, ...] = ()
    waits: bool = False

    def start(self, rows: Sequence[Due]) -> int | None:
        """Count the attempts that start against their rates: those of these rows. When there are others that may go."""
        again_at = self.again_at
        for limits in self.limits:
            numbers = Counter(row.host for row in rows)
            limits.start({host: numbers[host] if host else len(rows) for host in limits.hosts})
            if self.waits and WHOLE_KIND in limits.hosts:
                again_at = limits.again(WHOLE_KIND)
        return again_at


class _Look(NamedTuple):
    """What is looked for: due dispatches of a kind, under any of its names."""

    policy: SendPolicy
    names: Sequence[str]
    takeover: bool
    now: int

    def of(self, statement: Statement, conn: Connection, name: str, limit: int, **more: str) -> list[Due]:
        parameters = {"takeover": int(self.takeover), "version": self.policy.version, "now": self.now}
        return statement(conn, kind=name, limit=limit, **parameters, **more).into(Due) if limit > 0 else []

    def oldest(self, conn: Connection, limit: int, *, gated: str) -> list[Due]:
        rows: list[Due] = []
        for name in self.names:
            rows += self.of(_OLDEST, conn, name, limit - len(rows), gated=gated)
        return rows


def find(
    conn: Connection,
    policy: SendPolicy,
    names: Sequence[str],
    limit: int,
    *,
    room: HostRoom | None,
    takeover: bool,
    now: int,
) -> Ready:
    """Due dispatches of a kind, as many as there is room for, of each host the oldest first."""
    look = _Look(policy, names, takeover, now)
    limited = policy.rate is not None or policy.rate_per_host is not None or room is not None
    rows = [] if limited else look.oldest(conn, limit, gated=policy.kind)
    if rows:
        return Ready(rows)
    closed = gates.of(conn, policy.kind)
    return _find_held(conn, look, limit, room, closed) if closed or limited else Ready([])


def _find_held(conn: Connection, look: _Look, limit: int, room: HostRoom | None, closed: dict[str, int]) -> Ready:
    """What may go of a kind of which something may not."""
    policy, now = look.policy, look.now
    free = limit
    if closed.get(WHOLE_KIND, 0) > now:
        return Ready([])
    if WHOLE_KIND in closed:
        free = 1
    of_kind = None if policy.rate is None else rates.Limits(conn, policy.kind, [WHOLE_KIND], policy.rate, now=now)
    if of_kind is not None:
        free = min(free, of_kind.allowed(WHOLE_KIND))
        if free == 0:
            return Ready([], again_at=of_kind.again(WHOLE_KIND))
    by_host = policy.rate_per_host is not None or room is not None or closed.keys() - {WHOLE_KIND}
    if by_host:
        found = _by_host(conn, look, room, free, closed)
    else:
        found = Ready(look.oldest(conn, free, gated=""))
    if of_kind is not None:
        waits = found.again_at is None and len(found.rows) == free < limit
        found = found._replace(limits=(of_kind, *found.limits), waits=waits)
    # Once more, now that the rows are locked: of what an attempt has given back just now, others have closed the gate.
    return found._replace(closed=frozenset(gates.of(conn, policy.kind))) if found.rows else found


def _by_host(conn: Connection, look: _Look, room: HostRoom | None, free: int, closed: dict[str, int]) -> Ready:
    policy, now = look.policy, look.now
    waiting = rates.waiting(conn, policy.kind, now=now) if policy.rate_per_host is not None else {}
    waiting.pop(WHOLE_KIND, None)
    parameters = {"takeover": int(look.takeover), "version": policy.version, "now": now}
    found = [(name, row) for name in look.names for row in _HOSTS(conn, kind=name, **parameters)]
    heads = sorted((row.head, name, row.host) for name, row in found if row.head is not None)
    gates.forget(conn, policy.kind, closed.keys() - {WHOLE_KIND, *(row.host for _, row in found)}, now=now)
    rooms = {host: _room(host, room, free, closed) for _, _, host in heads if closed.get(host, 0) <= now}
    open_ = [(name, host) for _, name, host in heads if rooms.get(host, 0) > 0 and host not in waiting]
    chosen = open_[:HOSTS_MAX]
    limits = None
    if policy.rate_per_host is not None and chosen:
        hosts = sorted({host for _, host in chosen})
        limits = rates.Limits(conn, policy.kind, hosts, policy.rate_per_host, now=now)
        rooms = {host: min(rooms[host], limits.allowed(host)) for host in hosts}
    of_none = [look.of(_OF_NO_HOST, conn, name, free) for name in look.names]
    of_hosts = [look.of(_OF_HOST, conn, name, min(free, rooms[host]), host=host) for name, host in chosen]
    rows = _in_turn(sorted(filter(None, [*of_none, *of_hosts]), key=_waits_since), rooms, free)
    again_at = _again(look, heads, waiting, more=bool(rows) and len(open_) > len(chosen))
    return Ready(rows, again_at=again_at, limits=() if limits is None else (limits,))


def _waits_since(found: Sequence[Due]) -> int:
    """Since when the first of these is due: where one at a time is free, nobody is always the first to be asked."""
    return found[0].due_at or 0


def _room(host: str, room: HostRoom | None, free: int, closed: Mapping[str, int]) -> int:
    """How many may go to a host whose gate, if it has one, is to be tried."""
    if host in closed:
        return 1
    return free if room is None else min(free, room.of(host))


def _in_turn(found: Sequence[Sequence[Due]], rooms: dict[str, int], free: int) -> list[Due]:
    """One of each in turn, until nothing is free; a kind's former names share the rooms of their hosts."""
    left = dict(rooms)
    rows: list[Due] = []
    for row in chain.from_iterable(zip_longest(*found)):
        if row is None or len(rows) == free or (row.host is not None and left[row.host] == 0):
            continue
        if row.host is not None:
            left[row.host] -= 1
        rows.append(row)
    return rows


def _again(look: _Look, heads: Sequence[tuple[int, str, str]], waiting: dict[str, int], *, more: bool) -> int | None:
    """When others may go: at once those of further hosts, later those that their hosts' rates hold back."""
    if more:
        return look.now
    rate = look.policy.rate_per_host
    held = [waiting[host] for _, _, host in heads if host in waiting]
    return None if rate is None or not held else rates.again(min(held), rate)
