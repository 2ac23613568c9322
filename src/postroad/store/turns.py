"""The commit of a turn: all that a decision consumed, recorded and caused, in one transaction.

The claim is locked and checked first; what decides is read in later statements, so that on Postgres they
see whatever had committed before the lock was ours.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

from msgspec.structs import replace
from sqlalchemy import Connection

from postroad.model.errors import InvalidInput, StaleClaim, TurnStopped
from postroad.model.failpoints import failpoint
from postroad.model.lifecycle import RunEnd
from postroad.model.rows import (
    EndedRun,
    Enqueued,
    Hold,
    NewEntry,
    Published,
    TurnCommit,
    TurnCommitted,
)
from postroad.store import (
    acks,
    alerts,
    delegations,
    dialects,
    inbox,
    log,
    operations,
    outbox,
    partials,
    queues,
    reports,
    runs,
    stopping,
    streams,
    timers,
)
from postroad.store.groups import Name, Verb
from postroad.store.statements import Row, Statement, as_json

T = TypeVar("T")
Write = Callable[[Connection], object]

_CONSUME = Statement(
    "DELETE FROM {p}inbox WHERE position {in_ints:positions} AND " + inbox.UNDEAD + " RETURNING position"
)
# A dead event is ready for nothing any more: `ready_at` is then the time at which it died.
_BURY = Statement(
    "UPDATE {p}inbox SET reason = :why, ready_at = :now "
    "WHERE position {in_ints:positions} AND " + inbox.UNDEAD + " RETURNING position"
)
_LANDED = Statement(
    "SELECT e.position FROM {p}inbox e WHERE e.position {in_ints:positions} AND " + log.LANDED + " IS NOT NULL"
)


def commit(
    conn: Connection,
    turns: Sequence[TurnCommit],
    *,
    source: str = "turn",
    write: Write | None = None,
    now: int,
) -> list[TurnCommitted]:
    """Commit turns of different streams together, all of them or none.

    `write` are the user's own rows; it takes a turn that is alone in its transaction. `source` is who the
    history of the dispatches names.

    Raises:
        StaleClaim: A claim is not ours any more, or an event of it was taken away.
        TurnStopped: A person asked that the turn end; only a commit that says so is taken.
        DuplicateEntry: Some of the events or entries are in the log already; see `drop_landed`.
        ConcurrencyConflict: A stream has moved on since its version was read.
        StreamDeleted: A stream was deleted.
        DuplicateKey: A dispatch with one of the keys exists.
        KeyConflict, TimerConflict: As for publishing, delegating and for timers.
        DispatchNotFound, AckNotRequested, BadAckToken, AckRefused: A token acknowledges nothing.
    """
    if write is not None and len(turns) != 1:
        raise InvalidInput("`write` takes a turn that is alone in its transaction.", field="write")
    held = _fenced(conn, turns)
    if write is not None:
        with dialects.users_plans(conn):
            write(conn)
    dialects.distrust_statistics(conn)  # after the user's own statements, which may need other plans
    if deletions := _all(turn.deletions for turn in turns):
        # Together with the turns' own, in one order: two that delete each other's streams wait in one direction only.
        streams.hold(conn, [*deletions, *(turn.claim.stream for turn in turns)])
    _record(conn, turns, now=now)
    enqueued, withdrawn, published = _cause(conn, turns, source, now=now)
    operations.attach(conn, {turn.claim.run_id: _last_entry(turn) for turn in turns if turn.operated})
    failpoint("turns.attached")
    runs.end(conn, [EndedRun(run_id=t.claim.run_id, end=t.end, error=t.error) for t in turns], now=now)
    failpoint("turns.ended")
    partials.clear(conn, [turn.claim.stream for turn in turns if turn.spoke or turn.claim.again])
    ready = queues.free(conn, {stream: row.alone for stream, row in held.items()}, now=now)
    failpoint("turns.freed")
    return [_committed(turn, published, enqueued, withdrawn, events_left=turn.claim.stream in ready) for turn in turns]


def _fenced(conn: Connection, turns: Sequence[TurnCommit]) -> dict[str, Row]:
    """Lock the turns' streams; their rows, if every claim is current and nobody has stopped what may be stopped."""
    held = queues.require(conn, [Hold(turn.claim.stream, turn.claim.token) for turn in turns])
    failpoint("turns.fenced")
    for turn in turns:
        row = held[turn.claim.stream]
        if turn.stoppable and stopping.ends(row.picked, row.stop):
            raise TurnStopped(turn.claim.stream, stream=turn.claim.stream, reason="turn.stopped")
    return held


def _committed(
    turn: TurnCommit, published: Iterator[Published], enqueued: Iterator[Enqueued], withdrawn: set[str], *,
    events_left: bool,
) -> TurnCommitted:  # fmt: skip
    """What a turn's commit came to; it takes its own from the answers to all of them."""
    return TurnCommitted(
        stream=turn.claim.stream,
        version=turn.claim.version + len(turn.consumed) + len(turn.entries),
        published=list(islice(published, len(turn.publishes))),
        enqueued=list(islice(enqueued, len(turn.dispatches))),
        withdrawn=[key for key in turn.withdrawals if key in withdrawn],
        events_left=events_left,
    )


def _record(conn: Connection, turns: Sequence[TurnCommit], *, now: int) -> None:
    """What happened: the log grows, the inbox shrinks."""
    newest = reports.newest(conn, turns)
    log.append_all(conn, [_appended(turn, newest.get(turn.claim.stream)) for turn in turns], now=now)
    failpoint("turns.logged")
    consumed = {event.position: turn.claim.stream for turn in turns for event in turn.consumed}
    if consumed:
        _all_gone(consumed, _CONSUME(conn, positions=as_json(list(consumed))).scalars())
    for why in sorted({turn.dead_reason for turn in turns if turn.dead}):
        dead = {e.position: t.claim.stream for t in turns for e in t.dead if t.dead_reason == why}
        _all_gone(dead, _BURY(conn, positions=as_json(list(dead)), why=why, now=now).scalars())
    failpoint("turns.consumed")


def _appended(turn: TurnCommit, newest: str | None) -> log.Append:
    claim = turn.claim
    payloads = reports.as_entries(turn.consumed, newest)
    consumed = [
        NewEntry(
            entry_id=event.event_id,
            kind=event.kind,
            version=event.version,
            data=data,
            received_at=event.received_at,
            run_id=claim.run_id,
        )
        for event, data in zip(turn.consumed, payloads, strict=True)
    ]
    entries = [
        replace(entry, run_id=entry.run_id or claim.run_id, cause=entry.cause or claim.turn_id)
        for entry in turn.entries
    ]
    return log.Append(stream=claim.stream, entries=consumed + entries, expected_version=claim.version)


def _last_entry(turn: TurnCommit) -> str:
    """What stands for the decision in the log: the last entry that it recorded, or else its last event."""
    return turn.entries[-1].entry_id if turn.entries else turn.consumed[-1].event_id


def _all_gone(asked: dict[int, str], done: Iterable[int]) -> None:
    missing = asked.keys() - set(done)
    if missing:
        stream = asked[min(missing)]
        raise StaleClaim(f"An event of {stream} is gone.", stream=stream)


def _cause(
    conn: Connection, turns: Sequence[TurnCommit], source: str, *, now: int
) -> tuple[Iterator[Enqueued], set[str], Iterator[Published]]:
    """What comes of it: deletions, dispatches, timers, withdrawals, events for this and other streams, alerts."""
    deletions = _all(turn.deletions for turn in turns)
    streams.delete(conn, deletions, now=now)
    streams.refuse_deleted(conn, {name for turn in turns for name in _armed_elsewhere(turn)})
    failpoint("turns.deleted")
    dispatches = _all(turn.dispatches for turn in turns)
    enqueued = outbox.insert(conn, dispatches, source=source, actor=source, in_turn=True, now=now) if dispatches else []
    failpoint("turns.dispatched")
    # In this order in a program's block too: two that meet then wait in one direction only.
    if changes := [*timers.disarmed(conn, deletions), *_all(turn.timers for turn in turns)]:
        timers.apply(conn, changes, now=now)
    failpoint("turns.timed")
    keys = _all(turn.withdrawals for turn in turns)
    acks.acknowledge(conn, _all(turn.acks for turn in turns), actor=source, withdrawals=keys, now=now)
    failpoint("turns.acknowledged")
    withdrawn = set(outbox.withdraw(conn, keys, actor=source, now=now)) if keys else set[str]()
    failpoint("turns.withdrawn")
    events = _all(turn.publishes for turn in turns)
    published = inbox.publish(conn, events, now=now) if events else []
    if told := _all(turn.reports for turn in turns):
        reports.tell(conn, told, now=now)
    failpoint("turns.published")
    delegations.commit(conn, turns, published, now=now)
    failpoint("turns.delegated")
    if raised := _all(turn.alerts for turn in turns):
        alerts.raise_alerts(conn, raised, now=now)
    failpoint("turns.alerted")
    return iter(enqueued), withdrawn, iter(published)


def _armed_elsewhere(turn: TurnCommit) -> set[str]:
    """The other streams in which a turn arms timers; its own is locked, and was not deleted by anybody else."""
    return {change.stream for change in turn.timers if change.verb != "cancel"} - {turn.claim.stream}


def _all(parts: Iterable[Sequence[T]]) -> list[T]:
    return [item for part in parts for item in part]


def _names(turn: TurnCommit) -> list[Name]:
    stream = turn.claim.stream
    return [
        ("", stream),  # least of all: commits are in the order of their streams
        *(("", deleted) for deleted in turn.deletions),
        *(("key", dispatch.key) for dispatch in turn.dispatches),
        *(("key", key) for key in turn.withdrawals),
        *(("ack", token.dispatch) for token in turn.acks),
        *(("timer", change.stream, change.key) for change in turn.timers),
        *(("event", event.stream, event.event_id) for event in (*turn.publishes, *turn.reports)),
        *(("delegation", made.stream, made.key) for made in turn.delegated),
        *(("delegation", end.stream, end.key) for end in turn.finished),
    ]


COMMIT = Verb(run=commit, names=_names)


def drop_landed(conn: Connection, hold: Hold, *, now: int) -> int:
    """After DuplicateEntry: remove those events of the claimed set that are in the log already; how many.

    The run ends as a conflict and the stream is free again with the rest. If none of them landed, nothing
    changes: the entry that was there already is one that the decision recorded. Raises StaleClaim.
    """
    row = queues.require(conn, [hold])[hold.subject]
    landed = list(_LANDED(conn, positions=row.picked).scalars())
    if landed:
        queues.drop(conn, landed)
        queues.free(conn, {hold.subject: row.alone}, now=now)
        queues.end_run(conn, hold, RunEnd.CONFLICT, None, now=now)
    return len(landed)
