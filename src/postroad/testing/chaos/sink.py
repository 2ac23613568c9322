"""The world outside, in the director's process: what arrived, what clients know, and the history of it all.

Every process writes lines of JSON to one socket. They are taken in one by one, so that their order is the one order
of the run, and are kept as JSON lines, for whoever has to find out what happened.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from postroad.testing.chaos.wishes import Wish
from postroad.testing.simulation.ledger import Answer, Call, Ledger
from postroad.testing.simulation.sink import Arrival


class Rung(msgspec.Struct, frozen=True):
    """An alert as its sink heard it."""

    code: str
    subject: str


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What a process said of one of its sends: it began attempt `attempt` at `at`, or it was settled with `reason`."""

    life: str
    id: str
    at: int = 0
    attempt: int = 0
    reason: str = ""


class Sink:
    """Listens on `socket`; all that came is in its attributes."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "sink"
        self.ledger = Ledger()
        self.arrivals: list[Arrival] = []
        self.rung: list[Rung] = []
        self.tried: list[tuple[str, str, int]] = []
        self.told: list[Told] = []
        self.withdrawn: set[str] = set()
        self.turned_away: list[str] = []
        self.trouble: list[str] = []
        self.met: set[str] = set()
        self._open: dict[int, Call] = {}
        self._file = (folder / "history.jsonl").open("w")
        self._written = 0
        self._links: dict[asyncio.StreamWriter, str] = {}
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_unix_server(self._serve, self.socket)

    async def close(self) -> None:
        """Stop listening; whoever still writes ends itself."""
        if self._server is not None:
            self._server.close()
        for link in list(self._links):
            link.close()
        self._file.close()

    def hears(self, life: str = "") -> bool:
        """Whether there may be more to come from a life that has ended, or from any."""
        return life in self._links.values() if life else bool(self._links)

    def open_wishes(self) -> list[Wish]:
        """What was asked for and never answered, to be asked for again."""
        last: dict[tuple[str, str], Call] = {(call.verb, call.key): call for call in self.ledger.calls}
        answered = {(c.verb, c.key) for c in self.ledger.calls if c.answer is not Answer.INFO}
        return [_wish(call) for place, call in last.items() if place not in answered]

    def write(self, kind: str, what: str, life: str, /, **values: object) -> None:
        """Write a line of the history."""
        self._written += 1
        line = {"i": self._written, "t": time.time_ns(), "proc": life, "type": kind, "f": what, "value": values}
        self._file.write(msgspec.json.encode(line).decode() + "\n")
        self._file.flush()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._links[writer] = ""
        try:
            while (line := await reader.readline()).endswith(b"\n"):  # a last line may have been cut short
                said = msgspec.json.decode(line)
                self._links[writer] = said["life"]
                if (answer := self._take(said)) is not None:
                    writer.write(msgspec.json.encode(answer) + b"\n")
        except (ConnectionError, asyncio.CancelledError):
            pass  # its process was killed, or the run was interrupted
        finally:
            writer.close()
            del self._links[writer]

    def _take(self, line: dict[str, Any]) -> object:
        what, life = str(line.pop("what")), str(line.pop("life"))
        kinds = {"invoke": "invoke", "answer": str(line.get("answer")), "arrive": "sink", "turned": "sink"}
        kind = kinds.get(what, "note")
        self.write("fail" if kind == Answer.REFUSED else kind, what, life, **line)
        return _TAKERS[what](self, life, line)

    def _hello(self, life: str, _: Mapping[str, Any]) -> None:
        self.met.add(life)

    def _wishes(self, _life: str, _line: Mapping[str, Any]) -> list[Wish]:
        return self.open_wishes()

    def _arrive(self, _: str, line: Mapping[str, Any]) -> None:
        self.arrivals.append(msgspec.convert(line, Arrival))

    def _turned(self, _: str, line: Mapping[str, Any]) -> None:
        self.turned_away.append(line["id"])

    def _tried(self, _: str, line: Mapping[str, Any]) -> None:
        self.tried.append((line["stream"], line["turn"], line["attempt"]))

    def _ring(self, _: str, line: Mapping[str, Any]) -> None:
        self.rung.append(msgspec.convert(line, Rung))

    def _sending(self, life: str, line: Mapping[str, Any]) -> None:
        self.told.append(Told(life=life, id=line["id"], at=line["at"], attempt=line["attempt"]))

    def _settled(self, life: str, line: Mapping[str, Any]) -> None:
        if not line["stale"]:
            self.told.append(Told(life=life, id=line["id"], reason=line["reason"]))

    def _failed(self, life: str, line: Mapping[str, Any]) -> None:
        if not line["explained"]:
            self.trouble.append(f"{life}: {line['error']}")

    def _invoke(self, _: str, line: dict[str, Any]) -> int:
        call = self.ledger.begin(**line)
        self._open[call.begun] = call
        return call.begun

    def _answer(self, _: str, line: Mapping[str, Any]) -> None:
        call = self._open.pop(line["call"])
        self.ledger.end(call, Answer(line["answer"]), line["error"])

    def _withdraw(self, _: str, line: Mapping[str, Any]) -> None:
        self.withdrawn.add(line["key"])


def _wish(call: Call) -> Wish:
    return Wish(verb=call.verb, stream=call.stream, key=call.key, data=call.data, joined=call.joined)


_TAKERS: Mapping[str, Callable[[Sink, str, dict[str, Any]], object]] = {
    "hello": Sink._hello,
    "wishes": Sink._wishes,
    "arrive": Sink._arrive,
    "turned": Sink._turned,
    "tried": Sink._tried,
    "ring": Sink._ring,
    "dispatch.sending": Sink._sending,
    "dispatch.settled": Sink._settled,
    "loop.error": Sink._failed,
    "turn.error": Sink._failed,
    "invoke": Sink._invoke,
    "answer": Sink._answer,
    "withdrawn": Sink._withdraw,
}
