"""What must hold of dispatches, of what arrived, and of alerts. Each check yields what is wrong, in words."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import msgspec

from postroad.model.clock import SECOND
from postroad.model.ids import outcome_id
from postroad.model.lifecycle import EDGES, TERMINAL, Reason, Status
from postroad.store.transitions import STALE
from postroad.testing.simulation.history import History, Rows, grouped
from postroad.testing.simulation.sink import ENDED
from postroad.testing.simulation.workload import (
    FLOOR_SECONDS,
    MAIL,
    MAIL_BUDGET_SECONDS,
    PAGE,
    SMS,
    STEADY_CAP,
    STEADY_FIRST,
    Message,
    word_of,
)  # fmt: skip

_BY_THE_SENDER = frozenset({Reason.TRANSPORT_OK, Reason.RETRY_BACKOFF, Reason.PERMANENT, Reason.MAX_ATTEMPTS})
_DEATHS = frozenset(reason for reason in Reason if reason.startswith("dispatch.dead_letter"))
WAIT_SECONDS = 0.1
FOR_EVER = 2**63
_AT_LAST_ATTEMPT = frozenset({Reason.MAX_ATTEMPTS, Reason.LEASE_LOST, Reason.ACK_TIMEOUT})


def o1_no_lost_action(h: History) -> Iterator[str]:
    """At the end every dispatch is at its end; until then an unfinished one has a time, or a lane to wait in."""
    for row in h.outbox:
        waits = row.lane is not None and row.status == Status.PENDING
        if row.status not in TERMINAL and (h.end or (row.due_at is None and not waits)):
            yield f"{row.key} is {row.status}, due at {row.due_at}"


def o2_no_phantom(h: History) -> Iterator[str]:
    """What arrived had been committed, with that key and content."""
    rows = {row.id: row for row in h.outbox}
    for arrival in h.arrivals:
        row = rows.get(arrival.id)
        if row is None:
            yield f"{arrival.key} arrived and was never committed"
        elif (row.key, row.kind, row.destination) != (arrival.key, arrival.kind, arrival.to):
            yield f"{arrival.key} arrived as {arrival}"


def o3_legal(h: History) -> Iterator[str]:
    """A dispatch's history is a path of legal edges from its beginning to the status that it has."""
    stories = h.stories
    for row in h.outbox:
        status = None
        for step in stories.get(row.id, []):
            stale = step.reason_code in STALE
            if step.from_status != status or (stale and step.to_status != status):
                yield f"{row.key}: {step.from_status} -> {step.to_status} although it was {status}"
            if not stale and (step.from_status, step.to_status) not in EDGES:
                yield f"{row.key}: {step.from_status} -> {step.to_status} is no edge"
            status = step.to_status
        if status != row.status:
            yield f"{row.key} is {row.status}, its history says {status}"


def o4_one_claimant(h: History) -> Iterator[str]:
    """Attempts are numbered 1 … n, and a dispatch has a token exactly while it is delivering."""
    stories = h.stories
    for row in h.outbox:
        count = 0
        for step in stories.get(row.id, []):
            if _starts(step):
                count += 1
                if _meta(step)["attempt"] != count:
                    yield f"{row.key}: attempt {_meta(step)['attempt']} is number {count}"
            elif step.reason_code == Reason.RELEASED and not _was_cut_short(step):
                count -= 1
            elif step.reason_code == Reason.OPERATOR_RETRY:
                count = 0
        if row.attempt != count:
            yield f"{row.key}: attempt {row.attempt}, its history has {count}"
        if (row.claim_token is not None) != (row.status == Status.DELIVERING):
            yield f"{row.key} is {row.status} with token {row.claim_token}"


def o5_stale_inert(h: History) -> Iterator[str]:
    """Once a later attempt has begun, the result of an earlier one changes nothing.

    A process may say late that it has settled: what counts is which attempt the history says was ended so.
    """
    own: dict[tuple[str, str], list[int]] = {}
    for life, id, what in h.sends:
        attempts = own.setdefault((life, id), [])
        if isinstance(what, int):
            attempts.append(what)
        elif what in _BY_THE_SENDER and attempts:
            results = _results(h.stories.get(id, []))
            if all(results.get(attempt) != what for attempt in attempts):
                said = [results.get(attempt) for attempt in attempts]
                yield f"{life} has settled {id} as {what}; its history says {said} of its attempts {attempts}"


def _results(story: Rows) -> dict[int, str]:
    """How each attempt of a dispatch ended its claim, by the attempt's number."""
    found: dict[int, str] = {}
    begun = 0
    for step in story:
        if _starts(step):
            begun = _meta(step)["attempt"]
        elif step.reason_code in _BY_THE_SENDER:
            found.setdefault(begun, step.reason_code)
    return found


def o6_upper_bound(h: History) -> Iterator[str]:
    """There are never more attempts than allowed, nor more arrivals than attempts."""
    arrived = Counter(arrival.id for arrival in h.arrivals)
    for row in h.outbox:
        if row.max_attempts is not None and row.attempt > row.max_attempts:
            yield f"{row.key}: attempt {row.attempt} of {row.max_attempts}"
        if arrived[row.id] > row.attempt:
            yield f"{row.key} arrived {arrived[row.id]} times in {row.attempt} attempts"


def o7_no_false_success(h: History) -> Iterator[str]:
    """What is delivered has arrived."""
    arrived = {arrival.id for arrival in h.arrivals}
    for row in h.outbox:
        if row.status == Status.DELIVERED and row.id not in arrived:
            yield f"{row.key} is delivered and never arrived"


def o8_reason(h: History) -> Iterator[str]:
    """What died has a reason from the list, and the reason is true."""
    for row, step in _ends(h):
        if row.status == Status.DEAD_LETTER and step.reason_code not in _DEATHS:
            yield f"{row.key} died of {step.reason_code}"
        if step.reason_code in _AT_LAST_ATTEMPT and row.attempt < (row.max_attempts or 0):
            yield f"{row.key}: {step.reason_code} at attempt {row.attempt} of {row.max_attempts}"
        if step.reason_code == Reason.BUDGET and row.kind != MAIL.name:
            yield f"{row.key} died of a budget that it has not"


def o9_explained_duplicates(h: History) -> Iterator[str]:
    """No attempt arrives twice; one after the first follows a recorded failure, a lost claim or a wait for an ack."""
    twice = Counter((arrival.id, arrival.attempt) for arrival in h.arrivals)
    for (id, attempt), times in twice.items():
        if times > 1:
            yield f"attempt {attempt} of {id} arrived {times} times"
    for story in h.stories.values():
        steps = [step for step in story if step.reason_code not in STALE]
        for before, step in pairwise(steps):
            if _starts(step) and _meta(step)["attempt"] > 1 and not _explains(before):
                yield f"attempt {_meta(step)['attempt']} of {step.entity} came after {before.reason_code}"


def _explains(step: Any) -> bool:
    waited = step.reason_code == Reason.TRANSPORT_OK and step.to_status == Status.PENDING  # for an acknowledgement
    return waited or step.reason_code in (Reason.RETRY_BACKOFF, Reason.RELEASED, Reason.ATTEMPT)


def o10_backoff(h: History) -> Iterator[str]:
    """A pause between attempts is never shorter than the schedule says, nor than a Retry-After."""
    for row, story in _stories(h):
        plan = msgspec.json.decode(row.body, type=Message).plan
        for before, step in pairwise(step for step in story if step.reason_code not in STALE):
            if before.reason_code != Reason.RETRY_BACKOFF or not _starts(step):
                continue
            made = _meta(before)["attempt"]
            steady = 0 if row.kind == SMS.name else min(STEADY_CAP, STEADY_FIRST * 2 ** (made - 1))
            least = max(steady, FLOOR_SECONDS if word_of(plan, made) == "later" else 0)
            if step.at - before.at < least * SECOND:
                yield f"{row.key}: attempt {made + 1} came {step.at - before.at} µs after attempt {made}"


def o11_budget(h: History) -> Iterator[str]:
    """No attempt but the first two starts after the budget, which runs from the first attempt."""
    for row, story in _stories(h):
        for step in story:
            late = row.first_attempt_at is not None and step.at > row.first_attempt_at + MAIL_BUDGET_SECONDS * SECOND
            if row.kind == MAIL.name and _starts(step) and _meta(step)["attempt"] > 2 and late:
                yield f"{row.key}: attempt {_meta(step)['attempt']} started after the budget"


def o12_expiry(h: History) -> Iterator[str]:
    """No attempt starts when the dispatch's deadline has passed."""
    for row, story in _stories(h):
        for step in story:
            if row.expires_at is not None and _starts(step) and step.at >= row.expires_at:
                yield f"{row.key}: attempt {_meta(step)['attempt']} started after its deadline"


def o13_lane_order(h: History) -> Iterator[str]:
    """In a lane no attempt starts before all that was sent earlier is at its end; only one of it is ever due."""
    sent = {step.entity: step.id for step in h.transitions if step.reason_code == Reason.ENQUEUED}
    of_lanes = [row for row in h.outbox if row.lane is not None]
    for lane, rows in grouped(of_lanes, "lane").items():
        over = 0
        for row in sorted(rows, key=lambda row: sent[row.id]):
            steps = [step for step in h.stories[row.id] if step.reason_code not in STALE]
            first = next((step.id for step in steps if _starts(step)), None)
            if first is not None and first < over:
                yield f"{row.key} started in {lane} before those that were sent earlier had ended"
            over = max(over, steps[-1].id if row.status in TERMINAL else FOR_EVER)
        due = [row.key for row in rows if row.due_at is not None and row.status not in TERMINAL]
        if len(due) > 1:
            yield f"{due} of {lane} are due at once"


def o14_lease_fits(h: History) -> Iterator[str]:
    """What a live process sends is taken over by nobody, unless process, clock or database had stood still."""
    options = h.options
    if options.pauses or options.jumps or options.lost_commit or options.latency > WAIT_SECONDS:
        return
    sending: dict[str, str] = {}
    for life, id, what in h.sends:
        if what == ENDED:
            sending = {each: owner for each, owner in sending.items() if owner != life}
        elif isinstance(what, int):
            if id in sending:
                yield f"{life} sends {id}, attempt {what}, while {sending[id]} does"
            sending[id] = life
        else:
            sending.pop(id, None)


def o15_stable_key(h: History) -> Iterator[str]:
    """Every attempt carries the same body and a true number, and says so if an earlier one has arrived."""
    rows = {row.id: row for row in h.outbox}
    first: dict[str, int] = {}
    for arrival in h.arrivals:
        row = rows.get(arrival.id)
        if row is not None and msgspec.json.decode(row.body) != msgspec.json.decode(arrival.body):
            yield f"{arrival.key} arrived with another body"
        if row is not None and not 1 <= arrival.attempt <= row.attempt:
            yield f"{arrival.key} arrived as attempt {arrival.attempt}, there were {row.attempt}"
        # An attempt that was thought dead and arrives after later ones began before they did.
        if first.setdefault(arrival.id, arrival.attempt) < arrival.attempt and not arrival.possible_duplicate:
            yield f"{arrival.key} arrived again and did not say that it may"


def o16_one_result(h: History) -> Iterator[str]:
    """An attempt has one result: it ended its claim, or came after the claim was over, and never both."""
    for id, story in h.stories.items():
        results = [step for step in story if step.reason_code in _BY_THE_SENDER | STALE]
        for attempt, times in Counter(_meta(step)["attempt"] for step in results).items():
            if times > 1:
                yield f"attempt {attempt} of {id} has {times} results"


def o17_outcome_routed(h: History) -> Iterator[str]:
    """How a dispatch of a stream ended is an event of the stream, from the same moment on."""
    known = h.known
    for row in h.outbox:
        told = (row.stream, outcome_id(row.key, row.epoch, row.status)) in known
        if row.stream and row.status in TERMINAL and not told:
            yield f"{row.key} is {row.status} and {row.stream} was not told"


def o18_alerted(h: History) -> Iterator[str]:
    """What died with nobody to handle it has an alert; at the end every alert has rung."""
    told = {row.subject for row in h.alerts}
    for row, step in _ends(h):
        died = row.status in (Status.DEAD_LETTER, Status.EXPIRED) and step.reason_code != Reason.WITHDRAWN
        if died and (not row.stream or row.kind == PAGE.name) and row.key not in told:
            yield f"{row.key} is {row.status} and nobody was told"
    heard = {(alert.code, alert.subject) for alert in h.rung}
    for row in h.alerts:
        if (h.end or row.rung_at is not None) and (row.code, row.subject) not in heard:
            yield f"alert {row.code} {row.subject} never rang"


def _stories(h: History) -> Iterator[tuple[Any, Rows]]:
    found = h.stories
    return ((row, found.get(row.id, [])) for row in h.outbox)


def _ends(h: History) -> Iterator[tuple[Any, Any]]:
    """The dispatches that are at their end, each with the step that ended it."""
    for row, story in _stories(h):
        steps = [step for step in story if step.reason_code not in STALE]
        if row.status in TERMINAL and steps:
            yield row, steps[-1]


def _meta(step: Any) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(step.metadata)
    return found


def _starts(step: Any) -> bool:
    """Whether this step is the start of an attempt: not the claim that only ends a dispatch."""
    return bool(step.reason_code == Reason.ATTEMPT) and not step.summary.endswith("no attempt")


def _was_cut_short(step: Any) -> bool:
    """Whether what was given back had begun, so that it stays counted."""
    return "cut short" in step.summary
