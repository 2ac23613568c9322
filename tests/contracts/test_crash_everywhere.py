"""A process that dies, or loses its connection, before any statement of any verb on dispatches.

Each verb runs once undisturbed, which says what its statements are, COMMIT among them, and what it answers and leaves.
Then it runs again from the same rows for each of these statements, and twice it is struck before it: by the death of
its process, which leaves every row of every table as it was; then, as another process tries again, by the end of that
one's connection, after which it comes to what it would have. Of COMMIT that one hears that nobody knows, and tries once
more.
A last run loses only the answer of its COMMIT.

That these are all verbs and all their statements is a test too. It cannot catch what a second transaction sees between
two statements; the races and the simulation do that.
"""

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import msgspec
import pytest

from postroad.engine.records import BEGIN, Records
from postroad.model.clock import FakeClock
from postroad.model.dispatches import DispatchFilter, Withdrawn
from postroad.model.errors import PostroadError
from postroad.model.rows import Hold, Settlement
from postroad.store import (
    acks,
    audit,
    dispatch_claims,
    dispatch_filters,
    lanes,
    moves,
    operators,
    outbox,
    purging,
    settle,
    tombstones,
    transitions,
)
from postroad.store.database import Database
from postroad.store.operators import Due, Many, Orders
from postroad.store.statements import Statement
from tests.contracts import striking
from tests.contracts.outbox_scene import POLICIES, Scene, id_of, result, token
from tests.contracts.soundness import wrong
from tests.contracts.striking import COMMIT, Crash, rows_of
from tests.lost_answers import lose_answers

Verb = Callable[[Scene], Any]
ONCE_MORE = "once more"
ANN = Orders(by=audit.Operator(actor="ann", reason="asked to"))
FORCED = msgspec.structs.replace(ANN, force=True)
MODULES = (acks, dispatch_claims, lanes, moves, operators, outbox, purging, settle, tombstones, transitions)
# What only reads, or only counts what others have left.
LOOKS = {
    "dispatch_claims._CURRENT", "dispatch_claims._BY_TOKEN", "lanes._UNSEEN", "settle._HELD", "settle._LATE_WORDS",
}  # fmt: skip


def claim(scene: Scene, kind: str, *names: str) -> Any:
    """A pass of claiming; whose answer was lost is looked up, as the dispatcher does."""
    if scene.call == ONCE_MORE:
        return scene.database.read(dispatch_claims.lookup, "claimed")
    return scene.database.transact(
        dispatch_claims.claim, POLICIES[kind], names=[kind, *names], token="claimed", limit=100
    )


def settled(scene: Scene, came: str) -> Any:
    """What a dispatcher settles together: all that is held, and what it held before others took it over."""
    batch = [*(result(held, came) for held in scene.held.values()), result(scene.lost, came)]
    return settle_all(scene, batch)


def settle_all(scene: Scene, batch: list[Settlement]) -> Any:
    """Settle as the dispatcher does."""
    lock = partial(settle.lock, settlements=batch)
    return scene.database.transact(settle.settle, batch, lock=lock, urgent=True)


def release(scene: Scene) -> Any:
    """Give back what nothing was begun of."""
    holds = [Hold(held.id, held.token) for held in scene.held.values()]
    return scene.database.transact(dispatch_claims.release, holds)


def block(scene: Scene, *, tokens: tuple[str, ...] = (), keys: tuple[str, ...] = ()) -> Any:
    """A program's block that acknowledges and withdraws."""
    records = Records(acks=[token(key) for key in tokens], withdrawals=[(key, Withdrawn()) for key in keys])
    return scene.database.group(BEGIN, records)


def send(scene: Scene, *more: Any) -> Any:
    """Write new dispatches, one that there is, and one whose key is taken by what is gone."""
    given = [
        scene.new("new/one"),
        scene.new("due/plain"),
        scene.new("new/laned", lane="busy"),
        scene.new("over/purged"),
    ]
    return scene.database.transact(outbox.insert, [*given, *more], source="app", actor="", in_turn=False)


def replay(scene: Scene) -> Any:
    """Send what a dead letter of a lane says once more."""
    return operate(scene, operators.replay, "over/blocking", new_id=scene.id("new/replayed"), key="new/replayed")


def operate(scene: Scene, verb: Any, *keys: str, **how: Any) -> Any:
    """An operator's verb on one dispatch or on several, as `post.dispatches` calls it."""
    ids = [id_of(key) for key in keys]
    given: Any = ids[0] if verb in (operators.resolve, operators.replay) else ids
    return scene.database.transact(verb, given, lock=lambda conn: operators.hold(conn, ids), **{"orders": ANN, **how})


def many(scene: Scene) -> Any:
    """A retry of all that a filter chooses, some of which have moved on since."""
    fitting = dispatch_filters.chosen(DispatchFilter(kind="over"), statuses=operators.RETRIABLE)
    orders = msgspec.structs.replace(ANN, many=Many(filter="kind=over", fitting=fitting, cautious=True))
    keys = ("over/dead", "over/expired", "over/unknown", "over/delivered")
    return operate(scene, operators.retry, *keys, orders=orders, due=Due(gap=5))


OVER = ("over/dead", "over/expired", "over/blocking", "over/skipped", "over/again", "over/delivered")
GONE = (*OVER, "over/unknown")
IDLE = ("idle/plain", "idle/stream", "idle/first")
VERBS: dict[str, Verb] = {
    "claim": lambda s: claim(s, "due", "due before"),
    "claim what is parked": lambda s: claim(s, "parked"),
    "promote": lambda s: s.database.transact(lanes.promote, ["due"], limit=100),
    "release": release,
    "expire": lambda s: s.database.transact(settle.expire, limit=100),
    **{f"settle {came}": partial(settled, came=came) for came in ("ok", "failed", "permanent", "unknown", "cut_short")},
    "settle one": lambda s: settle_all(s, [result(s.held["held/stream"], "failed")]),
    "ack": lambda s: block(s, tokens=("held/asking", "idle/asking too")),
    "withdraw": lambda s: block(s, keys=IDLE),
    "ack and withdraw": lambda s: block(s, tokens=("idle/asking",), keys=("idle/asking", *IDLE, "over/dead")),
    "ack what is refused": lambda s: block(s, tokens=("idle/asking", "idle/plain"), keys=IDLE),
    "send": send,
    "send what is refused": lambda s: send(s, s.new("idle/plain", content_hash="other")),
    "retry": lambda s: operate(s, operators.retry, *OVER, due=Due(expires=9, gap=5)),
    "retry many": many,
    "resolve as sent": lambda s: operate(s, operators.resolve, "over/unknown", how="sent", due=Due()),
    "resolve by resending": lambda s: operate(s, operators.resolve, "over/unknown", how="resend", due=Due()),
    "resolve by discarding": lambda s: operate(s, operators.resolve, "over/unknown", how="discard", due=Due()),
    "replay": replay,
    "withdraw as an operator": lambda s: operate(s, operators.withdraw, *IDLE, "held/plain"),
    "purge": lambda s: operate(s, operators.purge, *GONE, "held/plain"),
    "purge with history": lambda s: operate(s, operators.purge, "over/delivered", history=True),
    "purge in flight": lambda s: operate(s, operators.purge, *IDLE, "held/first", "held/stream", orders=FORCED),
}


def answer(verb: Verb, scene: Scene) -> Any:
    """What the verb answers, as plain values; of an error its class."""
    try:
        return msgspec.to_builtins(verb(scene), enc_hook=str)
    except (PostroadError, Crash) as error:
        return type(error).__name__


def prepared(database: Database, clock: FakeClock) -> Scene:
    """The scene, kept to be restored."""
    striking.quicken(database)
    scene = Scene(database, clock)
    assert wrong(rows_of(database)) == []
    striking.keep(database)
    return scene


def content(database: Database) -> dict[str, list[str]]:
    """All rows, in no order: of what is due at one time either may come first."""
    return {name: sorted(map(repr, rows)) for name, rows in rows_of(database).items()}


@pytest.mark.parametrize("name", VERBS)
def test_a_fault_before_each_statement(database: Database, clock: FakeClock, name: str) -> None:
    """Struck before any of its statements a verb has not happened, and it happens whole when it is tried again."""
    scene = prepared(database, clock)
    before = content(database)
    with striking.striking(database) as plain:
        expected = answer(VERBS[name], scene)
    after = content(database)
    assert wrong(rows_of(database)) == []
    assert (after == before) == ("refused" in name)
    struck = []
    for number in range(1, len(plain.statements) + 1):
        striking.restore(database)
        with striking.striking(database, number, way="dies") as fault:
            assert answer(VERBS[name], scene) == "Crash"
        struck.append(fault.struck)
        assert content(database) == before, f"a process died before {fault.struck}"
        # The next process tries again, and loses its connection at the same place.
        with striking.striking(database, number, way="breaks") as fault:
            came = answer(VERBS[name], scene)
        assert fault.struck == struck[-1]
        if fault.struck == COMMIT:
            assert (came, content(database)) == ("CommitUnknown", before)
            came = answer(VERBS[name], scene)
        assert (came, content(database)) == (expected, after), f"a connection broke before {fault.struck}"
    assert struck == plain.statements
    assert (COMMIT in struck) != ("refused" in name)
    print(f"{name}: struck before each of {len(struck)} statements")


@pytest.mark.parametrize("name", [name for name in VERBS if "refused" not in name])
def test_an_answer_that_is_lost(
    database: Database, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A COMMIT that happened unheard says so, has left all of it, and the verb once more changes no dispatch."""
    scene = prepared(database, clock)
    answer(VERBS[name], scene)
    after = content(database)
    striking.restore(database)
    with monkeypatch.context() as patch:
        lost = lose_answers(database, patch, happened=True)
        assert answer(VERBS[name], scene) == "CommitUnknown"
    assert (len(lost), content(database)) == (1, after)
    scene.call = ONCE_MORE
    answer(VERBS[name], scene)
    again = content(database)
    told = ("outbox", "inbox", "alerts", "lanes", "lane_members", "tombstones")
    assert {table: again[table] for table in told} == {table: after[table] for table in told}
    assert wrong(rows_of(database)) == []


def test_these_are_all_their_statements(database: Database, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every statement by which the store claims, settles, acknowledges or operates is reached by one of the verbs."""
    used: set[Statement] = set()
    original = Statement._for

    def note(self: Statement, *given: Any) -> Any:
        used.add(self)
        return original(self, *given)

    scene = prepared(database, clock)
    monkeypatch.setattr(Statement, "_for", note)
    for verb in VERBS.values():
        answer(verb, scene)
        striking.restore(database)
    others = "dispatch_claims._CLAIM_AND_RECORD" if database.is_sqlite else "dispatch_claims._CLAIM"
    assert {f"{_short(module)}.{name}" for module in MODULES for name in _missed(module, used)} == LOOKS | {others}


def _short(module: ModuleType) -> str:
    return module.__name__.rpartition(".")[2]


def _missed(module: ModuleType, used: set[Statement]) -> list[str]:
    found = {name: value for name, value in vars(module).items() if isinstance(value, Statement)}
    return [name for name, value in found.items() if value not in used]
