"""Claims: how long one takes beside what finished work has left, and in a database that has nothing else."""

from collections.abc import Callable, Iterator
from statistics import median
from time import perf_counter

from sqlalchemy import Connection

from benchmarks import seeds, work
from benchmarks.figures import Figure, Plan, Progress, rounded
from benchmarks.places import Kind, Place
from postroad.model.retry import Retry
from postroad.model.rows import SendPolicy
from postroad.store import dispatch_claims, queues

NAME = "claim"
LIMIT = 64
WAITING = 1_000
POLICY = SendPolicy(kind=work.MAIL, lease=work.SEND_LEASE, retry=Retry(attempts=work.ATTEMPTS))


def measure(kind: Kind, ours: Place, limit: Place, plan: Plan, progress: Progress) -> Iterator[Figure]:
    """Milliseconds of a claim of 64 inside its transaction: beside finished rows, against none, by turns."""
    progress(f"{kind}: claim, {plan.many:,} finished")
    full, empty = ours, limit
    full.clear()
    seeds.finished(full, plan.many)
    empty.clear()
    for place in (full, empty):
        place.seed_dispatches(WAITING, WAITING)
        place.seed_events(WAITING)
    for what, claim in (("dispatches", _claim_dispatches), ("turns", _claim_turns)):
        found: tuple[list[float], list[float]] = ([], [])
        for _ in range(plan.claims):
            for place, lengths in zip((full, empty), found, strict=True):
                lengths.append(_milliseconds(place, claim))
        beside, alone = (rounded(median(lengths)) for lengths in found)
        case = f"64 {what}, {plan.many:,} finished against none"
        yield Figure(work=NAME, database=kind, case=case, unit="ms", ours=beside, against=alone)
    full.clear()


class _Undone(Exception):
    """Rolls a claim back that has been timed."""


def _milliseconds(place: Place, claim: Callable[..., int]) -> float:
    """How long a claim takes, which is then taken back, so that the next one finds the same."""
    try:
        place.database.transact(_timed, claim)
    except _Undone as done:
        return float(done.args[0])
    raise AssertionError("unreachable")


def _timed(conn: Connection, claim: Callable[..., int], *, now: int) -> None:
    began = perf_counter()
    found = claim(conn, now=now)
    seconds = perf_counter() - began
    assert found == LIMIT, found
    raise _Undone(seconds * 1_000)


def _claim_dispatches(conn: Connection, *, now: int) -> int:
    found = dispatch_claims.claim(conn, POLICY, names=[work.MAIL], token=work.token(), limit=LIMIT, now=now)
    return len(found.claims)


def _claim_turns(conn: Connection, *, now: int) -> int:
    found = queues.claim(
        conn, stream_type=work.TYPE, token=work.token(), limit=LIMIT, batch=100, lease=work.TURN_LEASE, now=now
    )
    return len(found.claims)
