"""One run of a turn: from its claim through the handler to whatever end it comes to."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from functools import partial
from itertools import count
from typing import Any, TypeVar, assert_never

from msgspec.structs import replace
from sqlalchemy import Connection

from postroad.engine import crons
from postroad.engine.answers import Answers, ended, stale
from postroad.engine.calls import Abort, Aborted, CallResult, Raised, Returned, TimedOut, contained, run_call
from postroad.engine.declarations import Decider, Limits
from postroad.engine.endings import STOPPED, answer, bury, duplicate_key, interrupted, parked
from postroad.engine.filtering import noops, prefix_answer
from postroad.engine.loop import Parts
from postroad.engine.operating import EFFECTS, Operating
from postroad.engine.reports import IN_TURN, lands
from postroad.engine.telemetry import logger, traced
from postroad.engine.turn import Turn
from postroad.engine.verdicts import words
from postroad.model.clock import SECOND, moment
from postroad.model.errors import (
    AckNotRequested,
    AckRefused,
    BadAckToken,
    CommitUnknown,
    ConcurrencyConflict,
    DispatchNotFound,
    DuplicateEntry,
    DuplicateKey,
    GiveUp,
    InvalidInput,
    RetryLater,
    StaleClaim,
    StreamDeleted,
    TurnStopped,
)
from postroad.model.failpoints import failpoint
from postroad.model.lifecycle import RunEnd
from postroad.model.operations import OperationRow
from postroad.model.payload import safe_error
from postroad.model.retry import Retry, floor_of
from postroad.model.rows import Hold, TurnClaim, TurnCommit, TurnCommitted
from postroad.store import operations, queues, runs, turns
from postroad.store.dialects import is_away

R = TypeVar("R")
AWAY = Retry(attempts=1, first=0.2, cap=3)
BACKOFF = Retry(attempts=1, first=2, cap=300)


class Run:
    """A claimed set of events, the handler that decides on it, and the one commit that ends it."""

    def __init__(self, parts: Parts, decider: Decider, claim: TurnClaim, abort: Abort, answers: Answers) -> None:
        self.parts = parts
        self.decider = decider
        self.claim = claim
        self.hold = Hold(claim.stream, claim.token)
        self._abort = abort
        self._answers = answers
        self._reasons: dict[str, str] = {}
        self._operating = self._calling([])
        self._began = moment(parts.database.clock.wall())

    async def carry_out(self) -> None:
        """The whole run. What the database refuses to hear now is found again by its lease."""
        IN_TURN.set(True)  # of the task that this run is, and of all that it begins
        try:
            await self._process()
        except StaleClaim:
            await stale(self.parts, self.claim)
        except Exception as error:
            self.parts.telemetry.emit("turn.error", stream=self.claim.stream, error=error)
            logger.exception("turn of %s could not be ended; its lease will free it", self.claim.stream)

    async def _process(self) -> None:
        claim, decider = self.claim, self.decider
        if claim.again:
            rows = await self._patiently(lambda: self.parts.database.aread(operations.of_turn, claim.turn_id))
            self._operating = self._calling(rows)
        if lands(claim, decider) and not self._operating.acted:
            await self._answer(answer(claim, claim.events, {}))
            return
        if claim.stopping or self._operating.discarded:
            await self._stop(STOPPED, "a person asked that it end")
            return
        if claim.attempt > decider.attempts:
            await self._failed("claimant lost on final attempt", reason="turn.dead.interrupted")
            return
        if self._operating.barred:
            await self._stop(EFFECTS, "an earlier run had called a tool that must not be called twice")
            return
        if not await self._filter():
            return
        turn = self._turn()
        failpoint("turn.before_handler")
        assert decider.fn is not None
        await self._conclude(turn, await self._call(decider.fn, turn))

    def _calling(self, rows: Sequence[OperationRow]) -> Operating:
        return Operating(
            self.claim, rows, database=self.parts.database, calls=self.parts.calls, abort=self._abort,
            patiently=self._patiently,
        )  # fmt: skip

    async def _call(self, fn: Callable[[Any], Any], argument: object) -> CallResult:
        return await run_call(self.parts.calls, fn, argument, timeout=self.decider.timeout, abort=self._abort)

    async def _filter(self) -> bool:
        """Ask the filters, once for the set. False: they have answered its beginning, and this run is over."""
        filters = self.parts.registry.filters.get(self.decider.stream_type, [])
        now = self.parts.database.clock.wall()
        if not filters:
            self._reasons = noops((), self.claim, now=now)
        else:
            match await self._call(partial(noops, filters, now=now), self.claim):
                case Returned(reasons):
                    self._reasons = reasons
                case other:
                    await self._conclude(self._turn(), other)
                    return False
        self._reasons |= crons.left_out(self.decider.cron, self.claim, now=now, since=self.parts.started)
        # A set that has acted stays whole: it is the turn that knows of it.
        answered = None if self._operating.acted else prefix_answer(self.claim, self._reasons)
        if answered is not None:
            await self._answer(answered)
        return answered is None

    async def _answer(self, answered: TurnCommit) -> None:
        answered = self._followed(answered)
        try:
            await self._patiently(lambda: self._answers.add(answered))
        except CommitUnknown:
            await self._look_up()
        if answered.timers:
            self.parts.wakeups.announce(("timers",))

    async def _conclude(self, turn: Turn, result: CallResult, *, replaced: bool = False) -> None:
        turn._end()
        match result:
            case Aborted(why):
                await self._aborted(why)
            case _ if self._operating.stopped is not None:
                await self._stop(self._operating.stopped.reason, self._operating.stopped.detail)
            case Returned(None):
                await self._decided(turn, replaced=replaced)
            case Returned(value):
                said = f"a turn's handler must return None, got {type(value).__name__}"
                await self._failed(said)
            case Raised(RetryLater() as error):
                await self._failed(words(error), floor=floor_of(error.after))
            case Raised(GiveUp() as error):
                await self._failed(words(error), permanent=True)
            case Raised(error):
                self.parts.telemetry.emit("turn.raised", stream=self.claim.stream, error=error)
                await self._failed(safe_error(error), error=error)
            case TimedOut(stuck):
                said = f"timeout after {self.decider.timeout / SECOND:g} s" + (", still running" if stuck else "")
                await self._failed(said)
            case _:
                assert_never(result)

    def _turn(self) -> Turn:
        claim = self.claim
        waiting = [event for event in claim.events if event.event_id not in self._reasons]
        return Turn(
            self.parts.post, claim, waiting, now=self.parts.database.clock.wall(), post=self.parts.post,
            database=self.parts.database, folding=self.parts.folding, operating=self._operating,
            tools=self.parts.registry.tools, ending=self.parts.ending.is_set, voice=self.parts.partials.voice(claim),
            limits=self.parts.registry.limits.get(self.decider.stream_type, Limits()),
        )  # fmt: skip

    async def _decided(self, turn: Turn, *, replaced: bool = False) -> None:
        records = turn._end()
        decided_at = self.parts.database.clock.wall()

        def write(conn: Connection) -> None:
            contained(records.run_writes, conn)

        try:
            self._operating.check_complete()
            done = await self._commit(turn.commit_at(decided_at, self._reasons), write if records.writes else None)
        except TurnStopped as error:
            await self._stop(error.reason, error.detail)
        except DuplicateEntry:
            if self._operating.acted:
                await self._park("turn.interrupted.landed", "some of its events are in the log already")
            elif await self._patiently(lambda: self.parts.database.atransact(turns.drop_landed, self.hold)):
                self._ended(RunEnd.CONFLICT)
                self.parts.wakeups.announce(("turns",))
            else:
                await self._failed("an entry of this turn is in the log already")
        except ConcurrencyConflict as error:
            await self._back_off(0, str(error), RunEnd.CONFLICT)
        except DuplicateKey as error:
            await self._duplicate(error, replaced=replaced)
        except StaleClaim:
            raise
        except CommitUnknown:
            await self._look_up()
        except Exception as error:
            if isinstance(error, StreamDeleted) and error.stream == self.claim.stream:
                await self._deleted()
                return
            # A refusal that only the database could know, or the user's own `write`: the decision failed.
            self.parts.telemetry.emit("turn.raised", stream=self.claim.stream, error=error)
            await self._failed(safe_error(error), error=error)
        else:
            records.fill(done.published, done.enqueued, done.withdrawn)
            self._ended(RunEnd.COMMITTED)
            topics = set(records.topics)
            if done.events_left:
                topics.add("turns")
            self.parts.wakeups.announce(topics)

    async def _commit(self, commit: TurnCommit, write: Callable[[Connection], None] | None) -> TurnCommitted:
        failpoint("turn.before_commit")
        commit = self._followed(replace(commit, spoke=self.parts.partials.close(self.claim)))
        done = await self._patiently(lambda: self._write(commit, write))
        self.parts.partials.let_go(self.claim, cleared=commit.spoke)
        failpoint("turn.after_commit")
        if self.decider.cron is not None:
            self.parts.wakeups.announce(("timers",))
        return done

    def _followed(self, commit: TurnCommit) -> TurnCommit:
        now = self.parts.database.clock.wall()
        return crons.follow(self.decider.cron, commit, now=now, since=self.parts.started)

    async def _write(self, commit: TurnCommit, write: Callable[[Connection], None] | None) -> TurnCommitted:
        """Commit it together with others, unless code of the user's takes part."""
        database = self.parts.database
        if write is None:
            return await database.agroup(turns.COMMIT, commit)
        (done,) = await database.atransact(turns.commit, [commit], write=write)
        return done

    async def _patiently(self, work: Callable[[], Awaitable[R]]) -> R:
        """Do this, again as long as the database is away and the claim is ours."""
        for tries in count(1):
            try:
                return await work()
            except Exception as error:
                if not is_away(error):
                    raise
                # Nothing was written, and the claim is still renewed: the decision waits for the database.
                logger.warning("turn of %s waits for the database: %s", self.claim.stream, error)
                pause = AWAY.delay(tries, self.parts.entropy.fraction()) / SECOND
                await asyncio.wait({self._abort}, timeout=pause)
                if self._abort.done():
                    raise StaleClaim(self.claim.stream) from error
        raise AssertionError("unreachable")

    async def _duplicate(self, error: DuplicateKey, *, replaced: bool) -> None:
        """A key that exists is a decision bug: another decision takes its place, without the handler."""
        key = error.keys[0]
        self.parts.telemetry.emit("turn.duplicate_key", stream=self.claim.stream, key=key)
        if self.decider.on_duplicate is None or replaced:
            await self._end_with(duplicate_key(self.claim, key, self._operating.shown()))
            return
        turn = self._turn()
        await self._conclude(turn, await self._call(_replacing(self.decider.on_duplicate, key), turn), replaced=True)

    async def _failed(
        self,
        said: str,
        *,
        floor: int = 0,
        permanent: bool = False,
        reason: str = "",
        error: BaseException | None = None,
    ) -> None:
        claim = self.claim
        if error is not None:
            # The trace once, not per attempt.
            told = traced(error) if claim.attempt == 1 else said
            logger.error("turn of %s failed (attempt %d): %s", claim.stream, claim.attempt, told)
        permanent = permanent or _ack_refused_for_good(error, self._began)
        dead = "turn.dead.permanent" if permanent else "turn.dead.max_attempts"
        if self._operating.barred:
            await self._stop(EFFECTS, said)
        elif claim.attempt < self.decider.attempts and not permanent:
            delay = BACKOFF.delay(claim.attempt, self.parts.entropy.fraction(), floor)
            await self._back_off(delay, said, RunEnd.FAILED)
        elif self._operating.acted:
            await self._stop(reason or dead, said)
        elif len(claim.events) > 1:
            await self._patiently(lambda: self.parts.database.atransact(queues.split, self.hold, error=said))
            self._ended(RunEnd.FAILED, said)
            self.parts.wakeups.announce(("turns",))
        else:
            await self._end_with(bury(claim, reason=reason or dead, error=said))

    async def _stop(self, reason: str, said: str) -> None:
        """End a turn that must not be run again, or that a person has stopped: show it, or leave it to a person."""
        if self.decider.when_interrupted == "park" and reason != STOPPED:
            await self._park(reason, said)
        else:
            shown = self._operating.shown()
            await self._end_with(interrupted(self.claim, reason=reason, error=said, operations=shown))

    async def _park(self, reason: str, said: str) -> None:
        alert = parked(self.claim, reason=reason, error=said)
        database, error = self.parts.database, f"{reason}: {said}"
        await self._patiently(lambda: database.atransact(queues.park, self.hold, error=error, alert=alert))
        self._ended(RunEnd.STOPPED, error)
        self.parts.wakeups.announce(("timers",))

    async def _end_with(self, commit: TurnCommit) -> None:
        try:
            await self._commit(commit, None)
        except StreamDeleted:  # its own: such a commit publishes nothing
            await self._deleted()
            return
        self._ended(commit.end, commit.error or "")
        self.parts.wakeups.announce(("turns", "timers"))

    async def _back_off(self, delay: int, said: str, end: RunEnd) -> None:
        database, lock = self.parts.database, partial(queues.lock, holds=[self.hold])
        await self._patiently(
            lambda: database.atransact(queues.back_off, self.hold, delay=delay, error=said, end=end, lock=lock)
        )
        self._ended(end, said)
        if delay == 0:
            self.parts.wakeups.announce(("turns",))
        else:
            self.parts.wakeups.ping(("turns",))  # to learn when it is over

    async def _aborted(self, why: str) -> None:
        if why == "lease lost":
            raise StaleClaim(self.claim.stream)
        if why == STOPPED:
            await self._stop(STOPPED, "a person asked that it end")
        elif self._operating.barred:
            await self._stop(EFFECTS, why)
        else:
            await self._give_back(RunEnd.RELEASED, why)

    async def _deleted(self) -> None:
        """Its stream was deleted: the next claim drops what it was about."""
        await self._give_back(RunEnd.STOPPED, "its stream was deleted")
        self.parts.wakeups.announce(("turns",))

    async def _give_back(self, end: RunEnd, why: str) -> None:
        await self.parts.database.atransact(queues.release, self.hold, end=end, error=why)
        self._ended(end, why)

    async def _look_up(self) -> None:
        """The COMMIT's answer was lost: the run's row knows whether it happened."""
        end = await self._patiently(lambda: self.parts.database.aread(runs.ended, self.claim.run_id))
        if end is None:
            await self._back_off(0, "the answer of COMMIT was lost; it had not happened", RunEnd.CONFLICT)
        else:
            self._ended(RunEnd(end))
            self.parts.wakeups.announce(("turns", "sends", "timers"))

    def _ended(self, end: RunEnd, error: str = "") -> None:
        ended(self.parts, self.claim, end, error)


def _ack_refused_for_good(error: BaseException | None, began: datetime) -> bool:
    """Whether this is the refusal of an acknowledgement, which would be refused again.

    Not if the dispatch ended after this run `began`: a handler that looks at it first may now decide otherwise.
    """
    match error:
        case AckRefused():
            since = error.about.get("since", "")  # to the second
            return bool(since < began.isoformat(timespec="seconds"))
        case AckNotRequested() | BadAckToken() | DispatchNotFound():
            return True
        case _:
            return False


def _replacing(on_duplicate: Callable[[Turn, str], object], key: str) -> Callable[[Turn], None]:
    def replace(turn: Turn) -> None:
        answer = on_duplicate(turn, key)
        if inspect.iscoroutine(answer):  # of a plain function around an async one
            answer.close()
            raise InvalidInput("on_duplicate is async: nothing awaits it.", field="on_duplicate")

    return replace
