"""What the stream commands ask of a database."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from sqlalchemy import Connection

from postroad.engine.streams import Streams
from postroad.model.entropy import SystemEntropy
from postroad.model.ids import check_name
from postroad.model.payload import text
from postroad.model.streams import StreamRow
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
