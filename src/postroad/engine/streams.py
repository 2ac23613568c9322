"""What an operator may look at and do in streams: the same functions for code and the command line, without loops."""

from collections.abc import Callable, Sequence
from typing import Any

from postroad.engine.declarations import one_of
from postroad.model.delegations import Delegation
from postroad.model.entropy import Entropy
from postroad.model.ids import check_name, check_stream
from postroad.model.payload import text, whole
from postroad.model.streams import EventRow, StreamRow, StreamState
from postroad.store import audit, delegations, resolving, stopping, stream_views, streams
from postroad.store.database import Database
from postroad.store.resolving import HOW, How, Resolution

LIMIT_MAX = 10_000
EVENTS_MAX = 1_000  # with what they say, each of up to 256 KiB
POSITION_MAX = 2**63 - 1


class Streams:
    """What an operator may look at and do in streams. Whatever changes anything is audited: who, why, what.

    `aget`, `alist` and `aevents` are `get`, `list` and `events` for async code.
    """

    def __init__(
        self, database: Callable[[], Database], entropy: Callable[[], Entropy], wake: Callable[[], None]
    ) -> None:
        self._database = database
        self._entropy = entropy
        self._wake = wake

    def get(self, stream: str) -> StreamRow | None:
        """One stream, with what waits in it and why; None: there is no trace of it."""
        database = self._database()
        return database.read(stream_views.row, check_stream(stream), now=database.clock.wall())

    async def aget(self, stream: str) -> StreamRow | None:
        """One stream, with what waits in it and why; None: there is no trace of it."""
        database = self._database()
        return await database.aread(stream_views.row, check_stream(stream), now=database.clock.wall())

    def events(
        self, stream: str, *, dead: bool = False, after: int | None = None, limit: int = 50
    ) -> Sequence[EventRow]:
        """What waits in a stream, with what it says, oldest first; what a turn is just at is among it.

        Args:
            dead: What has ended without a decision instead, newest first.
            after: A row's cursor: only those behind it.
            limit: At most so many, up to 1,000.
        """
        return self._database().read(stream_views.events, check_stream(stream), **_page(dead, after, limit))

    async def aevents(
        self, stream: str, *, dead: bool = False, after: int | None = None, limit: int = 50
    ) -> Sequence[EventRow]:
        """What waits in a stream, or has ended without a decision, with what it says: as `events`."""
        return await self._database().aread(stream_views.events, check_stream(stream), **_page(dead, after, limit))

    def list(
        self, *, type: str | None = None, state: StreamState | None = None, limit: int = 50, after: str = ""
    ) -> Sequence[StreamRow]:
        """Streams by name; without a `state` deleted ones only if something is left in them that waits.

        Args:
            type: Only those of this type.
            state: Only those in this state.
            limit: At most so many, up to 10,000.
            after: Only those whose names come after this one.
        """
        given, database = _wanted(type, state, after, limit), self._database()
        return database.read(stream_views.list_, **given, now=database.clock.wall())

    async def alist(
        self, *, type: str | None = None, state: StreamState | None = None, limit: int = 50, after: str = ""
    ) -> Sequence[StreamRow]:
        """Streams by name: as `list`."""
        given, database = _wanted(type, state, after, limit), self._database()
        return await database.aread(stream_views.list_, **given, now=database.clock.wall())

    def delegations(self, stream: str, *, limit: int = 100) -> Sequence[Delegation]:
        """What a stream has delegated to others, open or ended, by key; at most `limit`, up to 10,000."""
        limit = whole(limit, "limit", most=LIMIT_MAX)
        return self._database().read(delegations.of, check_stream(stream), limit=limit)

    def delete(self, stream: str, *, actor: str, reason: str = "") -> bool:
        """Delete a stream as `Transaction.delete_stream` does, audited; False if it was deleted before."""
        name, by = check_stream(stream), audit.operator(actor, reason)
        done = self._database().transact(streams.delete_by, name, by=by, lock=lambda conn: streams.hold(conn, [name]))
        self._wake()
        return done

    def stop(self, stream: str, *, actor: str, reason: str = "") -> None:
        """Stop a stream as `Transaction.stop_stream` does, audited.

        Raises:
            StreamDeleted: The stream was deleted.
        """
        name, by = check_stream(stream), audit.operator(actor, reason)
        self._database().transact(stopping.stop_by, name, token=self._entropy().token(), by=by)
        self._wake()

    def resolve(self, stream: str, how: How, *, actor: str, reason: str = "") -> Resolution:
        """Let a parked stream go; it says so if the stream is not parked. Audited.

        Args:
            how: "retry" runs the turn again as if it had called nothing: what it did may be done twice. "continue"
                runs it again with the recorded results; of an unsafe call without one it hears that nobody knows.
                "discard" ends it, with an entry on all that it did.
        """
        name, by = check_stream(stream), audit.operator(actor, reason)
        one_of(how, HOW, "how")
        done = self._database().transact(resolving.resolve, name, how, by=by)
        self._wake()
        return done


def _wanted(type: str | None, state: StreamState | None, after: str, limit: int) -> dict[str, Any]:
    wanted = stream_views.Wanted(
        type=None if type is None else check_name(type, "type"),
        state=None if state is None else one_of(state, stream_views.STATES, "state"),
        after=text(after, "after", empty=True),
    )
    return {"wanted": wanted, "limit": whole(limit, "limit", most=LIMIT_MAX)}


def _page(dead: bool, after: int | None, limit: int) -> dict[str, Any]:
    return {
        "dead_ones": one_of(dead, (False, True), "dead"),
        "after": None if after is None else whole(after, "after", least=0, most=POSITION_MAX),
        "limit": whole(limit, "limit", most=EVENTS_MAX),
    }
