"""What those who change a good history look for in it."""

from collections.abc import Callable
from typing import Any

from postroad.testing.simulation.history import History


def first(rows: list[Any], **about: Any) -> Any:
    """The first row that is like this."""
    return next(row for row in rows if all(getattr(row, name) == value for name, value in about.items()))


def sent(h: History) -> Any:
    """A dispatch of a stream that was delivered."""
    return next(row for row in h.outbox if row.status == "delivered" and row.stream)


def change(find: Callable[[History], Any], **about: Any) -> Callable[[History], None]:
    def apply(h: History) -> None:
        row = find(h)
        for name, value in about.items():
            setattr(row, name, value)

    return apply


def start_of(h: History) -> Any:
    return first(h.transitions, entity=sent(h).id, reason_code="dispatch.delivering.attempt")
