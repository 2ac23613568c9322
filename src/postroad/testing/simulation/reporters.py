"""Who reports to streams: jobs that say something some times, in other words now and then, whatever they hear."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from random import Random

import msgspec

from postroad.model.clock import Clock
from postroad.model.errors import CommitUnknown, KeyConflict, Refused, SourceRefused, StreamDeleted
from postroad.testing.simulation.errands import CREW
from postroad.testing.simulation.ledger import Answer, Ledger, ReportCall
from postroad.testing.simulation.options import Options
from postroad.testing.simulation.owners import NEVER, others, owner
from postroad.testing.simulation.process import Crash, Process
from postroad.testing.simulation.workload import AUDIT, stream_types

TRIES_MAX = 3
TRIED_WITHIN = 8.0  # seconds
WAITS = (0, 0, 0.1, 1, 4, None)
GIVEN_UP = 0.3  # how often a caller is cancelled while it waits
GIVEN_UP_WITHIN = 2.0
STRICT = 0.2
WITH_A_SOURCE = 0.5
TAKEN = 0.05  # how often a key is chosen that a message has
RECENT = 50


class Reporters:
    """Draws what is reported, and by whom it is said again; the ledger knows what they were answered.

    `latest` names what took a deleted stream's place, `gone` the streams that somebody is known to have deleted.
    """

    def __init__(
        self, rng: Random, ledger: Ledger, clock: Clock, note: Callable[[str], None], *,
        latest: Callable[[str], str], gone: Callable[[], list[str]],
    ) -> None:  # fmt: skip
        self._rng = rng
        self._ledger = ledger
        self._clock = clock
        self._note = note
        self._latest = latest
        self._gone = gone
        self._made = 0

    def plans(self, options: Options) -> Iterator[tuple[float, ReportCall]]:
        """What is reported now that clients have made a block, and after how many seconds."""
        if self._rng.random() >= options.reports:
            return
        self._made += 1
        kinds = [kind for kind in stream_types(options) if kind not in (AUDIT, CREW)] * 3 + [AUDIT] * options.audits
        stream = self._latest(f"{self._rng.choice(kinds)}/{self._rng.randrange(options.streams)}")
        key = f"r{self._made}"
        if self._ledger.calls and self._rng.random() < TAKEN:
            other = self._rng.choice(self._ledger.calls)
            if other.verb == "publish":
                stream, key = other.stream, other.key
        for number in range(1 + self._rng.randrange(TRIES_MAX)):
            yield self._rng.random() * TRIED_WITHIN, self._call(stream, key, number, options)

    def _call(self, stream: str, key: str, number: int, options: Options) -> ReportCall:
        words = f"{key} said {number if self._rng.random() < 0.5 else 0}"
        source, whose, hopeless = self._source(options)
        return ReportCall(
            stream=stream, key=key, data=msgspec.json.encode(words).decode(), source=source, owner=whose,
            hopeless=hopeless, strict=self._rng.random() < STRICT, wait=self._rng.choice(WAITS),
            patience=self._rng.random() * GIVEN_UP_WITHIN if self._rng.random() < GIVEN_UP else None,
        )  # fmt: skip

    def _source(self, options: Options) -> tuple[str | None, str | None, bool]:
        """Where it comes from, whose that is said to be, and whether it must be refused for that."""
        accepted = (call for call in self._ledger.calls[-RECENT:] if call.answer is Answer.OK)
        known = [call.stream for call in accepted if call.verb == "publish"]
        if not known or self._rng.random() >= WITH_A_SOURCE:
            return None, None, False
        stream, gone = self._rng.choice(known), self._gone()
        match self._rng.choice(("there", "there", "owned", "owned", "foreign", "missing", "gone")):
            case "owned":
                return stream, owner(options, stream), False
            case "foreign":
                return stream, self._rng.choice(others(options, stream)), True
            case "missing":
                return NEVER, None, True
            case "gone" if gone:
                return self._rng.choice(gone), None, True
            case _:
                return stream, None, False

    async def make(self, call: ReportCall, process: Process) -> None:
        """Report, wait a little, and write what the caller was told."""
        over = Crash, asyncio.CancelledError, CommitUnknown, TimeoutError, Refused
        with suppress(*over), self.telling(call, process.name):
            await self._tell(call, process)

    @contextmanager
    def telling(self, call: ReportCall, who: str) -> Iterator[None]:
        """Write that a call begins that reports, and how it ended, of which the caller hears as well."""
        self._ledger.begin_report(call, at=self._clock.monotonic())
        self._note(f"report {call.key} to {call.stream} via {who}: {call.data}, waits {call.wait}")
        try:
            yield
        except (Crash, asyncio.CancelledError) as error:
            call.lost = True
            self._note(f"report {call.key}: no answer, {type(error).__name__}")
            raise
        except (CommitUnknown, TimeoutError) as error:
            self._end(call, Answer.INFO, type(error).__name__)
            raise
        except (KeyConflict, SourceRefused, StreamDeleted) as error:
            self._end(call, Answer.REFUSED, type(error).__name__)
            raise
        except Refused as error:
            self._end(call, Answer.REFUSED, f"unexpected {type(error).__name__}: {error}")
            raise
        self._end(call, Answer.OK)

    def _end(self, call: ReportCall, answer: Answer, said: str = "") -> None:
        self._ledger.end(call, answer, said)
        call.until = self._clock.monotonic()
        self._note(f"report {call.key}: {answer} {said} {call.entry or ''}")

    async def _tell(self, call: ReportCall, process: Process) -> None:
        telling = process.post.areport(
            call.stream, msgspec.json.decode(call.data), key=call.key, wait=call.wait, source=call.source,
            owner=call.owner, on_conflict="error" if call.strict else "keep",
        )  # fmt: skip
        entry = await (telling if call.patience is None else asyncio.wait_for(telling, call.patience))
        call.entry = None if entry is None else entry.seq
