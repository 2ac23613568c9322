"""What a transport promises: what arrives is the dispatch, what did not arrive is an error, and its end is in time.

Subclass `TransportContract` in a test of yours with a fixture `stand`. It cannot know whether your destination keeps
what it has taken, nor whether it knows a key again.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

import pytest

from postroad.engine.declarations import Transport
from postroad.model.clock import SystemClock
from postroad.model.dispatches import Dispatch, Receipt

SLOW_SECONDS = 0.5
GRACE_SECONDS = 1.0
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


class Stand(Protocol):
    """A transport with a destination of its own."""

    transport: Transport
    to: str

    def arrived(self) -> Sequence[bytes]:
        """What has arrived, each as its envelope's JSON."""

    def refuse(self) -> None:
        """From now on the destination refuses what comes."""

    def hang(self) -> None:
        """From now on the destination never answers."""


@dataclass(frozen=True)
class _Database:
    clock: SystemClock


@dataclass(frozen=True)
class _App:
    """As much of an app as a transport may ask for: the clock that deadlines were taken from."""

    database: _Database


def dispatch(to: str, *, number: int = 0, **changes: Any) -> Dispatch[Any]:
    """A dispatch as a dispatcher hands it over, with half a minute left."""
    raw = json.dumps({"n": number, "text": "ü – \n"}, ensure_ascii=False)
    given: dict[str, Any] = {
        "id": f"{number:032x}",
        "key": f"key/{number}",
        "kind": "note",
        "to": to,
        "body": json.loads(raw),
        "raw": raw,
        "attempt": 1,
        "created_at": NOW,
        "first_attempt_at": NOW,
        "deadline": datetime.now(UTC) + timedelta(seconds=30),
        "possible_duplicate": False,
        "post": _App(_Database(SystemClock())),
        **changes,
    }
    return Dispatch(**given)


class TransportContract:
    """What every transport does, wherever it goes."""

    def test_what_arrives_is_the_dispatch(self, stand: Stand) -> None:
        """The destination gets the whole envelope, and success is a receipt, a text or nothing."""
        said = asyncio.run(_sent(stand, dispatch(stand.to)))
        assert said is None or isinstance(said, str | Receipt)
        (arrived,) = map(json.loads, stand.arrived())
        assert arrived["schema_version"] == 2
        assert (arrived["dispatch_id"], arrived["key"], arrived["to"]) == ("0" * 32, "key/0", stand.to)
        assert arrived["body"] == {"n": 0, "text": "ü – \n"}

    def test_every_attempt_has_the_same_body_and_a_true_number(self, stand: Stand) -> None:
        """The body's bytes stay, the attempt's number is the attempt's."""
        for attempt in (1, 2):
            again = dispatch(stand.to, attempt=attempt, possible_duplicate=attempt > 1)
            asyncio.run(_sent(stand, again))
        first, second = stand.arrived()
        raw = dispatch(stand.to).raw.encode()
        assert raw in first
        assert raw in second
        assert [json.loads(each)["attempt"] for each in (first, second)] == [1, 2]
        assert [json.loads(each)["possible_duplicate"] for each in (first, second)] == [False, True]

    def test_a_refusal_is_an_error(self, stand: Stand) -> None:
        """What the destination refuses is no success, and says something."""
        stand.refuse()
        with pytest.raises(Exception) as caught:  # whatever it is, it is told as a failed attempt
            asyncio.run(_sent(stand, dispatch(stand.to)))
        assert str(caught.value).strip()

    def test_it_ends_when_it_is_told_to(self, stand: Stand) -> None:
        """A send whose time is over ends within a second of its cancellation."""
        stand.hang()

        async def timed() -> float:
            loop = asyncio.get_running_loop()
            sending = asyncio.ensure_future(_sent(stand, dispatch(stand.to)))
            await asyncio.wait({sending}, timeout=SLOW_SECONDS)
            assert not sending.done()
            sending.cancel()
            begun = loop.time()
            await asyncio.wait({sending}, timeout=30)
            assert sending.done()
            return loop.time() - begun

        assert asyncio.run(timed()) < GRACE_SECONDS

    def test_several_at_once(self, stand: Stand) -> None:
        """Sends don't mix, and don't wait for each other's end to begin."""

        async def all_sent() -> None:
            await asyncio.gather(*(_sent(stand, dispatch(stand.to, number=n)) for n in range(5)))

        asyncio.run(all_sent())
        found = [json.loads(each) for each in stand.arrived()]
        assert sorted(each["body"]["n"] for each in found) == list(range(5))
        assert all(each["key"] == f"key/{each['body']['n']}" for each in found)

    def test_one_event_loop_after_the_other(self, stand: Stand) -> None:
        """A transport that has served one loop serves the next."""
        for number in range(2):
            asyncio.run(_sent(stand, dispatch(stand.to, number=number)))
        assert len(stand.arrived()) == 2


async def _sent(stand: Stand, dispatch: Dispatch[Any]) -> Any:
    send: Callable[[Dispatch[Any]], Any] = stand.transport.send
    return await send(dispatch)
