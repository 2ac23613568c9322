"""Each checker fails on a bad history: a good one with one thing changed."""

import copy
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from postroad.testing.simulation.checkers import CHECKS, violations
from postroad.testing.simulation.history import TABLES, History
from postroad.testing.simulation.ledger import Answer
from postroad.testing.simulation.options import OPERATIONS
from postroad.testing.simulation.seeds import play
from postroad.testing.simulation.sink import Begun
from tests.simulation.bad_gates import BAD_GATES
from tests.simulation.bad_reports import BAD_REPORTS, MORE_BAD_REPORTS
from tests.simulation.bad_tools import BAD_TOOLS
from tests.simulation.picking import change, first, sent, start_of

SEED = 114
CONVERSATIONS = 112
REPORTS = 70
CRONS = 131
OTHERS = (
    "landed", "rang", "purged", "tombstones", "audit", "gate_log", "operations", "deleted", "late", "opened", "ends",
    "beside",
)  # fmt: skip


@pytest.fixture(scope="module")
def recorded() -> History:
    """The end of a seed in which much has happened."""
    return ended(SEED)


@pytest.fixture(scope="module")
def spoken() -> History:
    """The end of a seed in which turns called tools, and people stopped and deleted streams."""
    return ended(CONVERSATIONS)


@pytest.fixture(scope="module")
def told() -> History:
    """The end of a seed in which jobs reported, and turns delegated."""
    return ended(REPORTS, operations=2 * OPERATIONS)


@pytest.fixture(scope="module")
def ticked() -> History:
    """The end of a seed in which crons ran several times."""
    return ended(CRONS, operations=2 * OPERATIONS)


@pytest.fixture
def history(recorded: History) -> History:
    """The same with rows that can be changed."""
    return loosened(recorded)


@pytest.fixture
def conversations(spoken: History) -> History:
    """The same with rows that can be changed."""
    return loosened(spoken)


def ended(seed: int, *, operations: int = OPERATIONS) -> History:
    verdict = play(seed, operations=operations)
    assert verdict.error is None
    assert verdict.history is not None
    return verdict.history


def loosened(recorded: History) -> History:
    loose = {name: [SimpleNamespace(**row._asdict()) for row in getattr(recorded, name)] for name in (*TABLES, *OTHERS)}
    return msgspec.structs.replace(
        recorded,
        **loose,
        written=set(recorded.written),
        arrivals=list(recorded.arrivals),
        rung=list(recorded.rung),
        tried=list(recorded.tried),
        handled=list(recorded.handled),
        sends=list(recorded.sends),
        deeds=copy.deepcopy(recorded.deeds),
        turned_away=list(recorded.turned_away),
        ledger=copy.deepcopy(recorded.ledger),
    )


def landed_order(h: History) -> Any:
    """An order that a turn decided on and that wanted something sent."""
    for row in h.log:
        if row.kind == "sim.order" and '"do":"send"' in row.data and any(o.stream == row.stream for o in h.outbox):
            return row
    raise AssertionError("this seed has none")


def published(h: History) -> Any:
    """A call that published and whose event has landed."""
    landed = {(row.stream, row.entry_id) for row in h.log}
    return next(call for call in h.ledger.accepted("publish") if (call.stream, call.key) in landed)


def swap_two_events(h: History) -> None:
    streams = [row.stream for row in h.landed]
    one, other = [row for row in h.landed if row.stream == max(streams, key=streams.count)][:2]
    one.position, other.position = other.position, one.position


def offer_late(h: History) -> None:
    streams = [call.stream for call in h.ledger.accepted("publish")]
    stream = max(streams, key=streams.count)
    landed = {(row.stream, row.entry_id): row.seq for row in h.log}
    calls = [c for c in h.ledger.accepted("publish") if c.stream == stream and (c.stream, c.key) in landed]
    calls.sort(key=lambda call: landed[call.stream, call.key])
    one, other = calls[0], next(call for call in calls if call.key != calls[0].key)
    for call in h.ledger.calls:
        if (call.stream, call.key) == (stream, one.key):
            call.begun, call.ended = 10_000, 10_001
    assert other.ended is not None


def refuse_what_landed(h: History) -> None:
    key = published(h).key
    for call in h.ledger.calls:
        if call.key == key:
            call.answer = Answer.REFUSED


def change_the_past(h: History) -> None:
    h.before = msgspec.structs.replace(h, log=copy.deepcopy(h.log))
    h.log[0].recorded_at += 1


def count_wrong(h: History) -> None:
    row = first(h.log, kind="sim.noted")
    row.data = row.data.replace('"before":', '"before":9')


def die_unseen(h: History) -> None:
    h.inbox.append(SimpleNamespace(stream="load/0", event_id="p1", reason="turn.dead.permanent", position=10_000,
                                   front=1, kind="sim.order", data="{}"))  # fmt: skip


def die_of_nothing(h: History) -> None:
    row = sent(h)
    row.status = "dead_letter"


def repeat_an_attempt(h: History) -> None:
    h.arrivals.append(h.arrivals[0])


def pass_in_a_lane(h: History) -> None:
    rows = [row for row in h.outbox if row.status == "delivered"][:2]
    last = max(rows, key=lambda row: [step.id for step in h.transitions if step.entity == row.id][-1])
    first(h.transitions, entity=last.id, from_status=None).id = -1  # sent before the other, and sent out after it
    for row in rows:
        row.lane = "lane"


def retry_too_soon(h: History) -> None:
    row = sent(h)
    row.body = '{"plan":["later"]}'
    start = first(h.transitions, entity=row.id, reason_code="dispatch.delivering.attempt")
    back = SimpleNamespace(**vars(start))
    back.reason_code, back.from_status, back.to_status = "dispatch.pending.retry_backoff", "delivering", "pending"
    again = SimpleNamespace(**vars(start))
    again.metadata = '{"attempt":2,"epoch":0}'
    place = h.transitions.index(start)
    h.transitions[place + 1 : place + 1] = [back, again]
    row.attempt = 2


def start_after_budget(h: History) -> None:
    row = sent(h)
    row.kind = "sim.mail"
    start = first(h.transitions, entity=row.id, reason_code="dispatch.delivering.attempt")
    start.metadata = '{"attempt":3,"epoch":0}'
    start.at = row.first_attempt_at + 31_000_000


def settle_for_another(h: History) -> None:
    row = first(h.outbox, status="delivered", attempt=1, epoch=0)
    start = first(h.transitions, entity=row.id, reason_code="dispatch.delivering.attempt")
    taken_over = SimpleNamespace(**vars(start))
    taken_over.metadata = '{"attempt":2,"epoch":0}'
    taken_over.from_status = "delivering"
    h.transitions.insert(h.transitions.index(start) + 1, taken_over)


def settle_twice(h: History) -> None:
    row = sent(h)
    result = first(h.transitions, entity=row.id, reason_code="dispatch.delivered.transport_ok")
    again = SimpleNamespace(**vars(result))
    again.reason_code, again.from_status = "dispatch.stale.transport_ok", "delivered"
    h.transitions.insert(h.transitions.index(result) + 1, again)


def take_over_from_the_living(h: History) -> None:
    h.options = msgspec.structs.replace(h.options, pauses=0, jumps=0, lost_commit=0, latency=0)
    place = next(number for number, (_, _, what) in enumerate(h.sends) if isinstance(what, Begun))
    h.sends.insert(place + 1, ("another", h.sends[place][1], Begun(7, 0)))


def keep_half_a_block(h: History) -> None:
    blocks = Counter(call.block for call in h.ledger.accepted("publish"))
    block = max(blocks, key=blocks.__getitem__)
    h.log[:] = [row for row in h.log if row.entry_id != lonely(h, block)]


def lonely(h: History, block: int) -> str:
    """An event of this block that nothing else asked for."""
    times = Counter(call.key for call in h.ledger.calls)
    return next(call.key for call in h.ledger.accepted("publish") if call.block == block and times[call.key] == 1)


def arrive_as(**about: Any) -> Callable[[History], None]:
    def change(h: History) -> None:
        h.arrivals[0] = msgspec.structs.replace(h.arrivals[0], **about)

    return change


def remove(table: str, find: Callable[[History], Any]) -> Callable[[History], None]:
    return lambda h: getattr(h, table).remove(find(h))


def outcome_of(h: History) -> Any:
    return first(h.log, entry_id=f"out:{sent(h).key}:delivered")


def fired(h: History) -> Any:
    return first(h.timers, status="fired")


def acked(h: History) -> Any:
    """A dispatch that was acknowledged, by a consumer who was told so."""
    told = {deed.subject for deed in h.deeds if deed.verb == "ack" and deed.answer is Answer.OK}
    return next(row for row in h.outbox if row.status == "acked" and row.id in told)


def waited_in_vain(h: History) -> Any:
    """The step from a send to a wait for its acknowledgement, after which it was sent again."""
    there = {row.id for row in h.outbox}
    return next(
        before
        for id in there
        for before, step in pairwise(h.stories[id])
        if before.reason_code == "dispatch.delivered.transport_ok" and step.to_status == "delivering"
    )


def ack_of(h: History) -> Any:
    """The step that ended a dispatch by its acknowledgement."""
    return first(h.transitions, entity=acked(h).id, reason_code="dispatch.acked.consumer")


def send_after_the_ack(h: History) -> None:
    h.sends.append(("p0/1", acked(h).id, Begun(9, 1)))


def refuse_the_true_token(h: History) -> None:
    deed = next(deed for deed in h.deeds if deed.subject == acked(h).id and deed.verb == "ack")
    deed.answer, deed.error = Answer.REFUSED, "BadAckToken"


def present_nothing(h: History) -> None:
    id = acked(h).id
    h.deeds[:] = [deed for deed in h.deeds if deed.subject != id]


def withdraw_in_vain(h: History) -> None:
    deed = next(deed for deed in h.deeds if deed.who == "app" and deed.answer is Answer.OK)
    deed.subject, deed.done = sent(h).key, 1


def by_the_operator(h: History, reason: str) -> Any:
    """The first step that an operator has made for this reason."""
    return first(h.transitions, source="operator", reason_code=reason)


def mix_up_epochs(h: History) -> None:
    retried = by_the_operator(h, "dispatch.pending.operator_retry")
    retried.metadata = retried.metadata.replace('"epoch":', '"epoch":7')


def resolve_what_was_sent(h: History) -> None:
    word = SimpleNamespace(**vars(start_of(h)))
    word.reason_code, word.from_status, word.to_status = "dispatch.resolved.sent", "delivered", "delivered"
    word.source = "operator"
    end = first(h.transitions, entity=sent(h).id, to_status="delivered")
    h.transitions.insert(h.transitions.index(end) + 1, word)


BAD: dict[str, Callable[[History], None]] = {
    "L1": change(lambda h: h.log[0], seq=7_000),
    "L2": change_the_past,
    "L4": keep_half_a_block,
    "L5": change(lambda h: h.ledger.accepted("publish")[0], key="gone"),
    "L6": refuse_what_landed,
    "L7": offer_late,
    "L8": lambda h: h.log.append(h.log[0]),
    "L10": count_wrong,
    "I1": die_unseen,
    "I2": lambda h: h.inbox.append(
        SimpleNamespace(stream=h.log[0].stream, event_id=h.log[0].entry_id, reason=None, position=10_000, front=1,
                        kind="x")
    ),
    "I3": swap_two_events,
    "I4": change(published, data='"other"'),
    "I6": lambda h: h.inbox.append(
        SimpleNamespace(stream="load/9", event_id="p0", reason=None, position=10_000, front=0, kind="x", data="{}")
    ),
    "T1": lambda h: h.runs.append(first(h.runs, end_reason="committed")),
    "T2": change(lambda h: first(h.runs, run_id=h.log[0].run_id), end_reason="stale"),
    "T3": remove("log", lambda h: first(h.log, kind="sim.noted")),
    "T6": lambda h: h.tried.append(("load/0", "t", 99)),
    "M1": change(fired, status="armed"),
    "M2": change(fired, fire_at=2**60),
    "O5": settle_for_another,
    "M7": remove("timers", fired),
    "O1": change(sent, status="pending", due_at=None),
    "O2": arrive_as(id="nobody"),
    "O3": change(start_of, from_status="delivered"),
    "O4": change(sent, claim_token="token"),
    "O6": change(sent, attempt=0),
    "O7": lambda h: h.arrivals.clear(),
    "O8": die_of_nothing,
    "O9": repeat_an_attempt,
    "O10": retry_too_soon,
    "O11": start_after_budget,
    "O12": change(sent, expires_at=0),
    "O13": pass_in_a_lane,
    "O14": take_over_from_the_living,
    "O15": arrive_as(body='{"take":9}'),
    "O16": settle_twice,
    "O17": remove("log", outcome_of),
    "O19": withdraw_in_vain,
    "A1": present_nothing,
    "A2": send_after_the_ack,
    "A3": refuse_the_true_token,
    "A4": lambda h: h.transitions.append(ack_of(h)),
    "A5": change(acked, status="dead_letter"),
    "A7": change(waited_in_vain, at=2**60),
    "P1": lambda h: h.audit.clear(),
    "P2": lambda h: h.tombstones.clear(),
    "P3": mix_up_epochs,
    "P4": resolve_what_was_sent,
    **BAD_GATES,
    "O18": lambda h: h.alerts.append(SimpleNamespace(code="x", subject="y", rung_at=1)),
}  # fmt: skip


def test_the_recorded_history_is_good(history: History, conversations: History, told: History, ticked: History) -> None:
    """The neighbour of all the bad histories breaks no invariant."""
    assert violations(history) == violations(conversations) == []
    assert violations(loosened(told)) == violations(loosened(ticked)) == []


@pytest.mark.parametrize("code", BAD)
def test_a_bad_history_is_seen(history: History, code: str) -> None:
    """The invariant of this name is what the changed history breaks, perhaps with others."""
    BAD[code](history)
    assert code in {wrong.partition(" ")[0] for wrong in violations(history)}


@pytest.mark.parametrize("code", BAD_TOOLS)
def test_a_bad_conversation_is_seen(conversations: History, code: str) -> None:
    """The invariant of this name is what the changed history breaks, perhaps with others."""
    BAD_TOOLS[code](conversations)
    assert code in {wrong.partition(" ")[0] for wrong in violations(conversations)}


@pytest.mark.parametrize("code", BAD_REPORTS)
def test_a_bad_report_is_seen(told: History, ticked: History, code: str) -> None:
    """The invariant of this name is what the changed history breaks, perhaps with others."""
    history = loosened(ticked if code.startswith("C") else told)
    BAD_REPORTS[code](history)
    assert code in {wrong.partition(" ")[0] for wrong in violations(history)}


@pytest.mark.parametrize(("code", "worsen"), MORE_BAD_REPORTS)
def test_another_bad_report_is_seen(
    told: History, ticked: History, code: str, worsen: Callable[[History], None]
) -> None:  # fmt: skip
    """The invariant of this name is what the changed history breaks, perhaps with others."""
    history = loosened(ticked if code.startswith("C") else told)
    worsen(history)
    assert code in {wrong.partition(" ")[0] for wrong in violations(history)}


def test_every_checker_has_a_bad_history() -> None:
    """No checker is trusted that was never seen to fail."""
    assert {name.partition(" ")[0] for name in CHECKS} == {*BAD, *BAD_TOOLS, *BAD_REPORTS}
