"""The one telemetry seam: named events with plain values, to whoever observes."""

import logging
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from postroad.engine.calls import contained

logger = logging.getLogger("postroad")
Observer = Callable[[str, Mapping[str, Any]], None]
TRACE_LINES, TRACE_LINE_CHARACTERS = 40, 300


def traced(error: BaseException) -> str:
    """An error's traceback as a log can hold it: an error's own text may be of any size and hold anything."""
    lines = "".join(traceback.format_exception(error)).splitlines()
    if len(lines) > 2 * TRACE_LINES:
        lines[TRACE_LINES:-TRACE_LINES] = ["  …"]
    text = "\n".join(line[:TRACE_LINE_CHARACTERS] for line in lines)
    return text.encode("utf-8", "backslashreplace").decode()


class Telemetry:
    """Observers are called in order; one that raises is reported to the log and harms nobody."""

    def __init__(self) -> None:
        self._observers: list[Observer] = []

    def observe(self, fn: Observer) -> None:
        """Have `fn(name, values)` called for each event from now on."""
        self._observers.append(fn)

    def emit(self, name: str, **values: Any) -> None:
        """Tell the observers that something happened."""
        for fn in self._observers:
            try:
                contained(fn, name, values)
            except Exception:
                logger.exception("an observer failed on %s", name)
