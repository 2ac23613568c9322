"""Rates: how many attempts of a kind, or to one host of it, may start now, over all processes.

Who claims locks what it needs in the order of kind and host, so that two wait for each other in one direction only.
"""

from collections.abc import Mapping, Sequence

from sqlalchemy import Connection

from postroad.model import gates as limits
from postroad.model.clock import SECOND
from postroad.store.statements import Statement, as_json

IDLE = 60 * SECOND  # after that long a row says nothing any more

_OF = Statement("SELECT host, next_at FROM {p}rates WHERE kind = :kind AND next_at > :now")
_MAKE = Statement("""
INSERT INTO {p}rates (kind, host, next_at) SELECT :kind, value, 0 FROM {list:hosts} WHERE true ORDER BY value
ON CONFLICT (kind, host) DO NOTHING
""")
_LOCK = Statement("""
SELECT host, next_at FROM {p}rates WHERE kind = :kind AND host {in_list:hosts} ORDER BY host {for_update}
""")
_NEXT = Statement("""
UPDATE {p}rates SET next_at = moved.next_at FROM {rows:moved(host text, next_at int)}
WHERE kind = :kind AND {p}rates.host = moved.host
""")
_FORGET = Statement("DELETE FROM {p}rates WHERE next_at < :before")


class Limits:
    """The rates of a kind as a whole (host ''), or of some of its hosts, locked by this transaction until it ends."""

    def __init__(self, conn: Connection, kind: str, hosts: Sequence[str], rate: float, *, now: int) -> None:
        self._conn, self._kind, self._rate, self._now = conn, kind, rate, now
        listed = as_json(sorted(hosts))
        found = _LOCK(conn, kind=kind, hosts=listed).all()
        if len(found) < len(hosts):
            _MAKE(conn, kind=kind, hosts=listed)
            found = _LOCK(conn, kind=kind, hosts=listed).all()
        self._next = {row.host: row.next_at for row in found}

    def allowed(self, host: str) -> int:
        """How many attempts may start now."""
        return limits.allowed(self._next[host], self._rate, now=self._now)

    @property
    def hosts(self) -> list[str]:
        """What these rates are kept for."""
        return list(self._next)

    def again(self, host: str) -> int:
        """When to look again at what this rate holds back."""
        return again(self._next[host], self._rate)

    def start(self, numbers: Mapping[str, int]) -> None:
        """Count attempts that start now, by host."""
        moved = {
            host: limits.after(self._next[host], self._rate, number, now=self._now)
            for host, number in sorted(numbers.items())
            if number
        }
        if moved:
            self._next |= moved
            rows = [{"host": host, "next_at": at} for host, at in moved.items()]
            _NEXT(self._conn, kind=self._kind, moved=as_json(rows))


def waiting(conn: Connection, kind: str, *, now: int) -> dict[str, int]:
    """Of a kind what may start no attempt now, and when it may; nothing is locked."""
    return {row.host: row.next_at for row in _OF(conn, kind=kind, now=now)}


def again(next_at: int, rate: float) -> int:
    """When to look again at what may start its next attempt at `next_at`: for several, where the rate is high."""
    return next_at + limits.saved(rate)


def forget(conn: Connection, *, now: int) -> int:
    """Delete the rows of what has long been idle; their number."""
    return _FORGET(conn, before=now - IDLE).rowcount
