"""What the suites of the outbox share: dispatches to write, policies to send them by, and what the tables hold."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, event, text

from postroad.model.clock import SECOND, FakeClock
from postroad.model.payload import content_hash
from postroad.model.retry import Retry
from postroad.model.rows import DispatchClaim, Hold, NewDispatch, SendPolicy, Settlement
from postroad.store import dispatch_claims, outbox
from postroad.store.database import Database
from postroad.store.statements import Row, Statement

Run = Callable[..., Any]

LEASE = 15 * SECOND
RETRY = Retry(attempts=3, first=60, jitter=False)
POLICY = SendPolicy(kind="mail", lease=LEASE, retry=RETRY)

_OUTBOX = Statement("SELECT * FROM {p}outbox ORDER BY key")
_HISTORY = Statement("SELECT * FROM {p}transitions ORDER BY id")
_INBOX = Statement("SELECT stream, event_id, kind, data FROM {p}inbox ORDER BY position")
_ALERTS = Statement("SELECT code, severity, subject, detail FROM {p}alerts ORDER BY id")


def dispatch(number: int, body: str = '{"n":1}', **changes: Any) -> NewDispatch:
    """A dispatch of kind mail, due long ago, the lower the number the longer."""
    given = {
        "id": f"{number:032x}",
        "key": f"key/{number}",
        "kind": "mail",
        "destination": "ann@example.org",
        "body": body,
        "due_at": number,
        "content_hash": content_hash("mail", body),
        **changes,
    }
    return NewDispatch(**given)


def enqueue(run: Run, *dispatches: NewDispatch) -> Any:
    """Write dispatches as a program outside of a turn would."""
    return run(outbox.insert, dispatches, source="test", actor="ann", in_turn=False)


def claim(run: Run, *, limit: int = 100, policy: SendPolicy = POLICY, **how: Any) -> list[DispatchClaim]:
    """Claim mail; nothing may end in passing."""
    won = run(dispatch_claims.claim, policy, **{"names": ["mail"], "token": "t1", "limit": limit, **how})
    assert won.ended == []
    claims: list[DispatchClaim] = won.claims
    return claims


def settlement(held: DispatchClaim, result: Any = "ok", **more: Any) -> Settlement:
    """The result of a claim's attempt."""
    return Settlement(id=held.id, token=held.token, attempt=held.attempt, result=result, **{"policy": POLICY, **more})


def hold(held: DispatchClaim) -> Hold:
    """The proof of a claim."""
    return Hold(held.id, held.token)


def outbox_rows(conn: Connection) -> Sequence[Row]:
    """The outbox, ordered by key."""
    return _OUTBOX(conn).all()


def history(conn: Connection, entity: str | None = None) -> list[tuple[str | None, str, str]]:
    """(from, to, reason) of all changes, or of one dispatch's."""
    return [
        (row.from_status, row.to_status, row.reason_code)
        for row in _HISTORY(conn)
        if entity is None or row.entity == entity
    ]


def last_change(conn: Connection) -> Row:
    """The newest row of history."""
    return _HISTORY(conn).all()[-1]


def outcomes(conn: Connection) -> list[tuple[str, str, str, str | None]]:
    """(stream, event id, status, error) of the outcomes that wait in inboxes."""
    found = []
    for row in _INBOX(conn):
        assert row.kind == "postroad.outcome"
        outcome = msgspec.json.decode(row.data)
        found.append((row.stream, row.event_id, outcome["status"], outcome["error"]))
    return found


def alerts(conn: Connection) -> list[tuple[str, str]]:
    """(code, subject) of the alerts."""
    return [(row.code, row.subject) for row in _ALERTS(conn)]


def everything(conn: Connection) -> list[list[tuple[Any, ...]]]:
    """All that the outbox's functions write."""
    return [[tuple(row) for row in statement(conn)] for statement in (_OUTBOX, _HISTORY, _INBOX, _ALERTS)]


def another(database: Database, clock: FakeClock) -> Database:
    """A second process, as far as transactions go: the same tables, an executor of its own."""
    return Database(database.engine, schema=database.schema, clock=clock)


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """Start all calls at one instant; their results, in order."""
    results: list[Any] = [None] * len(calls)
    barrier = threading.Barrier(len(calls))

    def start(place: int) -> None:
        barrier.wait()
        try:
            results[place] = calls[place]()
        except Exception as error:
            results[place] = error

    threads = [threading.Thread(target=start, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


class Waiting:
    """A call in a thread that is expected to wait for a lock of ours."""

    def __init__(self, database: Database, call: Callable[[], Any]) -> None:
        self._database = database
        self._result: list[Any] = []
        self._begun = threading.Event()
        event.listen(database.engine, "checkout", self._checked_out)
        self._thread = threading.Thread(target=self._work, args=(call,))
        self._thread.start()

    def _checked_out(self, *_: object) -> None:
        self._begun.set()

    def _work(self, call: Callable[[], Any]) -> None:
        self._result.append(call())

    def blocked(self) -> None:
        """Return once the call waits: on Postgres the server says so, on SQLite only its BEGIN is left."""
        assert self._begun.wait(10)
        if self._database.is_sqlite:
            return
        with self._database.engine.connect() as conn:
            blocked = text(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
                "AND cardinality(pg_blocking_pids(pid)) > 0"
            )
            while not conn.execute(blocked).scalar_one():
                assert self._thread.is_alive()
                self._thread.join(0.01)

    def result(self) -> Any:
        """What the call returned, once it has got its lock."""
        self._thread.join()
        # Not while the call may be at this very hook.
        event.remove(self._database.engine, "checkout", self._checked_out)
        return self._result[0]
