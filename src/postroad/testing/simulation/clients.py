"""Clients: they publish, send and arm timers through whatever process lives, and repeat what got no answer."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from sqlalchemy import text

from postroad.model.entropy import SeededEntropy
from postroad.model.errors import CommitUnknown, KeyConflict, Refused, StreamDeleted, TimerConflict
from postroad.testing.simulation.draws import Draws
from postroad.testing.simulation.ledger import Answer, Call, Ledger
from postroad.testing.simulation.options import Options
from postroad.testing.simulation.process import Crash, Process
from postroad.testing.simulation.workload import BY_NAME, ORDER, SMS, Message, Order, destination

RECENT = 20
_WRITE = text("INSERT INTO sim_written (name) VALUES (:name) ON CONFLICT DO NOTHING")
# So that every seed sends something.
_HARMLESS = msgspec.json.encode([SMS.name, Message()]).decode()


class Asked(msgspec.Struct, frozen=True):
    """What a call asks for."""

    verb: str
    stream: str
    key: str
    data: str


class Clients:
    """Draws blocks of calls and makes them; each block is one task inside the process through which it goes."""

    def __init__(self, options: Options, ledger: Ledger, note: Callable[[str], None]) -> None:
        self._draws = Draws(options, SeededEntropy(options.seed * 7 + 1))
        self._ledger = ledger
        self._note = note
        self._made = 0
        self._blocks = 0
        self._repeats = options.repeats
        self._burst = options.burst

    @property
    def keys(self) -> list[str]:
        """Keys of dispatches that somebody has asked for, or will perhaps; the latest last."""
        return self._draws.keys

    def latest(self, stream: str) -> str:
        """What took the place of a stream, if it was deleted."""
        return self._draws.latest(stream)

    def leave(self, stream: str) -> None:
        """A stream is deleted: write elsewhere, most of the time."""
        self._draws.leave(stream)

    def offer(self, stream: str, key: str, order: Order) -> list[Call]:
        """A block of one call that publishes this order, begun; `make` it."""
        self._blocks += 1
        data = msgspec.json.encode(order).decode()
        return [self._ledger.begin(verb="publish", stream=stream, key=key, data=data, block=self._blocks)]

    def begin(self) -> list[Call]:
        """Draw a block of calls, and write that they begin."""
        asked, joined = self._unanswered() or self._drawn()
        self._blocks += 1
        return [
            self._ledger.begin(
                verb=each.verb, stream=each.stream, key=each.key, data=each.data, block=self._blocks, joined=joined
            )
            for each in asked
        ]

    def _unanswered(self) -> tuple[list[Asked], bool] | None:
        """A block that got no answer is usually made again."""
        recent = self._ledger.calls[-RECENT:]
        open_ = next((call for call in recent if call.ended is None or call.answer is Answer.INFO), None)
        if open_ is None or not self._draws.chance(0.3):
            return None
        return [_asked(call) for call in self._ledger.calls if call.block == open_.block], open_.joined

    def _drawn(self) -> tuple[list[Asked], bool]:
        size = 1 + int(self._burst * self._draws.entropy.fraction())
        asked = [self._earlier() or self._new() for _ in range(size)]
        if self._draws.chance(self._repeats):  # the same once more in one transaction
            asked.append(asked[0])
        return asked, self._draws.chance(0.2)

    def _earlier(self) -> Asked | None:
        """One that was made before, as a source does that delivers at least once."""
        if not self._ledger.calls or not self._draws.chance(self._repeats):
            return None
        recent = self._ledger.calls[-RECENT:]
        call = recent[int(len(recent) * self._draws.entropy.fraction())]
        other = call.verb == "publish" and self._draws.chance(0.1)
        data = msgspec.json.encode(Order(think=0.001)).decode() if other else call.data
        return msgspec.structs.replace(_asked(call), data=data)

    def _new(self) -> Asked:
        self._made += 1
        stream = self._draws.stream()
        verb = self._draws.choice(("publish", "publish", "publish", "publish", "send", "timer"))
        if self._made % 5 == 1:
            return Asked("send", stream, f"s{self._made}", _HARMLESS)
        key = f"{verb[0]}{self._made}"
        match verb:
            case "publish":
                data: object = self._draws.order(stream, key)
            case "send":
                data = [self._draws.choice(tuple(BY_NAME)), self._draws.message()]
                if self._draws.chance(0.05) and self._draws.keys:
                    key = self._draws.keys[-1]
                self._draws.keys.append(key)
            case _:
                data = round(20 * self._draws.entropy.fraction(), 3)
                self._draws.timers.append((stream, key))
        return Asked(verb, stream, key, msgspec.json.encode(data).decode())

    async def make(self, process: Process, block: Sequence[Call]) -> None:
        """Make the calls of a block in one transaction, and write how they ended."""
        told = ", ".join(f"{call.verb} {call.stream} {call.key}" for call in block)
        self._note(f"block {block[0].block} via {process.name}: {told}")
        try:
            await (self._joined if block[0].joined else self._alone)(process, block)
        except CommitUnknown as error:
            self._end(block, Answer.INFO, type(error).__name__)
        except (Crash, asyncio.CancelledError) as error:
            self._note(f"block {block[0].block}: no answer, {type(error).__name__}")
        except (KeyConflict, TimerConflict, StreamDeleted) as error:
            self._end(block, Answer.REFUSED, type(error).__name__)
        except Refused as error:
            self._end(block, Answer.REFUSED, f"unexpected {type(error).__name__}: {error}")
        else:
            self._end(block, Answer.OK)

    def _end(self, block: Sequence[Call], answer: Answer, error: str = "") -> None:
        for call in block:
            self._ledger.end(call, answer, error)
        self._note(f"block {block[0].block}: {answer} {error}")

    async def _alone(self, process: Process, block: Sequence[Call]) -> None:
        async with process.post.begin() as tx:
            _record(tx, block)

    async def _joined(self, process: Process, block: Sequence[Call]) -> None:
        process.check_alive()
        with process.database.engine.begin() as conn:
            for call in block:
                conn.execute(_WRITE, {"name": call.key})
            with process.post.join(conn) as tx:
                _record(tx, block)


def _asked(call: Call) -> Asked:
    return Asked(call.verb, call.stream, call.key, call.data)


def _record(tx: Any, block: Sequence[Call]) -> None:
    for call in block:
        match call.verb:
            case "publish":
                tx.publish(call.stream, ORDER, msgspec.json.decode(call.data, type=Order), key=call.key)
            case "send":
                kind, message = msgspec.json.decode(call.data, type=tuple[str, Message])
                to = destination(kind, call.stream)
                tx.send(BY_NAME[kind], message, to=to, key=call.key, ack=message.ack)
            case _:
                tx.set_timer(call.key, after=msgspec.json.decode(call.data), stream=call.stream, data={})
