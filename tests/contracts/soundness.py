"""What holds of the rows of dispatches after each transaction, read from the tables alone: each check says what is not.

A second reading of the rules, beside the simulation's checkers: of a pending row's error and due time, and of lanes.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from postroad.model.ids import outcome_id
from postroad.model.lifecycle import EDGES, TERMINAL, Reason, Status
from postroad.testing.contracts.dispatches import LEASE
from tests.contracts.striking import Rows

WORDS = frozenset({Reason.STALE_OK, Reason.STALE_FAILED, Reason.RESOLVED_SENT, Reason.RESOLVED_DISCARDED})
# After these an attempt is to come that knows of no error; after a failure or a claim given back one may be known.
CLEAN = frozenset({Reason.ENQUEUED, Reason.OPERATOR_RETRY, Reason.TRANSPORT_OK})


def wrong(rows: Rows) -> list[str]:
    """All that does not hold of these rows."""
    stories: dict[str, list[Any]] = {}
    for step in rows["transitions"]:
        stories.setdefault(step.entity, []).append(step)
    heads = {row.head for row in rows["lanes"]}
    said: list[str] = []
    for row in rows["outbox"]:
        story = stories.pop(row.id, [])
        said += _path(row.key, story, row.status)
        steps = [step for step in story if step.reason_code not in WORDS]
        if steps:
            said += _stands(row, steps, row.id in heads)
        said += _told(row, rows, story)
    said += _purged(rows, stories)
    said += _lanes(rows)
    return said


def _path(key: str, story: Sequence[Any], end: str) -> Iterator[str]:
    """Each change has its row of history: they lead, by edges that there are, from nothing to the status."""
    status = None
    for step in story:
        word = step.reason_code in WORDS
        if step.from_status != status or (word and step.to_status != status):
            yield f"{key}: {step.from_status} -> {step.to_status} by {step.reason_code}, but it was {status}"
        if not word and (step.from_status, step.to_status) not in EDGES:
            yield f"{key}: {step.from_status} -> {step.to_status} is no edge"
        status = step.to_status
    if status != end:
        yield f"{key} is {end}, its history says {status}"


def _stands(row: Any, steps: Sequence[Any], heads_its_lane: bool) -> Iterator[str]:
    """A row's due time, token, error and times are those that its last change has given it."""
    last = steps[-1]
    since = max(place for place, step in enumerate(steps) if step.reason_code in CLEAN) if steps else 0
    failed = any(step.reason_code in (Reason.RETRY_BACKOFF, Reason.RELEASED) for step in steps[since:])
    if row.updated_at < last.at:
        yield f"{row.key} was changed at {last.at}, its row says {row.updated_at}"
    if (row.claim_token is not None) != (row.status == Status.DELIVERING):
        yield f"{row.key} is {row.status} with the token {row.claim_token}"
    if row.status in TERMINAL and row.due_at is not None:
        yield f"{row.key} is {row.status} and due at {row.due_at}"
    if row.status in (Status.DELIVERED, Status.ACKED) and row.last_error is not None:
        yield f"{row.key} is {row.status} with the error {row.last_error!r}"
    if row.status == Status.DELIVERING and row.due_at != last.at + LEASE:
        yield f"{row.key} is being sent since {last.at} until {row.due_at}"
    if row.status == Status.PENDING:
        yield from _pending(row, last, failed=failed, heads_its_lane=heads_its_lane)


def _pending(row: Any, last: Any, *, failed: bool, heads_its_lane: bool) -> Iterator[str]:
    if row.last_error is not None and not failed:
        yield f"{row.key} is pending by {last.reason_code} with the stale error {row.last_error!r}"
    if last.reason_code == Reason.RETRY_BACKOFF and (not row.last_error or row.last_error not in last.summary):
        yield f"{row.key} has the error {row.last_error!r}, its history says {last.summary!r}"
    if (row.due_at is not None) != (row.lane is None or heads_its_lane):
        yield f"{row.key} of lane {row.lane} is due at {row.due_at}, head: {heads_its_lane}"
    if row.due_at is None:
        return
    waits = last.reason_code in (Reason.RETRY_BACKOFF, Reason.TRANSPORT_OK)
    if last.reason_code != Reason.ENQUEUED and row.due_at < last.at + waits:
        yield f"{row.key} is due at {row.due_at}, before its change by {last.reason_code} at {last.at}"


def _told(row: Any, rows: Rows, story: Sequence[Any]) -> Iterator[str]:
    """The end of a dispatch is told to its stream, or else raises an alert if it failed."""
    if row.status not in TERMINAL:
        return
    event = (row.stream, outcome_id(row.key, row.epoch, row.status))
    if row.stream and event not in {(one.stream, one.event_id) for one in rows["inbox"]}:
        yield f"{row.key} is {row.status}, and {row.stream} was not told"
    withdrawn = any(step.reason_code == Reason.WITHDRAWN for step in story)
    died = row.status in (Status.DEAD_LETTER, Status.EXPIRED) and not withdrawn
    if died and not row.stream and row.key not in {one.subject for one in rows["alerts"]}:
        yield f"{row.key} is {row.status}, and nobody was told"


def _purged(rows: Rows, stories: dict[str, list[Any]]) -> Iterator[str]:
    """What is gone had ended, and its key is taken; nothing else has a history, nor a tombstone."""
    buried = {one.id: one.key for one in rows["tombstones"]}
    for id, story in stories.items():
        yield from _path(buried.get(id, f"{id}, which has no tombstone,"), story, story[-1].to_status)
        if id not in buried or story[-1].to_status not in TERMINAL:
            yield f"{id} is gone as {story[-1].to_status}, with the tombstone {buried.get(id)}"
    there = {row.id for row in rows["outbox"]}
    yield from (f"{key} is there and buried" for id, key in buried.items() if id in there)


def _lanes(rows: Rows) -> Iterator[str]:
    """A lane's members are what is unfinished in it, or holds it up; its head is the first one, and alone is due."""
    unfinished = {row.id for row in rows["outbox"] if row.lane is not None and row.status not in TERMINAL}
    members: dict[str, list[Any]] = {}
    dead = {row.id for row in rows["outbox"] if row.status == Status.DEAD_LETTER}
    for one in rows["lane_members"]:
        members.setdefault(one.lane, []).append(one)
    inside = {one.dispatch for one in rows["lane_members"]}
    yield from (f"{id} is unfinished and in no lane" for id in unfinished - inside)
    yield from (f"{id} is finished and in its lane" for id in inside - unfinished - dead)
    for row in rows["lanes"]:
        first = next(iter(members.get(row.lane, [])), None)
        if row.head != (first and first.dispatch) and not (row.head is None and first.fresh):
            yield f"the head of {row.lane} is {row.head}, its first one {first}"
