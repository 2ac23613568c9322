"""What the stream commands ask of a database."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from sqlalchemy import Connection

from postroad.engine.streams import Streams
from postroad.model.entropy import SystemEntropy
from postroad.model.ids import check_name, check_stream
from postroad.model.payload import text
from postroad.model.streams import EventRow, StreamRow
from postroad.store import stream_views
from postroad.store.stream_views import Wanted
from postroad.surfaces import reading
from postroad.surfaces.output import NotFound


def wanted(stream_type: str | None, state: str | None, after: str) -> Wanted:
    """Which streams the options name."""
    return Wanted(
        type=None if stream_type is None else check_name(stream_type, "type"),
        state=next((each for each in stream_views.STATES if each == state), None),
        after=text(after, "after", empty=True),
    )


def streams(conn: Connection, wanted: Wanted, *, limit: int, now: int) -> Sequence[StreamRow]:
    """A page of streams, by name."""
    return stream_views.list_(conn, wanted, limit=limit, now=now)


def events(conn: Connection, stream: str, *, dead: bool, after: int | None, limit: int, now: int) -> Sequence[EventRow]:
    """A page of what waits in a stream, or has ended in it without a decision.

    Raises:
        NotFound: There is no trace of such a stream.
    """
    found = stream_views.events(conn, check_stream(stream), dead_ones=dead, after=after, limit=limit)
    if not found and stream_views.row(conn, stream, now=now) is None:
        raise NotFound(f"No stream {stream!r}.", stream=stream)
    return found


def plain(event: EventRow) -> dict[str, Any]:
    """An event as programs see it: its payload is the exact text that was accepted."""
    return {
        "cursor": event.cursor,
        "key": event.key,
        "kind": event.kind,
        "version": event.version,
        "data": msgspec.Raw(event.raw.encode()),
        "received_at": event.received_at,
        "reason": event.reason,
        "ended_at": event.ended_at,
    }


@contextmanager
def acting(stream: str, url: str | None, schema: str | None) -> Iterator[Streams]:
    """Operators' verbs for a stream, on the database that the command line or the settings name; its schema must fit.

    Raises:
        NotFound: There is no trace of the stream: a misspelt name would be taken, or stopped, for nothing.
    """
    with reading.changing(url, schema) as database:
        streams = Streams(lambda: database, SystemEntropy, lambda: None)
        if streams.get(stream) is None:
            raise NotFound(f"No stream {stream!r}.", stream=stream)
        yield streams
