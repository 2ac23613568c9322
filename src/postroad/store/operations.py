"""Tool calls of runs: written when one starts and when it ends, each under the run's live claim token."""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
from sqlalchemy import Connection

from postroad.model.errors import TurnStopped
from postroad.model.operations import CallStatus, OperationRow
from postroad.model.rows import Hold
from postroad.store import queues, stopping
from postroad.store.groups import Name, Verb
from postroad.store.statements import Statement, as_json

Resolved = Literal["retry", "continue", "discard"]


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """A call that is about to begin, or one that gets its recorded result (its row says so)."""

    hold: Hold
    row: OperationRow


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """How a call ended: FINISHED with its result as JSON, or FAILED with the error's text."""

    hold: Hold
    turn_id: str
    ordinal: int
    status: CallStatus
    result: str


_COLUMNS = (
    "turn_id, ordinal, run_id, stream, tool, version, effect, arguments, status, result, key, repeats, entry, "
    "resolved, started_at, ended_at"
)
# The same start once more, because COMMIT was not answered, writes nothing.
_START = Statement(
    "INSERT INTO {p}operations (run_id, ordinal, stream, turn_id, tool, version, effect, arguments, status, result, "
    "key, repeats, started_at, ended_at) "
    "SELECT run_id, ordinal, stream, turn_id, tool, version, effect, arguments, status, result, key, repeats, :now, "
    "CASE WHEN status = 'started' THEN NULL ELSE CAST(:now AS bigint) END FROM "
    "{rows:started(run_id text, ordinal int, stream text, turn_id text, tool text, version int, effect text, "
    "arguments text, status text, result text, key text, repeats int)} WHERE true "
    "ON CONFLICT (turn_id, ordinal) DO NOTHING"
)
_FINISH = Statement(
    "UPDATE {p}operations AS o SET status = how, result = said, ended_at = :now "
    "FROM {rows:ended(turn text, place int, how text, said text)} "
    "WHERE o.turn_id = turn AND o.ordinal = place AND o.turn_id {in_list:turns} AND o.status = 'started'"
)
_OF_TURN = Statement(f"SELECT {_COLUMNS} FROM {{p}}operations WHERE turn_id = :turn_id ORDER BY ordinal")
_OF_STREAM = Statement(
    f"SELECT {_COLUMNS} FROM {{p}}operations WHERE stream = :stream ORDER BY started_at DESC, ordinal DESC LIMIT :limit"
)
_ATTACH = Statement(
    "UPDATE {p}operations SET entry = reply FROM {rows:replies(run text, reply text)} "
    "WHERE run_id = run AND run_id {in_list:runs}"
)
_RESOLVE = Statement(
    "UPDATE {p}operations SET resolved = :how WHERE turn_id = :turn_id AND coalesce(resolved, '-') <> 'retry'"
)


def start(conn: Connection, starts: Sequence[Start], *, now: int) -> list[None]:
    """Write that calls begin, each under its run's claim.

    Raises:
        StaleClaim: A claim is over.
        TurnStopped: A person asked that the turn end.
    """
    held = queues.require(conn, [one.hold for one in starts])
    for stream, row in held.items():
        if stopping.ends(row.picked, row.stop):
            raise TurnStopped(stream, stream=stream, reason="turn.stopped")
    _START(conn, started=as_json([msgspec.to_builtins(one.row) for one in starts]), now=now)
    return [None for _ in starts]


def finish(conn: Connection, ends: Sequence[Finish], *, now: int) -> list[None]:
    """Write how calls ended, each under its run's claim; one that is written already stays. Raises StaleClaim."""
    queues.require(conn, [one.hold for one in ends])
    rows = [{"turn": end.turn_id, "place": end.ordinal, "how": end.status, "said": end.result} for end in ends]
    _FINISH(conn, ended=as_json(rows), turns=as_json([end.turn_id for end in ends]), now=now)
    return [None for _ in ends]


def of_turn(conn: Connection, turn_id: str) -> list[OperationRow]:
    """The calls of all runs of a turn, oldest first."""
    return _OF_TURN(conn, turn_id=turn_id).into(OperationRow)


def of_stream(conn: Connection, stream: str, *, limit: int = 50) -> list[OperationRow]:
    """A stream's calls, newest first."""
    return _OF_STREAM(conn, stream=stream, limit=limit).into(OperationRow)


def attach(conn: Connection, replies: Mapping[str, str]) -> None:
    """Say which log entry came of the calls of a run: entry ids by run id."""
    if replies:
        rows = [{"run": run, "reply": reply} for run, reply in replies.items()]
        _ATTACH(conn, replies=as_json(rows), runs=as_json(list(replies)))


def resolve(conn: Connection, turn_id: str, how: Resolved) -> None:
    """Write what a person decided about a turn's calls.

    "retry": they are done again; "continue": they are taken as recorded; "discard": the turn ends with them.
    """
    _RESOLVE(conn, turn_id=turn_id, how=how)


def _names(item: Start | Finish) -> list[Name]:
    return [("stream", item.hold.subject)]


START: Verb[Start, None] = Verb(run=start, names=_names)
FINISH: Verb[Finish, None] = Verb(run=finish, names=_names)
