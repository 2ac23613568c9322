"""Folds: projections of a stream's log."""

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from postroad.model.events import Entry
from postroad.model.ids import check_name
from postroad.model.payload import VERSION_MAX, callable_, whole

S = TypeVar("S")


class Fold(Generic[S]):
    """A projection of a stream's log: `step` is applied to `start()` for each entry, oldest first.

    `step` returns the new state and must not change the old one in place. A raised `version` tells that the
    meaning of the state has changed.
    """

    __slots__ = ("name", "start", "step", "version")

    def __init__(self, name: str, start: Callable[[], S], step: Callable[[S, Entry], S], *, version: int = 1) -> None:
        self.name = check_name(name, "fold")
        callable_(start, "start")
        callable_(step, "step")
        self.start = start
        self.step = step
        self.version = whole(version, "version", most=VERSION_MAX)

    def over(self, entries: Iterable[Entry], state: S | None = None) -> S:
        """The state after these entries, from `state` or from the start."""
        current = self.start() if state is None else state
        for entry in entries:
            current = self.step(current, entry)
        return current
