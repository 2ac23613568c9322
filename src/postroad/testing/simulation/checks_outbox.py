"""What must hold of dispatches, of what arrived, and of alerts. Each check yields what is wrong, in words."""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import msgspec

from postroad.model.clock import SECOND
from postroad.model.ids import outcome_id
from postroad.model.lifecycle import EDGES, TERMINAL, Reason, Status
from postroad.store.transitions import STALE, WITHOUT_EDGE
from postroad.testing.simulation.history import History, Rows, about, grouped
from postroad.testing.simulation.outages import AFTER_SECONDS, asked_to_wait, named
from postroad.testing.simulation.sink import ENDED, Begun
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
_EDGES_OF: Mapping[Reason, frozenset[tuple[Status | None, Status]]] = {
    Reason.ENQUEUED: frozenset({(None, Status.PENDING)}),
    Reason.RETRY_BACKOFF: frozenset({(Status.DELIVERING, Status.PENDING)}),
    Reason.RELEASED: frozenset({(Status.DELIVERING, Status.PENDING)}),
    Reason.HELD: frozenset({(Status.DELIVERING, Status.PENDING)}),
    Reason.OPERATOR_RETRY: frozenset({(Status.DEAD_LETTER, Status.PENDING), (Status.EXPIRED, Status.PENDING)}),
    Reason.ATTEMPT: frozenset({(Status.PENDING, Status.DELIVERING), (Status.DELIVERING, Status.DELIVERING)}),
    Reason.TRANSPORT_OK: frozenset({(Status.DELIVERING, Status.DELIVERED), (Status.DELIVERING, Status.PENDING)}),
    Reason.ACKED: frozenset({(Status.PENDING, Status.ACKED), (Status.DELIVERING, Status.ACKED)}),
    Reason.DEADLINE: frozenset({(Status.PENDING, Status.EXPIRED), (Status.DELIVERING, Status.EXPIRED)}),
    Reason.WITHDRAWN: frozenset({(Status.PENDING, Status.EXPIRED), (Status.DELIVERING, Status.EXPIRED)}),
    **{reason: frozenset({(Status.DELIVERING, Status.DEAD_LETTER)}) for reason in _DEATHS},
}
_AT_LAST_ATTEMPT = frozenset({Reason.MAX_ATTEMPTS, Reason.LEASE_LOST, Reason.ACK_TIMEOUT})


def o1_no_lost_action(h: History) -> Iterator[str]:
    """At the end every dispatch is at its end; until then an unfinished one has a time, or a lane to wait in."""
    for row in h.outbox:
        waits = row.lane is not None and row.status == Status.PENDING
        if row.status not in TERMINAL and (h.end or (row.due_at is None and not waits)):
            yield f"{row.key} is {row.status}, due at {row.due_at}"


def o2_no_phantom(h: History) -> Iterator[str]:
    """What arrived had been committed, with that key and content."""
    rows = {row.id: row for row in h.dispatches}
    for arrival in h.arrivals:
        row = rows.get(arrival.id)
        if row is None:
            yield f"{arrival.key} arrived and was never committed"
        elif (row.key, row.kind, row.destination) != (arrival.key, arrival.kind, arrival.to):
            yield f"{arrival.key} arrived as {arrival}"


def o3_legal(h: History) -> Iterator[str]:
    """A dispatch's history is a path of legal edges from its beginning to the status that it has, each for its reason.

    What is said of it without changing it has no edge.
    """
    for row, story in _stories(h):
        status = None
        for step in story:
            edge, said = (step.from_status, step.to_status), step.reason_code in WITHOUT_EDGE
            if step.from_status != status or (said and step.to_status != status):
                yield f"{row.key}: {step.from_status} -> {step.to_status} although it was {status}"
            if not said and (edge not in EDGES or edge not in _EDGES_OF[step.reason_code]):
                yield f"{row.key}: {step.from_status} -> {step.to_status} is no edge of {step.reason_code}"
            status = step.to_status
        if status != row.status:
            yield f"{row.key} is {row.status}, its history says {status}"


def o4_one_claimant(h: History) -> Iterator[str]:
    """Attempts are numbered 1 … n, and a dispatch has a token exactly while it is delivering."""
    for row, story in _stories(h):
        count = 0
        for step in story:
            if starts(step):
                count += 1
                if about(step)["attempt"] != count:
                    yield f"{row.key}: attempt {about(step)['attempt']} is number {count}"
            elif does_not_count(step):
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
    own: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for life, id, what in h.sends:
        attempts = own.setdefault((life, id), [])
        if isinstance(what, Begun):
            attempts.append((h.epoch(id, what.first), what.attempt))
        elif what in _BY_THE_SENDER and attempts:
            results = _results(h.stories.get(id, []))
            if all(results.get(attempt) != what for attempt in attempts):
                said = [results.get(attempt) for attempt in attempts]
                yield f"{life} has settled {id} as {what}; its history says {said} of its attempts {attempts}"


def _results(story: Rows) -> dict[tuple[int, int], str]:
    """How each attempt of a dispatch ended its claim, by its epoch and number."""
    found: dict[tuple[int, int], str] = {}
    begun = (0, 0)
    for step in story:
        if starts(step):
            begun = attempt_of(step)
        elif step.reason_code in _BY_THE_SENDER:
            found.setdefault(begun, step.reason_code)
    return found


def o6_upper_bound(h: History) -> Iterator[str]:
    """There are never more attempts than allowed, nor in any epoch more arrivals than attempts."""
    arrived = Counter((arrival.id, h.epoch(arrival.id, arrival.first)) for arrival in h.arrivals)
    for row, story in _stories(h):
        if row.max_attempts is not None and row.attempt > row.max_attempts:
            yield f"{row.key}: attempt {row.attempt} of {row.max_attempts}"
        for epoch, attempts in _attempts(row, story).items():
            if arrived[row.id, epoch] > attempts:
                yield f"{row.key} arrived {arrived[row.id, epoch]} times in {attempts} attempts of epoch {epoch}"


def _attempts(row: Any, story: Rows) -> dict[int, int]:
    """How many attempts each epoch of a dispatch has: of the present one the row says it."""
    found: dict[int, int] = {}
    for step in story if row.epoch else []:
        if starts(step):
            epoch, found[epoch] = attempt_of(step)
        elif does_not_count(step):
            found[about(step)["epoch"]] -= 1
    return found | {row.epoch: row.attempt}


def o7_no_false_success(h: History) -> Iterator[str]:
    """What is delivered has arrived."""
    arrived = {(arrival.id, h.epoch(arrival.id, arrival.first)) for arrival in h.arrivals}
    for row in h.dispatches:
        if row.status == Status.DELIVERED and (row.id, row.epoch) not in arrived:
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
    twice = Counter((each.id, h.epoch(each.id, each.first), each.attempt) for each in h.arrivals)
    for (id, _, attempt), times in twice.items():
        if times > 1:
            yield f"attempt {attempt} of {id} arrived {times} times"
    for story in h.stories.values():
        for before, step in pairwise(changes(story)):
            if starts(step) and about(step)["attempt"] > 1 and not _explains(before):
                yield f"attempt {about(step)['attempt']} of {step.entity} came after {before.reason_code}"


def _explains(step: Any) -> bool:
    waited = step.reason_code == Reason.TRANSPORT_OK and step.to_status == Status.PENDING  # for an acknowledgement
    return waited or step.reason_code in (Reason.RETRY_BACKOFF, Reason.RELEASED, Reason.HELD, Reason.ATTEMPT)


def o10_backoff(h: History) -> Iterator[str]:
    """A pause between attempts is never shorter than the schedule says, nor than a Retry-After."""
    for row, story in _stories(h):
        plan = msgspec.json.decode(row.body, type=Message).plan
        for before, step in pairwise(changes(story)):
            if before.reason_code != Reason.RETRY_BACKOFF or not starts(step):
                continue
            made = about(before)["attempt"]
            steady = 0 if row.kind == SMS.name else min(STEADY_CAP, STEADY_FIRST * 2 ** (made - 1))
            least = max(steady, _asked(before.summary, word_of(plan, made)))
            if step.at - before.at < least * SECOND:
                yield f"{row.key}: attempt {made + 1} came {step.at - before.at} µs after attempt {made}"


def _asked(summary: str, word: str) -> float:
    """For how many seconds an attempt that failed was asked to wait, by what is down or else by its plan."""
    if named(summary) is not None:
        return AFTER_SECONDS if asked_to_wait(summary) else 0
    return FLOOR_SECONDS if word == "later" else 0


def o11_budget(h: History) -> Iterator[str]:
    """No attempt but the first two starts after the budget, which runs from the first attempt."""
    for row, story in _stories(h):
        for step in story:
            late = row.first_attempt_at is not None and step.at > row.first_attempt_at + MAIL_BUDGET_SECONDS * SECOND
            if row.kind == MAIL.name and starts(step, epoch=row.epoch) and about(step)["attempt"] > 2 and late:
                yield f"{row.key}: attempt {about(step)['attempt']} started after the budget"


def o12_expiry(h: History) -> Iterator[str]:
    """No attempt starts when the dispatch's deadline has passed."""
    for row, story in _stories(h):
        for step in story:
            if row.expires_at is not None and starts(step, epoch=row.epoch) and step.at >= row.expires_at:
                yield f"{row.key}: attempt {about(step)['attempt']} started after its deadline"


def o13_lane_order(h: History) -> Iterator[str]:
    """In a lane no attempt starts before all that was sent earlier is at its end; only one of it is ever due."""
    of_lanes = [row for row in h.dispatches if row.lane is not None]
    for lane, rows in grouped(of_lanes, "lane").items():
        over = 0
        stays = sorted((stay, row.key) for row in rows for stay in _stays(h.stories[row.id]))
        for (_, first, end), key in stays:
            if first < over:
                yield f"{key} started in {lane} before those that were sent earlier had ended"
            over = max(over, end)
        due = [row.key for row in rows if row.due_at is not None and row.status not in TERMINAL]
        if len(due) > 1:
            yield f"{due} of {lane} are due at once"


def _stays(story: Rows) -> Iterator[tuple[int, int, int]]:
    """The places in history at which a member of a lane came, started and left: once for each of its epochs."""
    came, first, left = 0, FOR_EVER, FOR_EVER
    for step in changes(story):
        if step.reason_code in (Reason.ENQUEUED, Reason.OPERATOR_RETRY):
            if came:
                yield came, first, left
            came, first, left = step.id, FOR_EVER, FOR_EVER
        elif starts(step):
            first = min(first, step.id)
        if step.to_status in TERMINAL:
            left = step.id
    yield came, first, left


def o14_lease_fits(h: History) -> Iterator[str]:
    """What a live process sends is taken over by nobody, unless process, clock or database had stood still."""
    options = h.options
    if options.pauses or options.jumps or options.lost_commit or options.latency > WAIT_SECONDS:
        return
    sending: dict[str, str] = {}
    for life, id, what in h.sends:
        if what == ENDED:
            sending = {each: owner for each, owner in sending.items() if owner != life}
        elif isinstance(what, Begun):
            if id in sending:
                yield f"{life} sends {id}, attempt {what.attempt}, while {sending[id]} does"
            sending[id] = life
        else:
            sending.pop(id, None)


def o15_stable_key(h: History) -> Iterator[str]:
    """Every attempt carries the same body and a true number, and says so if an earlier one has arrived."""
    rows = {row.id: (row, _attempts(row, story)) for row, story in _stories(h)}
    first: dict[str, tuple[int, int]] = {}
    for arrival in h.arrivals:
        row, attempts = rows.get(arrival.id, (None, {}))
        epoch = h.epoch(arrival.id, arrival.first)
        if row is not None and msgspec.json.decode(row.body) != msgspec.json.decode(arrival.body):
            yield f"{arrival.key} arrived with another body"
        if row is not None and not 1 <= arrival.attempt <= attempts.get(epoch, 0):
            yield f"{arrival.key} arrived as attempt {arrival.attempt} of epoch {epoch}, there were {attempts}"
        # An attempt that was thought dead and arrives after later ones began before they did.
        this = (epoch, arrival.attempt)
        if first.setdefault(arrival.id, this) < this and not arrival.possible_duplicate:
            yield f"{arrival.key} arrived again and did not say that it may"


def o16_one_result(h: History) -> Iterator[str]:
    """An attempt has one result: it ended its claim, or came after it was over; both only if it had been given up."""
    for id, story in h.stories.items():
        results = [step for step in story if step.reason_code in _BY_THE_SENDER | STALE]
        late = Counter(attempt_of(step) for step in results if step.reason_code in STALE)
        given_up = Counter(attempt_of(step) for step in results if _was_given_up(step))
        for this, times in Counter(map(attempt_of, results)).items():
            if times > 1 and not (times == 2 and late[this] and given_up[this] == 1):
                yield f"attempt {this[1]} of {id} has {times} results"


def _was_given_up(step: Any) -> bool:
    """Whether it was we who ended the attempt: what it came to by itself may still be heard."""
    return "timeout after" in step.summary or "ended while sending" in step.summary


def o17_outcome_routed(h: History) -> Iterator[str]:
    """How a dispatch of a stream ended is an event of the stream, from the same moment on, unless it is deleted."""
    known = h.known
    for row in h.dispatches:
        told = (row.stream, outcome_id(row.key, row.epoch, row.status)) in known
        if row.stream and row.status in TERMINAL and not told and row.stream not in h.gone:
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
    return ((row, found.get(row.id, [])) for row in h.dispatches)


def _ends(h: History) -> Iterator[tuple[Any, Any]]:
    """The dispatches that are at their end, each with the step that ended it."""
    for row, story in _stories(h):
        steps = changes(story)
        if row.status in TERMINAL and steps:
            yield row, steps[-1]


def changes(story: Rows) -> Rows:
    """The steps of a history that changed something."""
    return [step for step in story if step.reason_code not in WITHOUT_EDGE]


def attempt_of(step: Any) -> tuple[int, int]:
    """The epoch and the number of the attempt that a step is about."""
    found = about(step)
    return found.get("epoch", 0), found["attempt"]


def starts(step: Any, *, epoch: int | None = None) -> bool:
    """Whether this step is the start of an attempt (of an epoch): not the claim that only ends a dispatch."""
    if step.reason_code != Reason.ATTEMPT or step.summary.endswith("no attempt"):
        return False
    return epoch is None or attempt_of(step)[0] == epoch


def does_not_count(step: Any) -> bool:
    """Whether an attempt was given back as if it had not been: nothing had begun, or nobody could be reached."""
    return step.reason_code == Reason.HELD or (step.reason_code == Reason.RELEASED and not was_cut_short(step))


def was_cut_short(step: Any) -> bool:
    """Whether what was given back had begun, so that it stays counted."""
    return "cut short" in step.summary
