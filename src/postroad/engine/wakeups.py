"""Wake-ups are hints: a loop that misses every one of them is late by its poll interval, never wrong."""

import threading
from collections.abc import Callable, Iterable
from typing import Literal, get_args

# "entries", what becomes of streams' logs and of what their turns say, is told in its own process only.
Topic = Literal["turns", "sends", "timers", "entries"]
TOPICS: tuple[Topic, ...] = ("turns", "sends", "timers")


class Wakeups:
    """Who wants to be woken for what. `ping` may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sleepers: dict[Topic, list[Callable[[], None]]] = {topic: [] for topic in get_args(Topic)}
        self._relays: list[Callable[[frozenset[Topic]], None]] = []
        self.hearing = False
        """Whether what other processes announce is known to arrive here, so that an idle loop may look more rarely."""

    def subscribe(self, topics: Iterable[Topic], wake: Callable[[], None]) -> Callable[[], None]:
        """Have `wake` called at each ping of one of the topics; call the result to end that."""
        chosen = tuple(topics)
        with self._lock:
            for topic in chosen:
                self._sleepers[topic].append(wake)

        def end() -> None:
            with self._lock:
                for topic in chosen:
                    self._sleepers[topic].remove(wake)

        return end

    def relay(self, tell: Callable[[frozenset[Topic]], None]) -> Callable[[], None]:
        """Have `tell` called with what `announce` announces, to carry it to other processes."""
        with self._lock:
            self._relays.append(tell)

        def end() -> None:
            with self._lock:
                self._relays.remove(tell)

        return end

    @property
    def relayed(self) -> bool:
        """Whether anything carries announcements to other processes."""
        with self._lock:
            return bool(self._relays)

    def ping(self, topics: Iterable[Topic] = TOPICS) -> None:
        """Wake the loops of this process that care."""
        with self._lock:
            sleepers = [wake for topic in topics for wake in self._sleepers[topic]]
        for wake in sleepers:
            wake()

    def announce(self, topics: Iterable[Topic]) -> None:
        """Something was committed here: wake the loops of this process and, through relays, of others."""
        told = frozenset(topics)
        if not told:
            return
        self.ping(sorted(told))  # in one order, so that a run can be repeated
        with self._lock:
            relays = list(self._relays)
        for tell in relays:
            tell(told)
