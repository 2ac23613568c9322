"""Lengths of time as people write them: 90s, 30 minutes, 12h, 7d, 2 weeks; a bare number is seconds."""

import re

from postroad.model.clock import SECOND, span
from postroad.model.errors import InvalidInput, Span, shown

_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 7 * 86_400}
_UNITS = {
    word: unit
    for unit, words in {
        "s": ("s", "sec", "second", "seconds"),
        "m": ("m", "min", "minute", "minutes"),
        "h": ("h", "hour", "hours"),
        "d": ("d", "day", "days"),
        "w": ("w", "week", "weeks"),
    }.items()
    for word in words
}
_WRITTEN = re.compile(r"(\d{1,12}(?:\.\d{1,6})?) *([a-z]*)", re.ASCII)


def read(said: Span | str, field: str) -> int:
    """A length of time in microseconds.

    >>> read("1.5 h", "rest")
    5400000000

    Raises:
        InvalidInput: It is none, or longer than a hundred years.
    """
    if not isinstance(said, str):
        return span(said, field)
    found = _WRITTEN.fullmatch(said.strip().lower())
    unit = found and _UNITS.get(found[2] or "s")
    if not found or not unit:
        raise InvalidInput(
            f"{field} must be a length of time, such as 90s, 12 hours or 7d, got {shown(said)}.", field=field
        )
    return span(float(found[1]) * _SECONDS[unit], field)


def written(micros: int) -> str:
    """The shortest form that `read` takes: whole units where there are such.

    >>> written(7 * 86_400 * SECOND)
    '7d'
    """
    units = (unit for unit in "dhm" if micros and micros % (_SECONDS[unit] * SECOND) == 0)
    unit = next(units, "s")
    number = f"{micros / (_SECONDS[unit] * SECOND):.6f}".rstrip("0").rstrip(".")
    return number + unit
