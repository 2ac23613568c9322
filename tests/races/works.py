"""Every transaction of ours, as a worker, a dispatcher, a pump, a program or an operator runs it over the scene.

`at` are the rows that it locks, writes, or decides by: `q1` the queues row of load/1, `i1` that stream's inbox, `l1`
its log and version, `u1` its runs, `k1` the dispatch key of that name, `d1`, `h11` and `t1` the scene's dispatches and
timers, `ga` the gate of a.example, `g` that of all hooks, `gt` that of all texts, `rt` their rate, `a` the alerts. Two
that have one in common can meet; what has none in common with another shares no row with it.
`python -m tests.races.works` prints the table of all pairs, with where they meet.

Not here: retention but for what deleted streams contained, and operators' verbs but for `retry` and a deletion; reads,
which lock nothing.
"""

from collections.abc import Callable
from itertools import combinations_with_replacement, count
from typing import Any

from sqlalchemy import Connection

from postroad.model.clock import SECOND
from postroad.model.errors import PostroadError
from postroad.model.rows import NewAlert
from postroad.store import (
    acks,
    alerts,
    audit,
    dispatch_claims,
    migrations,
    operators,
    outbox,
    queues,
    settle,
    timers,
    turns,
)
from postroad.store import inbox as inboxes
from postroad.store.database import Database
from postroad.store.operators import Due, Orders
from postroad.testing.contracts.streams import decided, event
from tests.races import deletion_works, gate_works  # noqa: F401 (they are put into the table)
from tests.races.scene import LEASE, POLICY, TYPE, Scene, armed, claim, mail, word
from tests.races.transactions import WORKS, Transaction, work

_passes = count()  # a claimant's token is new for each pass


@work("i1 i3")
def publish_new(conn: Connection, scene: Scene, who: str) -> Any:
    return inboxes.publish(conn, [event(9, "load/3"), event(9, "load/1")], now=scene.now)


@work("i1 i2 l1 l2")
def publish_again(conn: Connection, scene: Scene, who: str) -> Any:
    return inboxes.publish(conn, [event(1, "load/1"), event(1, "load/2")], now=scene.now)


@work("i1 l1")
def publish_other(conn: Connection, scene: Scene, who: str) -> Any:
    return inboxes.publish(conn, [event(8, "load/1"), event(1, "load/1", data='{"n":2}')], now=scene.now)


@work("q1 q2 q3 q4 q5 i1 i2 i3 i4 i5 l1 l2 l3 l4 l5 u2 q6 i6 l6 q7 i7 l7 u7", skips=True)
def claim_turns(conn: Connection, scene: Scene, who: str) -> Any:
    return claim(conn, f"claim-{who}", now=scene.now)


@work("q2 q3 i2 i3 l2 l3 u2 q6 i6 l6 q7 i7 l7 u7", skips=True)
def whole_turns(conn: Connection, scene: Scene, who: str) -> Any:
    """Claims and their commits at once, of which others see only what is left: a stream that is free, or free again."""
    done = []
    while won := queues.claim(
        conn, stream_type=TYPE, token=f"turn-{next(_passes)}", limit=2, batch=1, lease=LEASE, now=scene.now
    ).claims:
        done += turns.commit(conn, [decided(one) for one in won], now=scene.now)
    return done


@work("q1 i1 i3 l1 u1 k1 d2 t1 t3 a")
def commit(conn: Connection, scene: Scene, who: str) -> Any:
    decision = decided(
        scene.turns["load/1"],
        "note",
        dispatches=[mail(21, key="k1", stream="load/1")],
        timers=[armed("cancel", "t1", 0), armed("set", "t3", scene.now + SECOND)],
        withdrawals=["d2"],
        publishes=[event(9, "load/3")],
        alerts=[NewAlert(code="turn", subject="load/1")],
    )
    return turns.commit(conn, [decision], now=scene.now)


@work("q2 i1 i2 l2 k1 d2 t1")
def commit_lost(conn: Connection, scene: Scene, who: str) -> Any:
    decision = decided(
        scene.turns["load/2"],
        dispatches=[mail(22, key="k1", stream="load/2")],
        timers=[armed("rearm", "t1", scene.now)],
        withdrawals=["d2"],
        publishes=[event(9, "load/1")],
    )
    return turns.commit(conn, [decision], now=scene.now)


@work("q1 q5 i1 i5 l1 l5 u1 u5")
def commit_group(conn: Connection, scene: Scene, who: str) -> Any:
    held = [scene.turns["load/5"], scene.turns["load/1"]]
    return turns.commit(conn, [decided(one, "group") for one in held], now=scene.now)


@work("q1 u1")
def back_off(conn: Connection, scene: Scene, who: str) -> Any:
    hold = scene.hold("load/1")
    queues.lock(conn, [hold])
    return queues.back_off(conn, hold, delay=SECOND, error="e", now=scene.now)


@work("q1 u1")
def release(conn: Connection, scene: Scene, who: str) -> Any:
    return queues.release(conn, scene.hold("load/1"), now=scene.now)


@work("q1 u1")
def split(conn: Connection, scene: Scene, who: str) -> Any:
    return queues.split(conn, scene.hold("load/1"), error="e", now=scene.now)


@work("q1 u1")
def park(conn: Connection, scene: Scene, who: str) -> Any:
    alert = NewAlert(code="turn.parked", subject="load/1")
    return queues.park(conn, scene.hold("load/1"), error="e", alert=alert, now=scene.now)


@work("q1 q2 q5")
def renew(conn: Connection, scene: Scene, who: str) -> Any:
    holds = [scene.hold(stream) for stream in ("load/5", "load/2", "load/1")]
    queues.lock(conn, holds)
    return queues.renew(conn, holds, lease=LEASE, now=scene.now)


@work("q1 q2")
def put_back(conn: Connection, scene: Scene, who: str) -> Any:
    return queues.put_back(conn, [scene.hold("load/2"), scene.hold("load/1")], now=scene.now)


@work("q1 q4 q5 u1 u4 u5")
def release_all(conn: Connection, scene: Scene, who: str) -> Any:
    return sorted(queues.release_all(conn, "held", now=scene.now))


@work("q4 i4 l4 u4")
def drop_landed(conn: Connection, scene: Scene, who: str) -> Any:
    return turns.drop_landed(conn, scene.hold("load/4"), now=scene.now)


@work("u2")
def end_stale(conn: Connection, scene: Scene, who: str) -> Any:
    return queues.end_stale(conn, scene.hold("load/2"), now=scene.now)


@work("q1 q2 q4 q5 i1 i2 i3 i4 i5 i6 q7 i7", skips=True)
def adopt(conn: Connection, scene: Scene, who: str) -> Any:
    return queues.adopt(conn, stream_type=TYPE, now=scene.now)


@work("k1 d2 t1 t3 i1 i3")
def begin_block(conn: Connection, scene: Scene, who: str) -> Any:
    """All that a block of a program can record, in that program's own transaction."""
    with scene.post.join(conn) as tx:
        sent = tx.send("mail", {"n": 1}, key="k1")
        gone = tx.withdraw("d2")
        tx.cancel_timer("t1", stream="load/1")
        tx.set_timer("t3", after=1, stream="load/1")
        made = [tx.publish("load/3", "ping", {"n": 1}, key="e9"), tx.publish("load/1", "ping", {"n": 1}, key="e8")]
    return sent.created, gone.done, [one.created for one in made]


@work("d2 t1 t2")
def begin_small(conn: Connection, scene: Scene, who: str) -> Any:
    """A block that has no key in common with a turn, so that they meet later on."""
    with scene.post.join(conn) as tx:
        tx.cancel_timer("t1", stream="load/1")
        tx.cancel_timer("t2", stream="load/1")
        gone = tx.withdraw("d2")
    return gone.done


@work("k1 k2")
def insert_group(conn: Connection, scene: Scene, who: str) -> Any:
    given = [mail(42, key="k2"), mail(41, key="k1")]
    return outbox.insert(conn, given, source="app", actor="", in_turn=False, now=scene.now)


@work("d2 d3 d4 d5 d7 d8 k1 k2 i2 i3 l2 l3 a", skips=True)
def claim_sends(conn: Connection, scene: Scene, who: str) -> Any:
    return dispatch_claims.claim(conn, POLICY, names=["mail"], token=f"claim-{who}", limit=10, now=scene.now)


@work("d1 d3 i1 i2 l1 l2")
def settle_group(conn: Connection, scene: Scene, who: str) -> Any:
    return scene.settled(conn, scene.result("d3"), scene.result("d1", "permanent"))


@work("d1 i1 l1")
def settle_ok(conn: Connection, scene: Scene, who: str) -> Any:
    return scene.settled(conn, scene.result("d1"))


@work("d5 a")
def settle_lost(conn: Connection, scene: Scene, who: str) -> Any:
    return scene.settled(conn, scene.result("d5", "failed"))


def ack(conn: Connection, scene: Scene, *keys: str) -> Any:
    return acks.acknowledge(conn, [scene.token(key) for key in keys], actor="ann", now=scene.now)


@work("d6 i1 l1")
def ack_sending(conn: Connection, scene: Scene, who: str) -> Any:
    return ack(conn, scene, "d6")


@work("d6 d7 i1 i3 l1 l3")
def ack_both(conn: Connection, scene: Scene, who: str) -> Any:
    return ack(conn, scene, "d7", "d6")


@work("d2 d7 i1 i3 l1 l3")
def begin_ack(conn: Connection, scene: Scene, who: str) -> Any:
    """A block that acknowledges the one and withdraws the other: rows that others lock the other way round."""
    with scene.post.join(conn) as tx:
        tx.ack(word("d7"))
        gone = tx.withdraw("d2")
    return gone.done


@work("d8 a")
def ack_late(conn: Connection, scene: Scene, who: str) -> Any:
    return ack(conn, scene, "d8")


@work("d9")
def ack_dead(conn: Connection, scene: Scene, who: str) -> Any:
    return ack(conn, scene, "d9")


@work("d9")
def retry(conn: Connection, scene: Scene, who: str) -> Any:
    orders = Orders(by=audit.Operator(actor="ann"))
    return operators.retry(conn, [f"{9:032x}"], orders=orders, due=Due(), now=scene.now).done


@work("d6 i1 l1")
def settle_asked(conn: Connection, scene: Scene, who: str) -> Any:
    return scene.settled(conn, scene.result("d6"))


@work("d6 i1 l1")
def settle_asked_failed(conn: Connection, scene: Scene, who: str) -> Any:
    return scene.settled(conn, scene.result("d6", "permanent"))


@work("d6")
def release_asked(conn: Connection, scene: Scene, who: str) -> Any:
    return dispatch_claims.release(conn, [scene.proof("d6")], now=scene.now)


@work("d2 d7 d8 i1 i3 l1 l3")
def withdraw_asked(conn: Connection, scene: Scene, who: str) -> Any:
    return outbox.withdraw(conn, ["d8", "d7", "d2"], actor="ann", now=scene.now)


@work("d1")
def release_send(conn: Connection, scene: Scene, who: str) -> Any:
    return dispatch_claims.release(conn, [scene.proof("d1")], now=scene.now)


@work("d1 d3")
def recheck(conn: Connection, scene: Scene, who: str) -> Any:
    return dispatch_claims.recheck(conn, [scene.proof("d3"), scene.proof("d1")], now=scene.now)


@work("d1 d2 d4 i1 i3 l1 l3")
def withdraw(conn: Connection, scene: Scene, who: str) -> Any:
    return outbox.withdraw(conn, ["d4", "d2", "d1"], actor="ann", now=scene.now)


@work("d4 d8 i3 l3 a", skips=True)
def expire(conn: Connection, scene: Scene, who: str) -> Any:
    return settle.expire(conn, limit=10, now=scene.now)


@work("t1 t2 t3")
def timers_change(conn: Connection, scene: Scene, who: str) -> Any:
    changes = [armed("set", "t3", scene.now + SECOND), armed("rearm", "t2", scene.now), armed("cancel", "t1", 0)]
    return timers.apply(conn, changes, now=scene.now)


@work("t1 t3")
def timers_set(conn: Connection, scene: Scene, who: str) -> Any:
    return timers.apply(conn, [armed("set", "t3", scene.now + 2), armed("set", "t1", scene.now - 1)], now=scene.now)


@work("t1 i1 l1 t6 l6 a", skips=True)
def fire(conn: Connection, scene: Scene, who: str) -> Any:
    return timers.fire(conn, limit=10, now=scene.now)


@work("a")
def ring(conn: Connection, scene: Scene, who: str) -> Any:
    alerts.mark_rung(conn, [scene.alert], now=scene.now)


@work("schema")
def migrate(conn: Connection, scene: Scene, who: str) -> Any:
    migrations.lock(conn)
    return migrations.climb(conn, now=scene.now)


def carried_out(
    database: Database,
    one: Transaction,
    scene: Scene,
    who: str,
    *,
    began: Callable[[], object] = lambda: None,
    ended: Callable[[], object] = lambda: None,
) -> Any:
    """The answer of a transaction, or the refusal that it ended with; told when it has begun and before its end."""
    with database.engine.connect() as conn, conn.begin() as transaction:
        began()
        try:
            answer = one.fn(database.bind(conn), scene, who)
        except PostroadError as refusal:
            answer = refusal
        ended()
        if isinstance(answer, PostroadError):
            transaction.rollback()
    return answer


def pairs() -> list[tuple[Transaction, Transaction]]:
    """All that can meet, two of the same kind too."""
    return [pair for pair in combinations_with_replacement(WORKS.values(), 2) if pair[0].meets(pair[1])]


if __name__ == "__main__":
    for one, other in pairs():
        print(f"| {one.name} | {other.name} | {' '.join(sorted(one.at & other.at))} |")
