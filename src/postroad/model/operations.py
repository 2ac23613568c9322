"""Tool calls as turns and people see them, and the rule that says when a turn may run again."""

from collections.abc import Iterable
from enum import StrEnum
from itertools import groupby
from typing import Any, Literal, cast

import msgspec

from postroad.model.payload import canonical

Effect = Literal["read", "idempotent", "keyed", "unsafe"]
EFFECTS: tuple[Effect, ...] = ("read", "idempotent", "keyed", "unsafe")


class CallStatus(StrEnum):
    """How far a tool call came, as far as is recorded."""

    STARTED = "started"
    FINISHED = "finished"
    FAILED = "failed"
    REUSED = "reused"
    """Not called: an earlier run's call had finished, and this run got its result."""


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded tool call of one run.

    Attributes:
        tool: The tool's name, and `version` the one that it had.
        effect: read, idempotent, keyed or unsafe.
        arguments: What it was called with.
        status: "started" (nobody knows how it ended), "finished", "failed", or "reused": an earlier run's result.
        result: What it returned, as JSON has it; of one that failed the error's text.
        key: What a keyed tool was given to make its effect happen once.
    """

    tool: str
    version: int
    effect: Effect
    arguments: dict[str, Any]
    status: str
    result: Any = None
    key: str | None = None


class OperationRow(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded tool call as it is stored; `arguments` and a finished one's `result` are JSON. Times in microseconds.

    `ordinal` counts over all runs of the turn; `repeats` is that of the earlier run's call which this one repeats;
    `resolved`: what a person decided about it.
    """

    turn_id: str
    ordinal: int
    run_id: str
    stream: str
    tool: str
    version: int
    effect: str
    arguments: str
    status: str = CallStatus.STARTED
    result: str | None = None
    key: str | None = None
    repeats: int | None = None
    entry: str | None = None
    resolved: str | None = None
    started_at: int = 0
    ended_at: int | None = None

    @property
    def acts(self) -> bool:
        """Whether it may have changed the world in a way that must not be forgotten."""
        return self.effect in ("keyed", "unsafe")

    @property
    def finished(self) -> bool:
        """Whether its result is known."""
        return self.status in (CallStatus.FINISHED, CallStatus.REUSED)

    def is_call(self, tool: str, version: int, arguments: str) -> bool:
        """Whether it is this tool's call with these arguments."""
        return (self.tool, self.version) == (tool, version) and canonical(self.arguments) == canonical(arguments)

    def shown(self) -> Operation:
        """It as handlers and people see it."""
        result = msgspec.json.decode(self.result) if self.finished and self.result is not None else self.result
        return Operation(
            tool=self.tool,
            version=self.version,
            effect=cast(Effect, self.effect),
            arguments=msgspec.json.decode(self.arguments),
            status=self.status,
            result=result,
            key=self.key,
        )


def history(rows: Iterable[OperationRow]) -> list[OperationRow]:
    """What a turn that is run again must know of its earlier runs, in the order of its calls.

    `rows` are the calls of all of them by ordinal. A run repeats its predecessors' calls, so its own stand for those;
    what it did not come to follows. What a person has had done again is forgotten.
    """
    left: list[OperationRow] = []
    known = [row for row in rows if row.resolved != "retry"]
    for _, run in groupby(known, key=lambda row: row.run_id):
        calls = list(run)
        repeated = {row.repeats for row in calls}
        reached = max((place for place, row in enumerate(left) if row.ordinal in repeated), default=-1)
        behind = [r for place, r in enumerate(left) if r.ordinal not in repeated and (r.acts or place > reached)]
        left = calls + behind
    return _settled(left)


def _settled(calls: list[OperationRow]) -> list[OperationRow]:
    """Of calls with one key, which are attempts at the same, the one whose result is known, else the last."""
    best: dict[str, OperationRow] = {}
    for row in calls:
        if row.key is not None and not (row.key in best and best[row.key].finished):
            best[row.key] = row
    return [row for row in calls if row.key is None or best[row.key] is row]


def forbids_rerun(rows: Iterable[OperationRow]) -> bool:
    """Whether a turn with these calls behind it must not be run again by itself."""
    return any(row.effect == "unsafe" and row.resolved != "continue" for row in rows)
