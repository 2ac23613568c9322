"""The looks of idle loops: at the same moments, and in one transaction that reads.

What an idle process costs is that it wakes up at all, again and again, with nothing in the processor's caches. So its
loops, once they find nothing, look together.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import Connection

from postroad.model.entropy import Entropy
from postroad.store.database import Database

R = TypeVar("R")
_Question = Callable[[Connection], Any]


class Looks:
    """When the idle loops of a process look, and what they ask then."""

    def __init__(self, database: Database, entropy: Entropy) -> None:
        self._database = database
        self._entropy = entropy
        self._beat: float | None = None
        self._asked: list[_Question] = []
        self._answers: asyncio.Task[Sequence[Any]] | None = None

    def wait(self, every: int) -> int:
        """How long until the moment at which all look that look so often, in microseconds; above 0."""
        if self._beat is None:  # processes that were started together do not look together
            self._beat = self._entropy.fraction()
        return every - (self._database.clock.monotonic() + round(self._beat * every)) % every

    async def read(self, fn: Callable[..., R], *args: Any) -> R:
        """As the database's `aread`, in one transaction with what is asked in the same moment."""
        if self._answers is None or self._answers.done():  # done: its event loop ended before it could begin
            self._answers = asyncio.ensure_future(self._read())
        answers, place = self._answers, len(self._asked)
        self._asked.append(partial(_ask, fn, args))
        found: R = (await asyncio.shield(answers))[place]
        return found

    async def _read(self) -> Sequence[Any]:
        asked, self._asked, self._answers = self._asked, [], None
        return await self._database.aread(_all, asked)


def _ask(fn: Callable[..., R], args: Sequence[Any], conn: Connection) -> R:
    return fn(conn, *args)


def _all(conn: Connection, asked: Sequence[_Question]) -> list[Any]:
    return [question(conn) for question in asked]
