"""What somebody who copies logs asks: in which streams of a type something was recorded lately, and which there are.

A log grows in the commit that ends a run, and in no other way. So whoever knows every run that has begun, and has seen
it end, knows every stream that has grown, without a look at the others.
"""

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import Connection

from postroad.model import ids
from postroad.store import dialects
from postroad.store.statements import Statement, as_json


class Happening(NamedTuple):
    """A run, or a stream's deletion: what it is called, when it began (microseconds), and whether it is over."""

    at: int
    name: str
    stream: str
    over: bool


class Place(NamedTuple):
    """Behind which happening to read on: its time, and what it is called; '' before all of that time."""

    at: int
    name: str = ""


class Glance(NamedTuple):
    """What has happened since, oldest first; and which of the runs that were asked for have not ended."""

    runs: list[Happening]
    deletions: list[Happening]
    running: set[str]


# As `coalesce` no index by stream is offered for the type: it would be walked from the first run of all.
_OF_TYPE = "coalesce({name}, '-') > :first AND coalesce({name}, '-') < :end"
_RUNS = Statement(
    "SELECT r.started_at AS at, r.run_id AS name, r.stream AS stream, r.ended_at IS NOT NULL AS over "
    "FROM {p}runs AS r WHERE r.started_at >= :at AND (r.started_at > :at OR r.run_id > :name) AND "
    + _OF_TYPE.format(name="r.stream")
    + " "
    "ORDER BY r.started_at, r.run_id LIMIT :limit"
)
_DELETIONS = Statement(
    "SELECT s.deleted_at AS at, s.id AS name, s.id AS stream, 1 AS over "
    "FROM {p}streams AS s WHERE s.deleted_at IS NOT NULL AND s.deleted_at >= :at "
    "AND (s.deleted_at > :at OR s.id > :name) AND "
    + _OF_TYPE.format(name="s.id")
    + " ORDER BY s.deleted_at, s.id LIMIT :limit"
)
_RUNNING = Statement("SELECT run_id FROM {p}runs WHERE run_id {in_list:names} AND ended_at IS NULL")
_CLAIMED = Statement(
    "SELECT stream, claim_token FROM {p}queues WHERE type = :type AND until IS NOT NULL AND state = 'claimed'"
)
_LAST_RUN = Statement(
    "SELECT r.started_at FROM {p}runs AS r WHERE r.started_at >= 0 ORDER BY r.started_at DESC LIMIT 1"
)
_LAST_DELETION = Statement(
    "SELECT s.deleted_at FROM {p}streams AS s WHERE s.deleted_at IS NOT NULL AND s.deleted_at >= 0 "
    "ORDER BY s.deleted_at DESC LIMIT 1"
)
_NAMES = Statement("SELECT s.id FROM {p}streams AS s WHERE s.id > :after AND s.id < :end ORDER BY s.id LIMIT :limit")
_KNOWN = Statement("SELECT s.id FROM {p}streams AS s WHERE s.id {in_list:names}")


class Start(NamedTuple):
    """Where to begin: the last run and the last deletion of all (microseconds), and the runs that are under way."""

    run_at: int
    deletion_at: int
    running: dict[str, str]


def start(conn: Connection, stream_type: str) -> Start:
    """Where whoever looks from now on begins; what stands in the logs by now is found by `names`."""
    dialects.distrust_statistics(conn)
    claimed = _CLAIMED(conn, type=stream_type)
    return Start(
        run_at=_LAST_RUN(conn).scalar_one_or_none() or 0,
        deletion_at=_LAST_DELETION(conn).scalar_one_or_none() or 0,
        running={ids.run_id(row.claim_token, row.stream): row.stream for row in claimed},
    )


def glance(
    conn: Connection, stream_type: str, *, runs: Place, deletions: Place, running: Sequence[str], limit: int
) -> Glance:
    """What has begun behind these places, at most `limit` of each kind, and which of those runs still go on."""
    dialects.distrust_statistics(conn)
    return Glance(
        runs=_happenings(_RUNS, conn, stream_type, runs, limit),
        deletions=_happenings(_DELETIONS, conn, stream_type, deletions, limit),
        running=set(_RUNNING(conn, names=as_json(running)).scalars()) if running else set(),
    )


def names(conn: Connection, stream_type: str, *, after: str, limit: int) -> list[str]:
    """The next streams of a type by name, deleted ones too."""
    dialects.distrust_statistics(conn)
    first, end = _range(stream_type)
    found: list[str] = _NAMES(conn, after=max(after, first), end=end, limit=limit).scalars()
    return found


def unknown(conn: Connection, streams: Sequence[str]) -> list[str]:
    """Those of the streams that this database has never had an entry of, nor a deletion."""
    known = set(_KNOWN(conn, names=as_json(streams)).scalars()) if streams else set()
    return [name for name in streams if name not in known]


def _happenings(statement: Statement, conn: Connection, of_type: str, place: Place, limit: int) -> list[Happening]:
    first, end = _range(of_type)
    found = statement(conn, at=place.at, name=place.name, first=first, end=end, limit=limit)
    return [Happening(row.at, row.name, row.stream, bool(row.over)) for row in found]


def _range(stream_type: str) -> tuple[str, str]:
    """Between which two texts the names of a type's streams are."""
    return f"{stream_type}/", f"{stream_type}0"  # "0" follows "/"
