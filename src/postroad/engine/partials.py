"""What turns say while they run, on its way to the watchers: carried together, at most so often, and never durable."""

import asyncio
import threading
from collections.abc import Mapping, Sequence

from postroad.engine.telemetry import logger
from postroad.engine.wakeups import Wakeups
from postroad.model.clock import SECOND
from postroad.model.payload import text
from postroad.model.rows import TurnClaim
from postroad.store import partials
from postroad.store.database import Database
from postroad.store.partials import Said

TEXT_BYTES_MAX = 256 * 1024
CUT = "…"
PIECE_BYTES_MAX = 2**31
EVERY = SECOND * 3 // 20
SHARE = 4  # a database that answers slowly is left alone for that many times as long as it took


def words(said: object) -> str:
    """A piece of what a turn says, if it is text that can be stored; else InvalidInput."""
    return text(said, "text", bytes_max=PIECE_BYTES_MAX, empty=True)


class Voice:
    """What one run says. Any thread may use it."""

    __slots__ = ("_claim", "_left", "_loop", "_partials", "_pieces", "closed", "fresh", "written")

    def __init__(self, to: "Partials", claim: TurnClaim, loop: asyncio.AbstractEventLoop) -> None:
        self._partials = to
        self._claim = claim
        self._loop = loop
        self._pieces: list[str] = []
        self._left = TEXT_BYTES_MAX
        self.fresh = False
        """Whether something was said that was not carried yet."""
        self.written = False
        """Whether a row may stand in the database."""
        self.closed = False

    def say(self, piece: str) -> None:
        """Add to what was said, to be carried soon; nothing once the turn is about to be committed."""
        if piece:
            self._partials.heard(self._claim.run_id, self, piece, self._loop)

    def add(self, piece: str) -> bool:
        """Take a piece in, or as much of it as there is room for; whether that changed anything."""
        if self.closed or self._left < 0:
            return False
        encoded = piece.encode()
        self._pieces.append(piece if len(encoded) <= self._left else _cut(encoded, self._left))
        self._left -= len(encoded)
        self.fresh = True
        return True

    def take(self) -> Said:
        """All that was said, to be carried."""
        self._pieces = ["".join(self._pieces)]
        self.fresh, self.written = False, True
        claim = self._claim
        return Said(
            name=claim.stream, token=claim.token, run=claim.run_id, turn=claim.turn_id, words=self._pieces[0]
        )  # fmt: skip


class Partials:
    """Carries what the turns of this process say to the database: all together, in one transaction at a time.

    It is a task of the event loop in which the turns run, and only as long as there is something to carry. What does
    not get there is said again with what follows; losing all of it changes nothing.
    """

    def __init__(self, database: Database, wakeups: Wakeups) -> None:
        self._database = database
        self._wakeups = wakeups
        self._lock = threading.Lock()
        self._voices: dict[str, Voice] = {}  # by run: those that have said something
        self._over: dict[str, str] = {}  # runs that left a row behind, with their streams
        self._told: asyncio.AbstractEventLoop | None = None  # the loop that is about to carry, or carries
        self._task: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        self._failures = 0

    def voice(self, claim: TurnClaim) -> Voice:
        """The voice of a run's turn. If the run has had another one, what that said counts no longer."""
        loop = asyncio.get_running_loop()
        made = Voice(self, claim, loop)
        with self._lock:
            former = self._voices.get(claim.run_id)
            if former is not None:
                former.closed = True
                made.fresh, made.written = True, former.written
                self._voices[claim.run_id] = made
        if former is not None:
            self._tell(loop)
        return made

    def heard(self, run: str, voice: Voice, piece: str, loop: asyncio.AbstractEventLoop) -> None:
        """A voice says something: from any thread."""
        with self._lock:
            if not voice.add(piece):
                return
            self._voices[run] = voice
        self._tell(loop)

    def close(self, claim: TurnClaim) -> bool:
        """Carry nothing more of a run that is about to be committed; whether a row of it may stand there."""
        with self._lock:
            voice = self._voices.get(claim.run_id)
            if voice is None:
                return False
            voice.closed, voice.fresh = True, False
            return voice.written

    def let_go(self, claim: TurnClaim, *, cleared: bool = False) -> None:
        """The run is over; `cleared`: and its row, if there was one, has gone with its commit."""
        with self._lock:
            voice = self._voices.pop(claim.run_id, None)
            if voice is None:
                return
            voice.closed = True
            if cleared or not voice.written:
                return
            self._over[claim.run_id] = claim.stream
        self._tell(asyncio.get_running_loop())

    async def finish(self) -> None:
        """Carry what is left, without a pause."""
        with self._lock:
            if self._told is None and not self._over:
                return
        self._begin()
        assert self._task is not None
        self._hurry.set()
        await asyncio.wait({self._task})

    def _tell(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have the loop carry, unless it has been told."""
        with self._lock:
            if self._told is not None and not self._told.is_closed():
                return
            self._told = loop
        try:
            loop.call_soon_threadsafe(self._begin)
        except RuntimeError:  # it was closed: a thread that its turn has left behind
            return

    def _begin(self) -> None:
        task = self._task
        if task is None or task.done() or task.get_loop() is not asyncio.get_running_loop():
            self._hurry = asyncio.Event()
            self._task = asyncio.ensure_future(self._carry(self._hurry))

    async def _carry(self, hurry: asyncio.Event) -> None:
        try:
            while (work := self._take()) is not None:
                last, began = hurry.is_set(), self._database.clock.monotonic()
                await self._write(*work)
                if last:
                    return
                took = self._database.clock.monotonic() - began
                await _pause(hurry, max(EVERY, SHARE * took))
        finally:
            with self._lock:
                self._told = None

    def _take(self) -> tuple[list[Said], Mapping[str, str]] | None:
        """What is to be carried: what was said, and what is over. None: nothing, and whoever speaks next must tell."""
        with self._lock:
            said = [voice.take() for voice in self._voices.values() if voice.fresh]
            over, self._over = self._over, {}
            if said or over:
                return said, over
            self._told = None
            return None

    async def _write(self, said: Sequence[Said], over: Mapping[str, str]) -> None:
        try:
            written = await self._database.atransact(partials.carry, said, over)
        except Exception as error:
            self._failures += 1
            if self._failures == 1:
                logger.warning("what turns say does not get to the database (trying again): %s", error)
            self._put_back([one.run for one in said], over)
            return
        if self._failures:
            logger.info("what turns say gets to the database again after %d failures", self._failures)
            self._failures = 0
        self._put_back([one.run for one in said if one.run not in written], {})
        if written or over:
            self._wakeups.ping(("entries",))

    def _put_back(self, runs: Sequence[str], over: Mapping[str, str]) -> None:
        with self._lock:
            self._over = {**over, **self._over}
            for run in runs:
                voice = self._voices.get(run)
                if voice is not None and not voice.closed:
                    voice.fresh = True


async def _pause(hurry: asyncio.Event, length: int) -> None:
    waiting = asyncio.ensure_future(hurry.wait())
    try:
        await asyncio.wait({waiting}, timeout=length / SECOND)
    finally:
        waiting.cancel()


def _cut(encoded: bytes, most: int) -> str:
    return encoded[:most].decode("utf-8", "ignore") + CUT
