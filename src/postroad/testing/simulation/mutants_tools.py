"""Bugs to plant in tool calls, stops and deletions; `mutants` has the others, and says what a mutant is."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import msgspec

from postroad.engine import endings, run
from postroad.engine.operating import Operating
from postroad.model import ids
from postroad.model.operations import forbids_rerun
from postroad.model.payload import canonical
from postroad.store import operations, stopping
from postroad.store.groups import Verb
from postroad.store.operations import Start
from postroad.store.statements import Statement, as_json
from postroad.testing.simulation.planting import Mutant, into

MUTANTS: dict[str, Mutant] = {}
planted = into(MUTANTS)


@planted("unsafe replay: the effect rule is skipped")
def forgets_effects() -> AbstractContextManager[object]:
    """Whether a turn may run again is decided by what this run has called, not by the runs before it."""
    return patch.object(Operating, "barred", property(lambda self: forbids_rerun(self._own.values())))


@planted("a key is not kept")
def makes_new_keys() -> AbstractContextManager[object]:
    """A keyed call that is repeated gets a key of its own."""

    def key(self: Any, tool: Any, arguments: str, found: Any) -> str | None:
        own = ids.operation_key(self._claim.turn_id, self._ordinal, tool.name, canonical(arguments))
        return own if tool.effect == "keyed" else None

    return patch.object(Operating, "_key", key)


@planted("results are reused out of order")
def reuses_the_last() -> AbstractContextManager[object]:
    """Of several earlier calls that are alike the last one is taken for the next."""
    match = Operating._match

    def matches(self: Any, tool: Any, arguments: str) -> Any:
        self._left.reverse()
        found = next((row for row in self._left if row.is_call(tool.name, tool.version, arguments)), None)
        if found is not None:
            self._left.remove(found)
        self._left.reverse()
        return found or match(self, tool, arguments)

    return patch.object(Operating, "_match", matches)


@planted("a stop forgets what began")
def forgets_what_began() -> AbstractContextManager[object]:
    """The entry of a turn that is stopped says nothing of its calls."""
    real = endings.interrupted
    return patch.object(run, "interrupted", lambda claim, **about: real(claim, **{**about, "operations": ()}))


@planted("a call's start is not fenced")
def starts_unfenced() -> AbstractContextManager[object]:
    """A call is recorded, and made, whoever holds the stream by now."""

    def start(conn: Any, starts: Sequence[Start], *, now: int) -> list[None]:
        operations._START(conn, started=as_json([msgspec.to_builtins(one.row) for one in starts]), now=now)
        return [None for _ in starts]

    return patch.object(operations, "START", Verb(run=start, names=operations._names))


@planted("a stop withdraws what came after it")
def withdraws_all() -> AbstractContextManager[object]:
    """Whatever waits when a stop is seen is withdrawn."""
    all_ = Statement(stopping._WITHDRAW._sql.replace("position < :stop", "position <> :stop"))
    return patch.object(stopping, "_WITHDRAW", all_)
