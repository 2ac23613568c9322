"""Tools: functions that a turn may call."""

from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class Tool(Generic[P, R_co]):
    """A function that a turn may call; its calls are recorded."""

    def __init__(self, fn: Callable[P, R_co], *, effect: str) -> None:
        self._fn = fn
        self.name = fn.__name__
        self.effect = effect

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        return self._fn(*args, **kwargs)
