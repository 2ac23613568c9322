"""Bugs to plant, each one that the product could have had: the simulation must find every one of them.

They are patches of the running code, for tests alone. Where two guards of the product cover each other, the
mutant drops both. A jitter of zero is not among them: no invariant can see it.
"""

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any
from unittest.mock import patch

import msgspec

from postroad.engine import dispatcher, verdicts
from postroad.engine.calls import CallResult, Returned, run_call
from postroad.engine.dispatcher import Dispatcher
from postroad.engine.sinks import Ringer
from postroad.model.clock import SECOND
from postroad.model.errors import CommitUnknown
from postroad.model.failpoints import failpoint
from postroad.model.lifecycle import Reason
from postroad.store import (
    alerts,
    dispatch_claims,
    groups,
    inbox,
    lanes,
    log,
    moves,
    queues,
    runs,
    settle,
    timers,
    turns,
)
from postroad.store.statements import Statement
from postroad.testing.simulation import (
    mutants_delegations,
    mutants_gates,
    mutants_people,
    mutants_reports,
    mutants_tools,
)
from postroad.testing.simulation.planting import Mutant, into

MUTANTS: dict[str, Mutant] = {}
planted = into(MUTANTS)
TICK = SECOND // 10


def _commit_here(conn: Any) -> None:
    """End the transaction in its middle: what follows is one of its own."""
    conn.exec_driver_sql("COMMIT")
    failpoint("commit.after")
    conn.exec_driver_sql("BEGIN IMMEDIATE")


def _committing(owner: object, name: str, *, after: bool) -> AbstractContextManager[object]:
    """Have a step of a transaction begin (or end) with a COMMIT."""
    real = getattr(owner, name)

    def step(conn: Any, *args: Any, **kwargs: Any) -> Any:
        if not after:
            _commit_here(conn)
        found = real(conn, *args, **kwargs)
        if after:
            _commit_here(conn)
        return found

    return patch.object(owner, name, step)


@planted("drop the token from the completion's WHERE")
def forgets_the_token() -> AbstractContextManager[object]:
    """Whoever settles a dispatch is taken for its claimant."""
    real = settle.settle

    def settles(conn: Any, settlements: Any, **about: Any) -> Any:
        standing = moves.lock(conn, [each.id for each in settlements])
        taken = [
            msgspec.structs.replace(each, token=standing[each.id].claim_token or each.token)
            for each in settlements
            if each.id in standing
        ]
        return real(conn, taken, **about)

    return patch.object(settle, "settle", settles)


@planted("forget to fence; drop expected_version")
@contextmanager
def forgets_the_fence_and_the_version() -> Iterator[None]:
    """A turn commits whoever holds its stream by now, whatever the log's version is."""
    append = log.append_all

    def owned(conn: Any, holds: Any) -> Any:
        streams = sorted(hold.subject for hold in holds)
        return {row.stream: row for row in queues._LOCK(conn, streams=msgspec.json.encode(streams).decode())}

    def appends(conn: Any, those: Any, *, now: int) -> None:
        heads = log._lock_heads(conn, [one.stream for one in those])
        append(conn, [msgspec.structs.replace(o, expected_version=heads.get(o.stream, 0)) for o in those], now=now)

    with patch.object(queues, "owned", owned), patch.object(log, "append_all", appends):
        yield


@planted("move `mark done` to its own transaction (turns)")
def consumes_apart() -> AbstractContextManager[object]:
    """A turn's events are consumed in one transaction, what it decided is written in the next."""
    return _committing(turns, "_record", after=True)


@planted("move `mark done` to its own transaction (timers)")
def marks_timers_apart() -> AbstractContextManager[object]:
    """A timer's event is published in one transaction, the timer marked in the next."""
    return _committing(timers, "_publish", after=True)


@planted("move `mark done` to its own transaction (outcomes)")
def tells_apart() -> AbstractContextManager[object]:
    """A dispatch ends in one transaction, its stream is told in the next."""
    return _committing(moves, "_tell", after=False)


@planted("patch due time in a second transaction")
def delays_apart() -> AbstractContextManager[object]:
    """A failed attempt's dispatch is due at once, and its pause comes in a transaction of its own."""
    real = moves.apply

    def apply(conn: Any, made: Any, *, now: int) -> None:
        backing_off = [each for each in made if each.reason is Reason.RETRY_BACKOFF]
        early = [msgspec.structs.replace(each, due_at=now) if each in backing_off else each for each in made]
        real(conn, early, now=now)
        if backing_off:
            _commit_here(conn)
        for each in backing_off:
            conn.exec_driver_sql("UPDATE postroad_outbox SET due_at = ? WHERE id = ?", (each.due_at, each.row.id))

    return patch.object(moves, "apply", apply)


@planted("mark delivered before sending")
def marks_before_sending() -> AbstractContextManager[object]:
    """A dispatch is settled as delivered, then sent."""
    begin = Dispatcher._call

    under_way: set[asyncio.Task[None]] = set()

    def begins(self: Dispatcher, claim: Any, sender: Any) -> None:
        beginning = asyncio.ensure_future(begins_late(self, claim, sender))
        under_way.add(beginning)
        beginning.add_done_callback(under_way.discard)

    async def begins_late(self: Dispatcher, claim: Any, sender: Any) -> None:
        await self.parts.database.atransact(settle.settle, [self._judge(claim, sender, Returned(None))])
        begin(self, claim, sender)

    return patch.object(Dispatcher, "_call", begins)


@planted("send before commit")
@contextmanager
def sends_before_commit() -> Iterator[None]:
    """A dispatch is sent first, then its claim is committed."""
    claim, begin = Dispatcher._claim, Dispatcher._call
    early: dict[tuple[str, str], CallResult] = {}

    async def claims(self: Dispatcher, wants: Any, token: str, asked: int) -> Any:
        seen: list[Any] = []

        def look(conn: Any, *, now: int) -> None:
            found = dispatcher.claim_due(conn, wants, token=token, asked=now, now=now)
            seen.extend(each for one in found.values() for each in one.claims)
            raise _Undone

        with suppress(_Undone):
            await self.parts.database.atransact(look)
        for each in seen:
            sender, never = self.parts.registry.senders[each.kind], asyncio.get_running_loop().create_future()
            calling = run_call(self.parts.calls, sender.fn, self._dispatch(each, sender), timeout=SECOND, abort=never)
            early[each.id, token] = await calling
        return await claim(self, wants, token, asked)

    def begins(self: Dispatcher, each: Any, sender: Any) -> None:
        sent = early.pop((each.id, each.token), None)
        if sent is None:
            begin(self, each, sender)
        else:
            self._ended(each, sender, sent)

    with patch.object(Dispatcher, "_claim", claims), patch.object(Dispatcher, "_call", begins):
        yield


class _Undone(Exception):
    pass


@planted("mark delivered without sending")
def delivers_unsent() -> AbstractContextManager[object]:
    """What is claimed counts as sent."""

    def begins(self: Dispatcher, claim: Any, sender: Any) -> None:
        self._ended(claim, sender, Returned(None))

    return patch.object(Dispatcher, "_call", begins)


@planted("fire timers early by one tick")
def fires_early() -> AbstractContextManager[object]:
    """Timers fire a tenth of a second before their time."""
    fire = timers.fire
    return patch.object(timers, "fire", lambda conn, *, limit, now: fire(conn, limit=limit, now=now + TICK))


@planted("dedupe without a look in the log")
def looks_only_at_the_inbox() -> AbstractContextManager[object]:
    """Publishing doesn't look for the event in the log."""
    return patch.object(inbox, "_landed", lambda conn, keys: {})


@planted("dedupe without looking at the content")
def takes_any_content() -> AbstractContextManager[object]:
    """Other content under a known event's id is accepted and dropped."""
    return patch.object(inbox, "_compare", lambda event, first: None)


@planted("swallow `info` as `fail`, then retry blindly")
def settles_blindly() -> AbstractContextManager[object]:
    """A settle whose COMMIT was not answered is made again without a look at what has happened."""
    return patch.object(settle, "unsettled", lambda conn, batch: {each.id for each in batch})


@planted("swallow `info` as `fail`: an answer is made up")
def takes_unknown_for_done() -> AbstractContextManager[object]:
    """A group whose COMMIT was not answered is taken for committed."""
    real = groups._write

    def write(members: Any, transact: Any) -> Any:
        made: list[Any] = []

        def noted(fn: Any) -> Any:
            def run(conn: Any, *, now: int) -> Any:
                made[:] = fn(conn, now=now)
                return made

            return transact(run)

        found = real(members, noted)
        return made if made and isinstance(found[0], CommitUnknown) else found

    return patch.object(groups, "_write", write)


@planted("lease shorter than timeout")
def claims_briefly() -> AbstractContextManager[object]:
    """A dispatch is claimed for a second, however long it may take to send."""
    real = dispatch_claims.claim

    def claim(conn: Any, policy: Any, **about: Any) -> Any:
        return real(conn, msgspec.structs.replace(policy, lease=SECOND), **about)

    return patch.object(dispatch_claims, "claim", claim)


@planted("no limits: attempts, budget, deadline")
def never_ends() -> AbstractContextManager[object]:
    """Deadlines, budgets and attempts are not looked at before a claim."""
    return patch.object(dispatch_claims, "_end", lambda row, policy, *, now: None)


@planted("Retry-After undercut")
def ignores_retry_after() -> AbstractContextManager[object]:
    """An attempt that failed is retried by the schedule alone, whatever its destination asked for."""
    judge = verdicts.judge
    return patch.object(dispatcher, "judge", lambda result, sender: judge(result, sender)._replace(floor=0))


@planted("outcome lost")
def loses_outcomes() -> AbstractContextManager[object]:
    """How a dispatch ended is not told to its stream."""
    return patch.object(moves, "_tell", lambda conn, told, *, now: frozenset())


@planted("alert lost")
def loses_alerts() -> AbstractContextManager[object]:
    """What nobody handles is not raised."""
    return patch.object(alerts, "raise_alerts", lambda conn, raised, *, now: None)


@planted("mark rung before ringing")
def marks_before_ringing() -> AbstractContextManager[object]:
    """Alerts are marked as rung, then they ring."""
    real = Ringer._tell

    async def tell(self: Ringer, waiting: Any) -> None:
        await self._parts.database.atransact(alerts.mark_rung, [number for number, _ in waiting])
        await real(self, waiting)

    return patch.object(Ringer, "_tell", tell)


@planted("lost wake-up: a stream is left behind")
def strands() -> AbstractContextManager[object]:
    """A stream's claim ends without a look at what else waits there."""
    real = queues.free

    def free(conn: Any, freed: Any, *, now: int) -> Any:
        real(conn, freed, now=now)
        streams = msgspec.json.encode(sorted(freed)).decode()
        conn.exec_driver_sql("DELETE FROM postroad_queues WHERE stream IN (SELECT value FROM json_each(?))", (streams,))
        return set()

    return patch.object(queues, "free", free)


@planted("a lane's order is lost")
def promotes_the_last() -> AbstractContextManager[object]:
    """Of a lane the newest member goes next."""
    backwards = Statement(lanes._NEXT._sql.replace("ORDER BY m.lane, m.number", "ORDER BY m.number DESC"))
    return patch.object(lanes, "_NEXT", backwards)


@planted("a lane is stranded")
def leaves_no_lane() -> AbstractContextManager[object]:
    """The end of a dispatch lets nothing of its lane go on."""
    return patch.object(lanes, "leave", lambda conn, gone, *, now: None)


@planted("orphaned run")
def forgets_the_run() -> AbstractContextManager[object]:
    """A turn's run is not ended with its commit."""
    return patch.object(runs, "end", lambda conn, ends, *, now: None)


@planted("group commit answers before COMMIT")
@contextmanager
def answers_before_commit() -> Iterator[None]:
    """The members of a group hear that they are written before the group is committed."""
    together, settles = groups._together, groups.Member.settle

    def early(members: Any, conn: Any, *, now: int) -> list[object]:
        found = together(members, conn, now=now)
        for member, answer in zip(members, found, strict=True):
            settles(member, answer)
        return found

    def once(self: Any, found: object) -> None:
        if not self.answer.done():
            settles(self, found)

    with patch.object(groups, "_together", early), patch.object(groups.Member, "settle", once):
        yield


@planted("a refused member of a group leaves its writes")
def keeps_what_was_refused() -> AbstractContextManager[object]:
    """A group that is written member by member has no savepoints."""
    real = groups._guarded

    def guarded(member: Any, conn: Any, *, now: int) -> object:
        with patch.object(conn, "begin_nested", nullcontext):
            return real(member, conn, now=now)

    return patch.object(groups, "_guarded", guarded)


MUTANTS |= mutants_people.MUTANTS | mutants_gates.MUTANTS | mutants_tools.MUTANTS
MUTANTS |= mutants_reports.MUTANTS | mutants_delegations.MUTANTS
