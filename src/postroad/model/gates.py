"""Gates: what is down, a kind or one host of it, and how long nobody tries it."""

import re

from postroad.model.clock import SECOND

WHOLE_KIND = ""
"""Stands for the gate of a kind as a whole, where otherwise a host stands."""
FIRST = 1 * SECOND
CAP = 60 * SECOND
HOST_CHARS_MAX = 255
BURST = SECOND // 10

_URL = re.compile(r"https?://(?:[^/?#\\@]*@)?(?P<host>[^/?#\\@\s]+)(?:[/?#\\]|$)", re.IGNORECASE)


def host_of(destination: str) -> str | None:
    """The host of an http or https URL, with its port if it names one, in lower case; None if there is none."""
    found = _URL.match(destination)
    if found is None or len(found["host"]) > HOST_CHARS_MAX:
        return None
    return found["host"].lower()


def hold(failures: int, fraction: float) -> int:
    """How long a gate stays closed after so many probes in a row that found it down, in microseconds.

    From half of the bound up to the bound, which doubles from 1 s to a minute; `fraction` in [0, 1) is the draw.
    """
    bound = min(FIRST << min(max(failures, 1) - 1, 62), CAP)
    return round(bound * (0.5 + fraction / 2))


def gap(rate: float) -> int:
    """The time between two attempts at a rate per second, in microseconds."""
    return max(1, round(SECOND / rate))


def saved(rate: float) -> int:
    """How long a limit that was not used is saved for, in microseconds: for attempts that may then start at once."""
    return max(0, BURST - gap(rate))


def allowed(next_at: int, rate: float, *, now: int) -> int:
    """How many attempts may start now, if `next_at` is when the next one may (GCRA, ITU-T I.371)."""
    since = min(now - next_at, saved(rate))
    return 0 if since < 0 else since // gap(rate) + 1


def after(next_at: int, rate: float, started: int, *, now: int) -> int:
    """When the next attempt may start, after so many have."""
    return max(next_at, now - saved(rate)) + started * gap(rate)
