"""The crons of simulated programs: what their runs do follows from the time that they are for."""

import asyncio
import zlib
from collections.abc import Callable
from functools import partial

from postroad.engine.handlers import Handlers
from postroad.engine.turn import Turn
from postroad.model.clock import SECOND
from postroad.model.crons import MISSED, TYPE_PREFIX, Missed
from postroad.model.kinds import Kind
from postroad.testing.simulation.options import Options
from postroad.testing.simulation.toolbox import Handled, who_of

SPEC, PERIOD = "* * * * *", 60 * SECOND
LONG_SECONDS = 40
ENDS = (*["ok"] * 6, "once", "raise", "exit", "long")
RAN: Kind[str] = Kind("sim.ran", str)


def policies(options: Options) -> list[Missed]:
    """Which crons a seed has, by what becomes of the times that they miss."""
    return [MISSED[(options.seed + number) % len(MISSED)] for number in range(options.crons)]


def is_cron(stream: str) -> bool:
    """Whether a cron's runs are turns of this stream."""
    return stream.startswith(TYPE_PREFIX)


def policy_of(stream: str) -> str:
    """What becomes of the times that a cron misses, which is its name."""
    return stream.removeprefix(TYPE_PREFIX).partition("/")[0]


def declare_crons(
    handlers: Handlers, options: Options, *, handled: Callable[[Handled], None], tried: Callable[[str, str, int], None]
) -> None:  # fmt: skip
    """Declare a seed's crons, each by the name of its policy."""
    for policy in policies(options):
        handlers.cron(
            policy, SPEC, tz="UTC", missed=policy, attempts=options.turn_attempts,
            timeout=options.turn_timeout, lease=options.lease,
        )(partial(_run, handled=handled, tried=tried))  # fmt: skip


async def _run(turn: Turn, *, handled: Callable[[Handled], None], tried: Callable[[str, str, int], None]) -> None:
    handled(Handled(*who_of(turn), tuple(event.key for event in turn.events)))
    tried(turn.stream, turn.id, turn.attempt)
    for event in turn.events:
        at: str = event.data["scheduled_at"]
        end = ENDS[zlib.crc32(f"{turn.stream} {at}".encode()) % len(ENDS)]
        if end == "raise" or (end == "once" and turn.attempt == 1):
            raise RuntimeError(f"planned: {end}")
        if end == "exit" and turn.attempt == 1:
            raise SystemExit("planned")
        await asyncio.sleep(LONG_SECONDS if end == "long" else 0)
        turn.record(RAN, at)
