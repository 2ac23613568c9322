"""Clients: they publish, send and arm timers through whatever process lives, and repeat what got no answer."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from sqlalchemy import text

from postroad.model.entropy import SeededEntropy
from postroad.model.errors import CommitUnknown, KeyConflict, Refused, TimerConflict
from postroad.testing.simulation.draws import Draws
from postroad.testing.simulation.ledger import Answer, Call, Ledger
from postroad.testing.simulation.options import Options
from postroad.testing.simulation.process import Crash, Process
from postroad.testing.simulation.workload import BY_NAME, ORDER, SMS, Message, Order

_WRITE = text("INSERT INTO sim_written (name) VALUES (:name) ON CONFLICT DO NOTHING")
# So that every seed sends something.
_HARMLESS = msgspec.json.encode([SMS.name, Message()]).decode()


class Clients:
    """Draws calls and makes them; each call is one task inside the process through which it goes."""

    def __init__(self, options: Options, ledger: Ledger, note: Callable[[str], None]) -> None:
        self._draws = Draws(options, SeededEntropy(options.seed * 7 + 1))
        self._ledger = ledger
        self._note = note
        self._made = 0
        self._repeats = options.repeats

    async def call(self, process: Process) -> None:
        """Make one call, a new one or one that was made before."""
        earlier = self._earlier()
        call = self._new() if earlier is None else self._again(earlier)
        await self._make(process, call)

    def _earlier(self) -> Call | None:
        """An unanswered call is usually repeated, an answered one sometimes."""
        open_ = [call for call in self._ledger.calls[-20:] if call.ended is None or call.answer is Answer.INFO]
        if open_ and self._draws.chance(0.3):
            return open_[0]
        if self._ledger.calls and self._draws.chance(self._repeats):
            return self._ledger.calls[-1 - int(self._draws.entropy.fraction() * min(10, len(self._ledger.calls)))]
        return None

    def _again(self, call: Call) -> Call:
        data = call.data
        if call.verb == "publish" and self._draws.chance(0.1):
            data = msgspec.json.encode(Order(think=0.001)).decode()
        return self._begin(call.verb, call.stream, call.key, data, joined=call.joined and data == call.data)

    def _new(self) -> Call:
        self._made += 1
        stream = self._draws.stream()
        verb = self._draws.choice(("publish", "publish", "publish", "publish", "send", "timer"))
        if self._made % 5 == 1:
            return self._begin("send", stream, f"s{self._made}", _HARMLESS, joined=False)
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
        joined = verb != "timer" and self._draws.chance(0.2)
        return self._begin(verb, stream, key, msgspec.json.encode(data).decode(), joined=joined)

    def _begin(self, verb: str, stream: str, key: str, data: str, *, joined: bool) -> Call:
        return self._ledger.begin(verb=verb, stream=stream, key=key, data=data, joined=joined)

    async def _make(self, process: Process, call: Call) -> None:
        self._note(f"call {call.begun} {call.verb} {call.stream} {call.key} via {process.name}")
        try:
            await (self._joined if call.joined else self._alone)(process, call)
        except (Crash, asyncio.CancelledError, CommitUnknown) as error:
            self._note(f"call {call.begun} {call.key}: no answer, {type(error).__name__}")
            if isinstance(error, CommitUnknown):
                self._ledger.end(call, Answer.INFO, type(error).__name__)
        except (KeyConflict, TimerConflict) as error:
            self._end(call, Answer.REFUSED, type(error).__name__)
        except Refused as error:
            self._end(call, Answer.REFUSED, f"unexpected {type(error).__name__}: {error}")
        else:
            self._end(call, Answer.OK)

    def _end(self, call: Call, answer: Answer, error: str = "") -> None:
        self._ledger.end(call, answer, error)
        self._note(f"call {call.begun} {call.key}: {answer} {error}")

    async def _alone(self, process: Process, call: Call) -> None:
        async with process.post.begin() as tx:
            _record(tx, call)

    async def _joined(self, process: Process, call: Call) -> None:
        process.check_alive()
        with process.database.engine.begin() as conn:
            conn.execute(_WRITE, {"name": call.key})
            with process.post.join(conn) as tx:
                _record(tx, call)


def _record(tx: Any, call: Call) -> None:
    match call.verb:
        case "publish":
            tx.publish(call.stream, ORDER, msgspec.json.decode(call.data, type=Order), key=call.key)
        case "send":
            kind, message = msgspec.json.decode(call.data, type=tuple[str, Message])
            tx.send(BY_NAME[kind], message, to=call.stream, key=call.key)
        case _:
            tx.set_timer(call.key, after=msgspec.json.decode(call.data), stream=call.stream, data={})
