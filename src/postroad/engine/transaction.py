"""The recording verbs, and the blocks that write what was recorded: `begin` and `join`."""

from collections.abc import Callable, Mapping
from datetime import datetime
from types import TracebackType
from typing import Any, Literal, TypeVar

from sqlalchemy import Connection

from postroad.engine import arguments
from postroad.engine.arguments import Context
from postroad.engine.declarations import plain
from postroad.engine.records import BEGIN, Records, TimerRecord, When, Written, begun, write
from postroad.model.dispatches import Accepted, Withdrawn
from postroad.model.errors import InvalidInput, NotInTransaction, Refused, Span, StreamDeleted
from postroad.model.failpoints import failpoint
from postroad.model.ids import check_event_key, check_stream, check_timer_key
from postroad.model.kinds import Kind
from postroad.model.payload import encode, text
from postroad.model.rows import NewEvent
from postroad.store import borrowed, dialects, stopping
from postroad.store.database import Database

T = TypeVar("T")


class Transaction:
    """Verbs record and never wait; leaving the block writes them all, in bulk, in one transaction."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._records = Records()
        self._over = False

    def publish(self, stream: str, kind: Kind[T] | str, data: T, *, key: str | None = None) -> Accepted:
        """Put an event into a stream's inbox.

        Same key and content as an earlier one: the first one stands. Without a key every call is a new event
        (in a turn: the key derives from the turn).

        Raises:
            InvalidInput: The stream is not `type/id`, or the key or payload cannot be stored.
            KeyConflict: On leaving the block, if the key is taken by other content.
            StreamDeleted: On leaving the block, if the stream was deleted; at once, if this transaction deletes it.
        """
        name, version, encoded = arguments.payload(kind, data)
        event = NewEvent(
            stream=self._living(check_stream(stream)),
            event_id=self._default_key() if key is None else check_event_key(key),
            kind=name,
            version=version,
            data=encoded,
        )
        accepted = Accepted()
        self._open_records().publishes.append((event, accepted))
        return accepted

    def send(
        self,
        kind: Kind[T] | str,
        body: T | None = None,
        *,
        to: str = "",
        key: str | None = None,
        at: datetime | None = None,
        after: Span | None = None,
        expires: Span | datetime | None = None,
        lane: str | None = None,
        ack: bool = False,
        on_conflict: Literal["error", "keep"] = "error",
        origin: Mapping[str, str] = arguments.NO_ORIGIN,
    ) -> Accepted:
        """Send something once the transaction has committed.

        Args:
            kind: A kind that this app declares: by a sender, a transport, `kinds` or `elsewhere`.
            body: The payload; None is `{}`.
            to: Where to, as the sender understands it.
            key: Exactly what the destination receives as idempotency key; unique in the database.
            at: Not before this time (aware).
            after: Not before this long after the transaction (in a turn: after the decision).
            lane: Its dispatches are sent strictly one after the other, in the order in which they were accepted.
            ack: It ends when its consumer acknowledges it (`Dispatch.ack_token`); until then it is sent again, after
                the whole delay each time, within the bounds of its kind's `Retry`. Needs a secret_key.
            expires: No attempt starts later than this: a time (aware), or so long after the transaction.
            on_conflict: "keep" takes a key that holds other content as accepted.
            origin: Where it comes from, as pairs to filter by.

        Raises:
            UnknownKind: Nobody in this app declares the kind.
            InvalidInput: A value cannot be stored; the message names it.
            Refused: An acknowledgement is asked for, and there is no secret_key.
            KeyConflict: On leaving the block, if the key is taken by other content.
        """
        sending = arguments.sending(
            self._context, kind, body, to=to, key=key, at=at, after=after, expires=expires, lane=lane, ack=ack,
            on_conflict=on_conflict, origin=origin, default_key=self._default_key,
        )  # fmt: skip
        self._open_records().sends.append(sending)
        return sending.accepted

    def withdraw(self, key: str) -> Withdrawn:
        """End a pending dispatch that is no longer wanted (expired, reason withdrawn). Too late is no error."""
        answer = Withdrawn()
        self._open_records().withdrawals.append((text(key, "key"), answer))
        return answer

    def set_timer(
        self,
        key: str,
        *,
        at: datetime | None = None,
        after: Span | None = None,
        data: Any = None,
        stream: str | None = None,
    ) -> None:
        """Arm a timer of a stream (in a turn: of its own). Its firing is an event of kind TIMER_FIRED with `data`.

        Content is data and `at` or `after` as given: setting an armed key again with the same content changes
        nothing.

        Raises:
            TimerConflict: On leaving the block, if the key is armed with other content, fired or cancelled.
            StreamDeleted: On leaving the block, if the stream was deleted; at once, if this transaction deletes it.
        """
        self._arm("set", key, arguments.when(at, after), data=data, stream=stream)

    def rearm_timer(
        self,
        key: str,
        *,
        at: datetime | None = None,
        after: Span | None = None,
        data: Any = None,
        stream: str | None = None,
    ) -> None:
        """Arm a timer again, whatever became of it: a new generation, whose firing is an event of its own."""
        self._arm("rearm", key, arguments.when(at, after), data=data, stream=stream)

    def cancel_timer(self, key: str, *, stream: str | None = None) -> None:
        """Disarm a timer. It may still fire if that is under way, so a handler must know a late one."""
        self._open_records().timers.append(
            TimerRecord(verb="cancel", stream=self._timer_stream(stream), key=check_timer_key(key))
        )

    def stop_stream(self, stream: str) -> None:
        """Withdraw what people have published to a stream and wait for, and ask its turn that is under way to end.

        The turn commits nothing: a `postroad.interrupted` entry says that it was stopped, and what it had called.
        What is published afterwards is processed as ever; outcomes, timers and reports stay.

        Raises:
            InvalidInput: The stream is not `type/id`.
            StreamDeleted: On leaving the block, if the stream was deleted; at once, if this transaction deletes it.
        """
        event = stopping.event(self._living(check_stream(stream)), self._default_key())
        self._open_records().publishes.append((event, Accepted()))

    def delete_stream(self, stream: str) -> None:
        """Delete a stream: nothing comes into being in it any more. Deleting it again is the same success.

        Its armed timers are cancelled, and what waits in it is dropped. A turn of it that is under way commits
        nothing. What comes later is refused (`publish`, timers: StreamDeleted) or dropped with a word on it (outcomes).
        A stream that has never been is deleted all the same. What has been sent from it goes on its way; withdraw it if
        it must not. In a turn it may be the turn's own: what the turn records is the last thing in its log.

        Raises:
            InvalidInput: The stream is not `type/id`.
            Refused: This transaction publishes to it, or arms a timer of it.
        """
        name, records = check_stream(stream), self._open_records()
        armed = {timer.stream for timer in records.timers if timer.verb != "cancel"}
        if name in armed or any(event.stream == name for event, _ in records.publishes):
            raise Refused(f"This transaction publishes to {name}, or arms a timer of it; nothing would come of that.")
        records.deletions.append(name)

    def write(self, fn: Callable[[Connection], object]) -> None:
        """Have `fn(connection)` write the user's own rows in the same commit; it must not commit itself."""
        plain(fn, "fn")
        self._open_records().writes.append(fn)

    def ack(self, token: str) -> None:
        """Acknowledge a dispatch by the token that it came with: it is acked, and not sent again.

        Acknowledging it once more is the same success. In one transaction acks come before withdrawals.

        Raises:
            BadAckToken: This is no token; on leaving the block, if it is not of this dispatch, was made before an
                operator had it sent again, or under a key that is not known.
            Refused: There is no secret_key.
            DispatchNotFound, AckNotRequested, AckRefused: On leaving the block, if there is no such dispatch, it
                asked for no acknowledgement, or has ended otherwise.
        """
        self._open_records().acks.append(self._context.keyring.read(token))

    def _open_records(self) -> Records:
        """Where verbs record, as long as somebody will write it."""
        if self._over:
            raise Refused("This transaction is over; what is recorded after its end would be lost.")
        return self._records

    def _end(self) -> Records:
        """All that was recorded; nothing more will be."""
        self._over = True
        return self._records

    def _arm(self, verb: Literal["set", "rearm"], key: str, when: When, *, data: Any, stream: str | None) -> None:
        if not when.given:
            raise InvalidInput("A timer needs `at` or `after`.", field="at")
        self._open_records().timers.append(
            TimerRecord(
                verb=verb,
                stream=self._living(self._timer_stream(stream)),
                key=check_timer_key(key),
                data=encode({} if data is None else data),
                at=when.at,
                after=when.after,
            )
        )

    def _living(self, stream: str) -> str:
        """The stream, unless this transaction deletes it."""
        if stream in self._records.deletions:
            raise StreamDeleted(stream, stream=stream)
        return stream

    def _timer_stream(self, stream: str | None) -> str:
        if stream is None:
            raise InvalidInput("Outside of a turn a timer needs its stream.", field="stream")
        return check_stream(stream)

    def _default_key(self, otherwise: str | None = None) -> str:
        """The key of what was given none: outside of a turn nobody can send the same again."""
        return self._context.entropy.token() if otherwise is None else otherwise


class Opening:
    """What `begin` and `join` return; enter it with `with` or `async with`, as the connection is."""

    def __init__(
        self,
        context: Context,
        database: Callable[[Connection | None], Database],
        announce: Callable[[Records], None],
        connection: object = None,
    ) -> None:
        self._context = context
        self._open = database
        self._announce = announce
        self._connection = connection
        self._transaction = Transaction(context)

    def __enter__(self) -> Transaction:
        if hasattr(self._connection, "run_sync"):
            raise NotInTransaction("This connection is asynchronous; use `async with`.")
        if self._connection is not None:
            self._check(self._sync_connection())
        return self._transaction

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        records = self._transaction._end()
        if kind is not None:
            return
        records.tells = not self._context.relayed
        if self._connection is None:
            database = self._open(None)
            # Code of the user's holds up no others' transactions.
            written = database.transact(self._write) if records.writes else database.group(BEGIN, records)
        else:
            written = self._join(self._sync_connection())
        self._answer(records, written)

    async def __aenter__(self) -> Transaction:
        if self._connection is not None:
            connection = await self._async_connection()
            await connection.run_sync(self._check)
        return self._transaction

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        records = self._transaction._end()
        if kind is not None:
            return
        records.tells = not self._context.relayed
        if self._connection is None:
            database = self._open(None)
            written = await (database.atransact(self._write) if records.writes else database.agroup(BEGIN, records))
        else:
            connection = await self._async_connection()
            written = await connection.run_sync(self._join)
        self._answer(records, written)

    def _answer(self, records: Records, written: Written) -> None:
        if self._connection is None:
            failpoint("accept.after_commit")
        records.fill(written.published, written.enqueued, written.withdrawn)
        self._announce(records)

    def _sync_connection(self) -> Connection:
        found: Any = self._connection
        if not isinstance(found, Connection) and hasattr(found, "connection") and hasattr(found, "get_bind"):
            found = found.connection()  # an ORM Session
        if not isinstance(found, Connection):
            raise NotInTransaction(_not_a_connection(found))
        return found

    async def _async_connection(self) -> Any:
        found: Any = self._connection
        if hasattr(found, "sync_session"):  # an AsyncSession
            found = await found.connection()
        if not hasattr(found, "sync_connection"):
            raise NotInTransaction(_not_a_connection(found))
        return found

    def _check(self, connection: Connection) -> Database:
        connection.connection  # noqa: B018  # opens it, so that it can be looked at
        borrowed.check_joined(connection)
        database = self._open(connection)
        borrowed.check_same_database(connection, database.engine)
        return database

    def _write(self, connection: Connection, *, now: int) -> Written:
        (written,) = begun(connection, [self._transaction._records], now=now)
        return written

    def _join(self, connection: Connection) -> Any:
        database = self._check(connection)
        connection = database.bind(connection)
        # A refusal takes our rows back and leaves the user's transaction as it was.
        with connection.begin_nested():
            (written,) = write(connection, [self._transaction._records], actor="join", now=database.clock.wall())
        dialects.notify_at_commit(connection, self._transaction._records.topics)
        return written


def _not_a_connection(found: object) -> str:
    if hasattr(found, "sync_engine") or hasattr(found, "connect"):
        return "Pass a connection or session that is in a transaction, not an engine."
    if hasattr(found, "run_sync"):
        return "This connection is asynchronous; use `async with`."
    return f"Pass an SQLAlchemy connection or session, not {type(found).__name__}; use `with` for a synchronous one."
