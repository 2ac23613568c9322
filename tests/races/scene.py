"""What every race begins with: a database in which each transaction of ours finds something that others want too.

| row | how it stands |
|---|---|
| load/1, load/5 | claimed by `held`, whose lease runs; load/1 has another event behind its set |
| load/2 | claimed by `lost`, whose lease is over |
| load/3 | nobody has claimed it |
| load/4 | claimed by `held`; its event is in the log already, as after a REPEATABLE READ publisher |
| load/6 | deleted two days ago, with something of everything in it, and with what could not see the deletion |
| load/7 | deleted two days ago while `late` had claimed it |
| d1 | being sent by `sent`, whose lease runs |
| d2 | pending and due |
| d3, d5 | claimed by `lost`, whose lease is over; d5 at its last attempt and without a stream |
| d4 | pending, its deadline has passed |
| d6 | asks for an acknowledgement, is being sent by `sent`, whose lease runs |
| d7 | asks for an acknowledgement, was sent once and is due again |
| d8 | asks for an acknowledgement, pending, its deadline has passed |
| d9 | asks for an acknowledgement, a dead letter |
| t1, t2, t6 | timers: of load/1 due, and due later; of load/6 due |
| one alert | not rung |
| h11 | a hook to a.example, which is down: being sent by `tries` as the probe of its gate |
| h12 | a hook to b.example, which is down: pending, and its gate may be tried |
| h14, h16 | hooks to c.example, being sent by `goes`; no gate is closed |
| h15 | a hook to c.example, pending and due |
| idle.example | its gate is closed and may be tried, but nothing goes there |
| h17 | a text, pending; the gate of all texts is closed and may be tried, and they have a rate |

Built once by our own verbs, then copied: each race gets the same rows, positions and tokens again.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import msgspec
from sqlalchemy import Connection, event

from postroad import Postroad
from postroad.engine.records import BEGIN, Records
from postroad.model.acks import Keyring, Presented
from postroad.model.clock import SECOND, SystemClock
from postroad.model.lifecycle import Status
from postroad.model.operations import OperationRow
from postroad.model.retention import DAY
from postroad.model.retry import Retry
from postroad.model.rows import (
    ClaimedDispatches,
    ClaimedTurns,
    DispatchClaim,
    Hold,
    NewAlert,
    NewDispatch,
    SendPolicy,
    Settlement,
    TimerChange,
    TurnClaim,
)
from postroad.store import (
    alerts,
    dispatch_claims,
    inbox,
    log,
    operations,
    outbox,
    partials,
    queues,
    settle,
    timers,
    turns,
)
from postroad.store.database import Database
from postroad.store.partials import Said
from postroad.store.schema import PREFIX
from postroad.store.statements import render
from postroad.testing.contracts.dispatches import dispatch
from postroad.testing.contracts.streams import decided, entry
from postroad.testing.contracts.streams import event as new_event
from postroad.testing.simulation import checks_log, checks_outbox, checks_turns
from postroad.testing.simulation.history import TABLES, History, grouped, tables
from postroad.testing.simulation.ledger import Ledger
from postroad.testing.simulation.options import draw

LEASE = 30 * SECOND
TYPE = "load"
POLICY = SendPolicy(kind="mail", lease=LEASE, retry=Retry(attempts=2, first=60, jitter=False))
HOOK = msgspec.structs.replace(POLICY, kind="hook", patience=3_600 * SECOND)
TEXT = msgspec.structs.replace(HOOK, kind="text", rate=100.0)
POLICIES = {policy.kind: policy for policy in (POLICY, HOOK, TEXT)}
DOWN = "refused"
COPIED = (*TABLES, "rates", "operations", "partials", "audit")
KEYS = Keyring(["the secret of the races"])
LANDED = "load/4"  # until somebody drops it, its event stands in inbox and log
GONE = ("load/6", "load/7")  # of what they contained a part may have been deleted
DRAINS_MAX = 20
# What they say of rows alone. The others compare with clients' ledgers, sinks and the simulation's own workload.
CHECKS = (
    checks_log.l1_dense, checks_log.l8_unique, checks_log.i2_once, checks_log.i6_no_stranding,
    checks_turns.t1_single_effect, checks_turns.t2_fence, checks_turns.m1_not_lost, checks_turns.m7_known_timer,
    checks_outbox.o1_no_lost_action, checks_outbox.o3_legal, checks_outbox.o4_one_claimant,
    checks_outbox.o6_upper_bound, checks_outbox.o8_reason, checks_outbox.o9_explained_duplicates,
    checks_outbox.o12_expiry, checks_outbox.o17_outcome_routed,
)  # fmt: skip
_OPTIONS = draw(0)
_OF_THE_MOMENT = {"position", "events_left", "received_at", "created_at", "first_attempt_at", "until"}
_EVENT = re.compile(r"e\d+")


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The claims that are held, and the alert, as they stand when a race begins."""

    turns: dict[str, TurnClaim]
    sends: dict[str, DispatchClaim]
    alert: int
    now: int
    post: Postroad

    def hold(self, stream: str) -> Hold:
        """The proof of a stream's claim."""
        return Hold(stream, self.turns[stream].token)

    def proof(self, key: str) -> Hold:
        """The proof of a dispatch's claim."""
        return Hold(self.sends[key].id, self.sends[key].token)

    def token(self, key: str) -> Presented:
        """What acknowledges a dispatch in its first epoch."""
        return KEYS.read(word(key))

    def result(self, key: str, result: Any = "ok", *, gate: str | None = None) -> Settlement:
        """What came of the attempt that a dispatch's claim began; if it is unreachable, this gate is closed."""
        return came_of(self.sends[key], result, gate=gate)

    def settled(self, conn: Connection, *results: Settlement) -> Any:
        """Settle these, as a dispatcher does: locked first."""
        settle.lock(conn, results)
        return settle.settle(conn, results, now=self.now)


def came_of(held: DispatchClaim, result: Any = "ok", *, gate: str | None = None, **changes: Any) -> Settlement:
    """The result of a claim's attempt. What is unreachable closes its host's gate, or the one that is named."""
    about: dict[str, Any] = {"policy": POLICIES[held.kind], "error": DOWN if result == "unreachable" else ""}
    about |= {"host": held.host, "probe": held.probe, "gate": (held.host or "") if gate is None else gate}
    return Settlement(id=held.id, token=held.token, attempt=held.attempt, result=result, **about | changes)


def word(key: str) -> str:
    """The token of the dispatch `d<number>` in its first epoch."""
    return KEYS.token(f"{int(key[1:]):032x}", 0)


def mail(number: int, **changes: Any) -> NewDispatch:
    """The dispatch `d<number>`, due long ago."""
    return dispatch(number, **{"key": f"d{number}", **changes})


def hook(number: int, host: str | None, **changes: Any) -> NewDispatch:
    """The dispatch `h<number>` to a host, due long ago."""
    to = "ann" if host is None else f"https://{host}/"
    return dispatch(number, **{"key": f"h{number}", "kind": "hook", "host": host, "destination": to, **changes})


def program(database: Database) -> Postroad:
    """The app of a program that joins its own transactions."""
    post = Postroad(database.engine, schema=database.schema, secret_key="the secret of the races")
    post.elsewhere("mail")
    return post


def unsynced(url: str) -> Database:
    """A database in a file that is not synced to the disk: for tests that end no process."""
    database = Database(url)
    event.listen(database.engine, "connect", lambda raw, _: raw.execute("PRAGMA synchronous = OFF"))
    return database


def build(database: Database) -> Scene:
    """Make the scene and keep a copy of it."""
    now = SystemClock().wall()  # a program that joins has the time of its own clock
    with database.engine.begin() as conn:
        bound = database.bind(conn)
        lost_turns, lost_sends = _begin_lost(bound, now=now - 2 * LEASE)
        down = _begin_down(bound, now=now - LEASE // 3)
        scene = _begin_held(bound, lost_turns, [*lost_sends, *down], program(database), now=now)
        scene = replace(scene, turns=scene.turns | _begin_gone(bound, now=now - 2 * DAY))
        for table in COPIED:
            conn.exec_driver_sql(_of(database, f"CREATE TABLE scene_{table} AS SELECT * FROM {{p}}{table}"))
    return scene


def _begin_lost(conn: Connection, *, now: int) -> tuple[ClaimedTurns, Sequence[DispatchClaim]]:
    inbox.publish(conn, [new_event(1, "load/2")], now=now)
    _begin_asking(conn, now=now)
    given = [mail(3, stream="load/2"), mail(5, max_attempts=1)]
    outbox.insert(conn, given, source="app", actor="", in_turn=False, now=now)
    claimed = dispatch_claims.claim(conn, POLICY, names=["mail"], token="lost", limit=10, now=now)
    return claim(conn, "lost", now=now), claimed.claims


def _begin_asking(conn: Connection, *, now: int) -> None:
    """What was sent once, and what has died."""
    asking = [mail(7, stream="load/3", ack_required=1), mail(9, ack_required=1)]
    outbox.insert(conn, asking, source="app", actor="", in_turn=False, now=now)
    claimed = dispatch_claims.claim(conn, POLICY, names=["mail"], token="once", limit=10, now=now)
    came = [
        Settlement(id=one.id, token=one.token, attempt=1, result=result, policy=POLICY)
        for one, result in zip(claimed.claims, ("ok", "permanent"), strict=True)
    ]
    settle.settle(conn, came, now=now)


def _begin_down(conn: Connection, *, now: int) -> list[DispatchClaim]:
    """What is down, and who has found out; the claims that are still held."""
    _send(conn, [hook(11, "a.example")], "down", "unreachable", now=now - LEASE)
    tries = _send(conn, [], "tries", now=now)
    _send(conn, [hook(12, "b.example")], "down", "unreachable", now=now)
    idle = hook(19, "idle.example", max_attempts=1)
    _send(conn, [idle], "down", "unreachable", policy=msgspec.structs.replace(HOOK, patience=0), now=now)
    _send(conn, [hook(17, None, kind="text")], "down", "unreachable", policy=TEXT, now=now)
    goes = _send(conn, [hook(14, "c.example"), hook(16, "c.example")], "goes", now=now)
    outbox.insert(conn, [hook(15, "c.example")], source="app", actor="", in_turn=False, now=now)
    return [*tries, *goes]


def _send(
    conn: Connection, given: list[NewDispatch], token: str, result: str = "", *, policy: SendPolicy = HOOK, now: int
) -> Sequence[DispatchClaim]:
    """Send these, and settle that if there is a result."""
    outbox.insert(conn, given, source="app", actor="", in_turn=False, now=now)
    claims = dispatch_claims.claim(conn, policy, names=[policy.kind], token=token, limit=10, now=now).claims
    if result:
        settle.settle(conn, [came_of(one, result, policy=policy, fraction=0.0) for one in claims], now=now)
    return claims


def _begin_held(
    conn: Connection, lost: ClaimedTurns, sends: Sequence[DispatchClaim], post: Postroad, *, now: int
) -> Scene:
    inbox.publish(
        conn, [new_event(n, s) for s, n in (("load/1", 1), ("load/1", 2), (LANDED, 1), ("load/5", 1))], now=now
    )
    given = [mail(1, stream="load/1"), mail(6, stream="load/1", ack_required=1)]
    outbox.insert(conn, given, source="app", actor="", in_turn=False, now=now)
    sent = dispatch_claims.claim(conn, POLICY, names=["mail"], token="sent", limit=2, takeover=False, now=now)
    held = claim(conn, "held", takeover=False, now=now)
    log.append(conn, LANDED, [entry("e1")], expected_version=0, now=now)
    inbox.publish(conn, [new_event(3, "load/1"), new_event(1, "load/3"), new_event(2, "load/3")], now=now)
    given = [mail(2, stream="load/1"), mail(4, stream="load/3", expires_at=now - 1)]
    given.append(mail(8, ack_required=1, expires_at=now - 1))
    outbox.insert(conn, given, source="app", actor="", in_turn=False, now=now)
    given = [("t1", now - 1), ("t2", now + 900 * SECOND)]
    timers.apply(conn, [armed("set", key, at) for key, at in given], now=now)
    alerts.raise_alerts(conn, [NewAlert(code="scene", subject="scene")], now=now)
    return Scene(
        turns={one.stream: one for one in [*lost.claims, *held.claims]},
        sends={one.key: one for one in [*sends, *sent.claims]},
        alert=alerts.unrung(conn)[-1][0],
        now=now,
        post=post,
    )


def _begin_gone(conn: Connection, *, now: int) -> dict[str, TurnClaim]:
    """What was deleted; the claim that was held then."""
    full, held = GONE
    inbox.publish(conn, [new_event(1, full), new_event(2, full)], now=now)
    (before,) = claim(conn, "gone", now=now).claims
    call = Hold(full, before.token)
    row = OperationRow(
        turn_id=before.turn_id, ordinal=1, run_id=before.run_id, stream=full, tool="find", version=1, effect="read",
        arguments="{}",
    )  # fmt: skip
    operations.start(conn, [operations.Start(hold=call, row=row)], now=now)
    said = Said(name=full, token=before.token, run=before.run_id, turn=before.turn_id, words="hm")
    partials.carry(conn, [said], {}, now=now)
    decision = decided(before, "note", consumed=before.events[:1], dead=before.events[1:], dead_reason="poison")
    turns.commit(conn, [decision], now=now)
    inbox.publish(conn, [new_event(1, held), new_event(2, held)], now=now)
    late = claim(conn, "late", now=now).claims
    BEGIN.run(conn, [Records(deletions=list(GONE))], now=now)
    inbox.add(conn, [new_event(3, full)], now=now)
    timers.apply(conn, [armed("set", "t6", now, full)], now=now)
    return {one.stream: one for one in late}


def armed(verb: Any, key: str, at: int, stream: str = "load/1") -> TimerChange:
    """A change of a timer that is due at `at`."""
    return TimerChange(verb=verb, stream=stream, key=key, fire_at=at, spec=f"at {at}")


def claim(conn: Connection, token: str, *, takeover: bool = True, now: int) -> ClaimedTurns:
    """One pass of claiming loads."""
    return queues.claim(
        conn, stream_type=TYPE, token=token, limit=10, batch=2 if token == "held" else 10, lease=LEASE,
        takeover=takeover, now=now,
    )  # fmt: skip


def restore(database: Database, conn: Connection) -> None:
    """Put the scene's rows back, and the numbers that are given out next."""
    statements = []
    for table in COPIED:
        statements.append(f"DELETE FROM {{p}}{table}")
        given = "OVERRIDING SYSTEM VALUE " if not database.is_sqlite else ""
        statements.append(f"INSERT INTO {{p}}{table} {given}SELECT * FROM scene_{table}")
    if database.is_sqlite:
        for statement in statements:
            conn.exec_driver_sql(_of(database, statement))
        return
    for table, column in (("inbox", "position"), ("transitions", "id"), ("alerts", "id")):
        name = f"""pg_get_serial_sequence('"{database.schema}".{PREFIX}{table}', '{column}')"""
        statements.append(f"SELECT setval({name}, (SELECT max({column}) FROM scene_{table}))")
    raw: Any = conn.connection.dbapi_connection
    raw.execute("; ".join(_of(database, statement) for statement in statements))


def _of(database: Database, statement: str) -> str:
    schema = f'"{database.schema}".' if database.schema else ""
    return render(statement, database.engine.dialect.name, database.schema).replace("scene_", f"{schema}scene_")


def broken(history: History) -> Iterator[str]:
    """Which invariants of the tables do not hold."""
    parked = any(row.state == "parked" for row in history.queues)
    for check in CHECKS:
        for said in check(history):
            if not any(name in said for name in (LANDED, *GONE)) and not (parked and "at the end" in said):
                yield f"{check.__name__}: {said}"
    for stream, rows in grouped(history.log, "stream").items():
        # e8 and e9 are published in the race, all others were there before it.
        numbers = [min(int(row.entry_id[1:]), 8) for row in rows if _EVENT.fullmatch(row.entry_id)]
        if numbers != sorted(numbers):
            yield f"order: {stream} has {numbers}"


def lost(history: History, answers: Sequence[Any]) -> Iterator[str]:
    """Which claims that were answered are not held, unless an acknowledgement has ended them."""
    held = {row.stream: row.claim_token for row in history.queues} | {row.id: row.claim_token for row in history.outbox}
    acked = {row.id for row in history.outbox if row.status == Status.ACKED}
    for answer in answers:
        if isinstance(answer, ClaimedTurns | ClaimedDispatches):
            for one in answer.claims:
                subject = one.stream if isinstance(one, TurnClaim) else one.id
                if held.get(subject) != one.token and subject not in acked:
                    yield f"{subject} is claimed by {held.get(subject)}, {one.token} was answered too"


def look(conn: Connection, *, end: bool = False) -> History:
    """All rows as this transaction sees them."""
    found = tables(conn)
    deleted = [SimpleNamespace(stream=row.id) for row in found["streams"] if row.deleted_at is not None]
    return History(options=_OPTIONS, now=0, ledger=Ledger(), end=end, deleted=deleted, **found)


def drain(conn: Connection, *, now: int) -> None:
    """Do all that is left to be done, as one program after every lease would."""
    for number in range(DRAINS_MAX):
        now += 1_000 * SECOND
        fired = timers.fire(conn, limit=100, now=now)
        expired = settle.expire(conn, limit=100, now=now)
        won = claim(conn, f"drain-{number}", now=now).claims
        turns.commit(conn, [decided(one) for one in won], now=now)
        sent = sum(_drain_sends(conn, policy, f"drain-{number}", now=now) for policy in POLICIES.values())
        if not (fired.count or fired.dropped or expired or won or sent):
            return
    raise AssertionError("there is no end to it")


def _drain_sends(conn: Connection, policy: SendPolicy, token: str, *, now: int) -> int:
    found = dispatch_claims.claim(conn, policy, names=[policy.kind], token=token, limit=100, now=now)
    settle.settle(conn, [came_of(one) for one in found.claims], now=now)
    return len(found.claims) + len(found.ended)


def came_to(history: History) -> dict[str, list[Any]]:
    """What it comes to for those who ask neither when nor by whom a thing was done.

    Events of two transactions in one stream may stand in either order; `broken` looks at those that may not.
    """
    keys = {row.id: row.key for row in history.outbox}
    return {
        "gone": sorted(history.gone),
        "log": sorted((row.stream, row.entry_id) for row in history.log),
        "inbox": sorted((row.stream, row.event_id, row.reason) for row in history.inbox),
        "queues": [(row.stream, row.state) for row in history.queues],
        "outbox": sorted((row.key, row.status, row.attempt, row.epoch) for row in history.outbox),
        "timers": [(row.stream, row.key, row.status, row.generation) for row in history.timers],
        "runs": sorted((row.stream, row.claim_token.split("-")[0], str(row.end_reason)) for row in history.runs),
        "steps": sorted((keys[row.entity], str(row.from_status), row.reason_code) for row in history.transitions),
        "alerts": sorted((row.code, row.subject, row.rung_at is None) for row in history.alerts),
        "gates": [(row.kind, row.host, row.failures) for row in history.gates],
    }


def exact(history: History) -> str:
    """All rows, as a text."""
    return repr([getattr(history, name) for name in TABLES])


def plain(answer: Any) -> Any:
    """An answer without what the moment decides: times, positions, and whether the stream has more events by now."""
    if isinstance(answer, Exception):
        return type(answer).__name__
    return _without(msgspec.to_builtins(answer), _OF_THE_MOMENT)


def _without(value: Any, names: set[str]) -> Any:
    if isinstance(value, dict):
        return {name: _without(part, names) for name, part in value.items() if name not in names}
    return [_without(part, names) for part in value] if isinstance(value, list) else value
