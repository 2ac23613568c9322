"""The one telemetry seam: named events with plain values, to whoever observes."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

logger = logging.getLogger("postroad")
Observer = Callable[[str, Mapping[str, Any]], None]


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
                fn(name, values)
            except Exception:
                logger.exception("an observer failed on %s", name)
