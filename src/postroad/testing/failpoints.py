"""Arming of failpoints: kill this process at a named place, as a crash would."""

import os
import signal
from collections.abc import Callable, Mapping

from postroad.engine.config import BadSetting
from postroad.model import failpoints

VARIABLE = "POSTROAD_FAILPOINT"


def arm_from_environment(environ: Mapping[str, str] | None = None) -> str | None:
    """Arm what POSTROAD_FAILPOINT asks for, `<name>` or `<name>:<n>`; what was armed, None if nothing.

    The process kills itself by SIGKILL when the failpoint is reached for the n-th time (the first by default).

    Raises:
        BadSetting: There is no failpoint of this name, or n is no count.
    """
    asked = (os.environ if environ is None else environ).get(VARIABLE, "")
    if not asked:
        return None
    name, _, count = asked.partition(":")
    if name not in failpoints.FAILPOINTS:
        raise BadSetting(f"{VARIABLE}: there is no failpoint {name!r}.", field=VARIABLE)
    if count and not (count.isascii() and count.isdigit() and int(count) > 0):
        raise BadSetting(f"{VARIABLE}: {count!r} is not a count from 1 on.", field=VARIABLE)
    failpoints.arm(nth(name, int(count or "1"), kill))
    return asked


def nth(name: str, times: int, act: Callable[[], None]) -> Callable[[str], None]:
    """What to arm to have `act` called when the failpoint is reached for the n-th time."""
    left = times

    def reached(place: str) -> None:
        nonlocal left
        if place == name:
            left -= 1
            if left == 0:
                act()

    return reached


def kill() -> None:
    """End this process at once: nothing is closed, flushed or given back."""
    os.kill(os.getpid(), signal.SIGKILL)
