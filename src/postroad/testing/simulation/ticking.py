"""The crons of simulated programs: what their runs do follows from the time that they are for."""

import asyncio
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import msgspec

from postroad.engine.handlers import Handlers
from postroad.engine.turn import Turn
from postroad.model.clock import SECOND
from postroad.model.crons import MISSED, TYPE_PREFIX, Missed
from postroad.model.errors import StreamDeleted
from postroad.model.kinds import Kind
from postroad.testing.simulation.ledger import ReportCall
from postroad.testing.simulation.options import Options
from postroad.testing.simulation.owners import owner
from postroad.testing.simulation.toolbox import Handled, who_of

# So short that a seed sees many times of each, and that a run which takes long or fails misses the next ones.
SPEC, PERIOD = "*/20 * * * * *", 20 * SECOND
LONG_SECONDS = 40
ENDS = (*["ok"] * 6, "once", "raise", "exit", "long")


class Ran(msgspec.Struct, frozen=True):
    """What a run notes that has ended well: which time it was for, and which stream it has told of it."""

    at: str
    told: str


RAN = Kind("sim.ran", Ran)


def policies(options: Options) -> list[Missed]:
    """Which crons a seed has, by what becomes of the times that they miss."""
    return [MISSED[(options.seed + number) % len(MISSED)] for number in range(options.crons)]


def is_cron(stream: str) -> bool:
    """Whether a cron's runs are turns of this stream."""
    return stream.startswith(TYPE_PREFIX)


def report_key(stream: str, at: str) -> str:
    """The key of the report by which a cron tells of a time."""
    return f"{stream}:{at}"


def policy_of(stream: str) -> str:
    """What becomes of the times that a cron misses, which is its name."""
    return stream.removeprefix(TYPE_PREFIX).partition("/")[0]


class Crons:
    """A seed's crons: each is declared by the name of its policy, and reports to one of the streams `told`."""

    def __init__(
        self, options: Options, told: Sequence[str], handled: Callable[[Handled], None],
        tried: Callable[[str, str, int], None], telling: Callable[[ReportCall], AbstractContextManager[object]],
    ) -> None:  # fmt: skip
        self._options = options
        self._told = told
        self._handled = handled
        self._tried = tried
        self._telling = telling

    def declare(self, handlers: Handlers) -> None:
        """Declare them all."""
        options = self._options
        for policy in policies(options):
            handlers.cron(
                policy, SPEC, tz="UTC", missed=policy, attempts=options.turn_attempts,
                timeout=options.turn_timeout, lease=options.lease,
            )(self._run)  # fmt: skip

    async def _run(self, turn: Turn) -> None:
        self._handled(Handled(*who_of(turn), tuple(event.key for event in turn.events)))
        self._tried(turn.stream, turn.id, turn.attempt)
        for event in turn.events:
            at: str = event.data["scheduled_at"]
            number = zlib.crc32(f"{turn.stream} {at}".encode())
            to = await self._report(turn, at, self._told[number % len(self._told)])
            end = ENDS[number % len(ENDS)]
            if end == "raise" or (end == "once" and turn.attempt == 1):
                raise RuntimeError(f"planned: {end}")
            if end == "exit" and turn.attempt == 1:
                raise SystemExit("planned")
            await asyncio.sleep(LONG_SECONDS if end == "long" else 0)
            turn.record(RAN, Ran(at, to))

    async def _report(self, turn: Turn, at: str, to: str) -> str:
        """Tell a stream of a time, in each attempt in other words; which it was, '' if it was deleted.

        It asks to wait, as one may, and does not: it is in a turn.
        """
        key, words = report_key(turn.stream, at), f"{at}, attempt {turn.attempt}"
        whose = owner(self._options, turn.stream)
        data = msgspec.json.encode(words).decode()
        call = ReportCall(stream=to, key=key, data=data, source=turn.stream, owner=whose)
        try:
            with self._telling(call):
                await turn.post.areport(to, words, key=key, wait=LONG_SECONDS, source=turn.stream, owner=whose)
        except StreamDeleted:
            return ""
        return to
