"""What was done to dispatches beside turns and senders, by whom it is not: how each deed was answered."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from postroad.model.errors import CommitUnknown, Refused
from postroad.testing.simulation.ledger import Answer
from postroad.testing.simulation.process import Crash, Process

Act = Callable[[Process, "Deed"], Awaitable[None]]


class Deed(msgspec.Struct, kw_only=True):
    """One deed: an ack, an app's withdraw, a user's stop or delete of a stream, or what an operator does.

    `subject`: the dispatch's id, '' if a filter chose; of an app's withdraw its key. `epoch`: that of an ack's token.
    `done`: how many dispatches it has changed, as its doer was told.
    """

    who: str
    verb: str
    subject: str = ""
    epoch: int = 0
    how: str = ""
    force: bool = False
    answer: Answer = Answer.INFO
    error: str = ""
    done: int = 0
    refused: list[str] = []

    def __str__(self) -> str:
        return f"{self.who}: {self.verb} {self.how} {self.subject}{' forced' if self.force else ''}"


async def carry_out(process: Process, deed: Deed, act: Act, note: Callable[[str], None]) -> None:
    """Do it through a process, with which it dies; then the deed says how its doer was answered."""
    try:
        await act(process, deed)
    except (CommitUnknown, Crash, asyncio.CancelledError) as error:
        note(f"{deed} via {process.name}: no answer, {type(error).__name__}")
    except Refused as error:
        deed.answer, deed.error = Answer.REFUSED, type(error).__name__
        note(f"{deed} via {process.name}: refused, {error}")
    else:
        deed.answer = Answer.OK
        note(f"{deed} via {process.name}: {deed.done} done {deed.refused}")
