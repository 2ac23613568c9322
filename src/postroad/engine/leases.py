"""Renewing the claims of running turns, from a thread that a blocked event loop cannot stop."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from postroad.engine.telemetry import Telemetry, logger
from postroad.model.clock import SECOND
from postroad.model.rows import Hold
from postroad.store import queues
from postroad.store.database import Database
from postroad.store.dialects import is_away


@dataclass(slots=True)
class _Held:
    hold: Hold
    lease: int
    deadline: int
    confirmed: int
    lost: Callable[[], None]


class Keeper:
    """Renews claims at a third of their lease until they are let go, their deadline passes, or they are lost.

    While the database is away the claims are kept: it says what became of them when it is back, when nobody takes
    over at once what a stall has let expire, and a commit is fenced by its token in any case. A renewal that fails
    otherwise, and is not confirmed in time, counts as lost before the lease ends.
    """

    def __init__(self, database: Database, telemetry: Telemetry) -> None:
        self._database = database
        self._telemetry = telemetry
        self._held: dict[str, _Held] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False

    def hold(self, hold: Hold, *, lease: int, timeout: int, lost: Callable[[], None]) -> None:
        """Keep a claim that was just won, for `timeout` microseconds at the most; `lost` is called from a thread."""
        now = self._database.clock.monotonic()
        with self._changed:
            self._held[hold.subject] = _Held(hold, lease, now + timeout, now, lost)
            self._changed.notify()

    def let_go(self, hold: Hold) -> None:
        """Renew this claim no longer."""
        with self._changed:
            held = self._held.get(hold.subject)
            if held is not None and held.hold == hold:
                del self._held[hold.subject]

    def start(self) -> None:
        """Renew from a thread of our own."""
        self._thread = threading.Thread(target=self._run, name="postroad-leases", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop renewing."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout=10)

    def renew(self) -> None:
        """Renew what is due, and tell whose claim is lost."""
        now = self._database.clock.monotonic()
        with self._changed:
            due = [h for h in self._held.values() if now >= h.confirmed + h.lease // 3 and now < h.deadline]
        for lease in sorted({held.lease for held in due}):
            self._renew_batch([held for held in due if held.lease == lease], lease)

    def _renew_batch(self, batch: list[_Held], lease: int) -> None:
        holds = [held.hold for held in batch]
        asked = self._database.clock.monotonic()
        try:
            gone = self._database.transact(
                queues.renew, holds, lease=lease, lock=partial(queues.lock, holds=holds), urgent=True
            )
        except Exception as error:
            logger.warning("renewing %d claims failed: %s", len(holds), error)
            now = self._database.clock.monotonic()
            gone = [h.hold for h in batch if not is_away(error) and now > h.confirmed + lease - SECOND]
        else:
            for held in batch:
                held.confirmed = asked
        for held in batch:
            if held.hold in gone:
                self._drop(held)

    def _drop(self, held: _Held) -> None:
        with self._changed:
            ours = self._held.get(held.hold.subject) is held
        if not ours:  # its run has ended meanwhile, and let it go
            return
        self.let_go(held.hold)
        self._telemetry.emit("lease.lost", subject=held.hold.subject)
        held.lost()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closing:
                    return
                self._changed.wait(self._pause())
                if self._closing:
                    return
            self.renew()

    def _pause(self) -> float | None:
        if not self._held:
            return None
        now = self._database.clock.monotonic()
        soonest = min(held.confirmed + held.lease // 3 for held in self._held.values())
        shortest = min(held.lease for held in self._held.values())
        return max(soonest - now, shortest // 24) / SECOND
