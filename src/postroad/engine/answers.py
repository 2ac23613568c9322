"""Answers to events that need no decision: committed together, as many as wait."""

import asyncio
from collections.abc import Sequence

from postroad.engine.loop import Parts
from postroad.engine.telemetry import logger
from postroad.model.errors import (
    CommitUnknown,
    ConcurrencyConflict,
    DuplicateEntry,
    PostroadError,
    StaleClaim,
    StreamDeleted,
)
from postroad.model.lifecycle import RunEnd
from postroad.model.rows import Hold, TurnClaim, TurnCommit
from postroad.store import queues, runs, turns

ANSWERS_MAX = 100


class Answers:
    """Commits what was decided without a handler. What comes while a commit is under way shares the next one."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._waiting: list[tuple[TurnCommit, asyncio.Future[None]]] = []
        self._committing: asyncio.Task[None] | None = None

    async def add(self, commit: TurnCommit) -> None:
        """Commit this with what others add meanwhile; raises what the database has against it."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((commit, done))
        if self._committing is None or self._committing.done():
            self._committing = asyncio.ensure_future(self._commit_all())
        await done

    async def commit(self, commits: Sequence[TurnCommit]) -> None:
        """Commit these together; if that cannot be, each alone, so that one that is refused hinders no other."""
        try:
            done = await self._parts.database.atransact(turns.commit, commits)
        except CommitUnknown:
            # All of them or none: the run of any of them knows.
            if await self._parts.database.aread(runs.ended, commits[0].claim.run_id) != RunEnd.COMMITTED:
                await self.commit(commits)
                return
            for commit in commits:
                ended(self._parts, commit.claim, RunEnd.COMMITTED)
            self._parts.wakeups.announce(("turns", "sends", "timers"))
        except PostroadError:
            for commit in commits:
                await self._commit_one(commit)
        else:
            for commit in commits:
                ended(self._parts, commit.claim, RunEnd.COMMITTED)
            if any(one.events_left for one in done):
                self._parts.wakeups.announce(("turns",))

    async def _commit_all(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:ANSWERS_MAX], self._waiting[ANSWERS_MAX:]
            try:
                await self.commit([commit for commit, _ in batch])
            except BaseException as error:
                for _, done in batch:
                    if not done.done():
                        done.set_exception(error)
                if not isinstance(error, Exception):
                    raise
            for _, done in batch:
                if not done.done():
                    done.set_result(None)

    async def _commit_one(self, commit: TurnCommit) -> None:
        try:
            await self._commit_or_drop(commit)
        except (StaleClaim, ConcurrencyConflict):
            await stale(self._parts, commit.claim)

    async def _commit_or_drop(self, commit: TurnCommit) -> None:
        database = self._parts.database
        try:
            await database.atransact(turns.commit, [commit])
        except DuplicateEntry:
            await database.atransact(turns.drop_landed, Hold(commit.claim.stream, commit.claim.token))
        except StreamDeleted:  # its own: an answer publishes nothing; the next claim drops what it was about
            hold, said = Hold(commit.claim.stream, commit.claim.token), "its stream was deleted"
            await database.atransact(queues.release, hold, end=RunEnd.STOPPED, error=said)
            ended(self._parts, commit.claim, RunEnd.STOPPED, said)
        else:
            ended(self._parts, commit.claim, RunEnd.COMMITTED)


def ended(parts: Parts, claim: TurnClaim, end: RunEnd, error: str = "") -> None:
    """Count a run's end and tell the observers."""
    parts.wakeups.ping(("entries",))
    parts.count("turns" if end is RunEnd.COMMITTED else f"turns_{end}")
    parts.telemetry.emit(
        "turn.ended", stream=claim.stream, turn=claim.turn_id, attempt=claim.attempt, end=str(end), error=error,
        events=len(claim.events),
    )  # fmt: skip


async def stale(parts: Parts, claim: TurnClaim) -> None:
    """Record that a run's claim was over before it ended: it changed nothing."""
    parts.count("stale")
    try:
        await parts.database.atransact(queues.end_stale, Hold(claim.stream, claim.token))
    except Exception as error:
        logger.warning("the stale run of %s could not be recorded: %s", claim.stream, error)
    ended(parts, claim, RunEnd.STALE)
