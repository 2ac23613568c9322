"""Two channels for one thing to say: the conversation, and one that is rung when it is busy."""

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from postroad import (
    Dispatch,
    GiveUp,
    InvalidInput,
    KeyConflict,
    Kind,
    OutcomeUnknown,
    Postroad,
    Refused,
    SourceRefused,
    Turn,
)
from postroad.agent.doors import Ring, Told, report_or_ring, ring_then_report
from tests.cases.apps import OpenApp, idle, until

PAGE = Kind("page", dict[str, str])
ASK = Kind("ask", dict[str, int])
ROOM = "room/chief"
CALLERS = 20
BRIEFLY = 0.2

pytestmark = pytest.mark.timeout(120)


class Room:
    """A conversation whose turns take until they are let go, and a second channel that may refuse."""

    def __init__(self, post: Postroad) -> None:
        self.post = post
        self.rings: list[str] = []
        self.refusals: list[Exception] = []
        self.go = threading.Event()
        self.begun = threading.Event()

        @post.turn("room")
        def room(t: Turn) -> None:
            self.begun.set()
            assert self.go.wait(60)
            t.record("answer", {})

        @post.sender(PAGE, on_unknown="park")
        def page(d: Dispatch[dict[str, str]]) -> None:
            if self.refusals:
                raise self.refusals.pop(0)
            self.rings.append(d.body["text"])

        post.elsewhere("other")

    def occupy(self) -> None:
        """Have a turn begin that does not end by itself."""
        with self.post.begin() as tx:
            tx.publish(ROOM, ASK, {"n": 1})
        assert self.begun.wait(60)

    def free(self) -> None:
        """Let the turn end, and all that waits behind it land."""
        self.go.set()
        until(lambda: idle(self.post))

    def told(self, key: str = "coop:1", **how: Any) -> Told:
        """Report, or ring, under one key."""
        return asyncio.run(self._report_or_ring(key, **how))

    def told_at_once(self, number: int) -> list[Told]:
        """The same by several callers at the same time."""

        async def all_of_them() -> list[Told]:
            return await asyncio.gather(*(self._report_or_ring("coop:1") for _ in range(number)))

        return asyncio.run(all_of_them())

    async def _report_or_ring(self, key: str, **how: Any) -> Told:
        ring = Ring(kind=PAGE, body={"text": key})
        return await report_or_ring(self.post, ROOM, {"text": key}, key=key, ring=ring, **{"wait": BRIEFLY, **how})

    def landed(self) -> Counter[str]:
        """How often each report stands in the log."""
        return Counter(entry.key for entry in self.post.read(ROOM) if entry.kind == "postroad.report")


@pytest.fixture
def room(open_app: OpenApp) -> Iterator[Room]:
    """A room whose loops run."""
    made = Room(open_app())
    with made.post.running():
        yield made
        made.go.set()


def test_a_room_that_hears_in_time_rings_nobody(room: Room) -> None:
    """The report has landed: the answer is its entry, and the second channel stays silent."""
    told = room.told(wait=30)
    assert (told.status, told.ring, room.rings) == (200, None, [])
    assert told.entry is not None
    assert told.entry.key == "coop:1"


def test_many_callers_ring_a_busy_rooms_second_channel_once(room: Room) -> None:
    """Twenty at once under one key: one ring, one entry, and each of them knows that somebody has heard."""
    room.occupy()
    assert {told.status for told in room.told_at_once(CALLERS)} == {202}
    assert room.told().status == 202
    assert room.rings == ["coop:1"]
    room.free()
    assert room.landed() == {"coop:1": 1}
    assert (room.told().status, room.rings) == (200, ["coop:1"])


def test_a_client_that_comes_forty_times_during_one_turn(room: Room) -> None:
    """Every 15 s in a turn of ten minutes: one ring, and one entry in the end, each retry being told that it rang."""
    room.occupy()
    assert [room.told(wait=0.01, patience=30).status for _ in range(40)] == [202] * 40
    assert room.rings == ["coop:1"]
    room.free()
    assert room.landed() == {"coop:1": 1}
    assert (room.told().status, room.rings) == (200, ["coop:1"])


def test_a_refused_ring_is_tried_again_by_whoever_asks_next(room: Room) -> None:
    """Refused for good: come again later; then it rings, once."""
    room.occupy()
    room.refusals.append(GiveUp("nobody has this number"))
    refused = room.told()
    assert (refused.status, refused.rang, room.rings) == (503, False, [])
    assert refused.ring is not None
    assert refused.ring.status == "dead_letter"
    assert (room.told().status, room.rings) == (202, ["coop:1"])
    room.free()
    assert room.landed() == {"coop:1": 1}


def test_a_ring_that_may_have_been_heard_is_left_to_a_person(room: Room) -> None:
    """Nobody knows whether it rang: it does not ring again by itself, however often somebody asks."""
    room.occupy()
    room.refusals.append(OutcomeUnknown("the line went dead"))
    assert [room.told().status for _ in range(3)] == [503] * 3
    assert room.rings == []
    row = room.told().ring
    assert row is not None
    room.post.dispatches.resolve(row.id, "sent", actor="ann")
    assert (room.told().status, room.rings) == (202, [])


def test_patience_ends_while_a_ring_is_still_being_tried(room: Room) -> None:
    """A channel that is not reached within the patience is asked for again later; it goes on being tried."""
    room.occupy()
    room.refusals.append(RuntimeError("no line"))  # the next attempt comes in a minute
    told = room.told(patience=BRIEFLY)
    assert told.status == 503
    assert told.ring is not None
    assert told.ring.status == "pending"


def test_a_refused_report_rings_nobody(room: Room) -> None:
    """A source that is not there: nothing is stored, nothing is rung."""
    room.occupy()
    with pytest.raises(SourceRefused):
        room.told(source="room/gone", owner="ann")
    assert room.post.dispatches.list() == []
    assert room.rings == []


def test_what_stops_somebody_rings_before_it_waits(room: Room) -> None:
    """A blocker goes out while the room is busy, whatever becomes of the wait; a retry rings nobody again."""
    room.occupy()

    async def warn() -> Told:
        ring = Ring(kind=PAGE, body={"text": "blocked"})
        return await ring_then_report(room.post, ROOM, {"text": "blocked"}, key="task:7", ring=ring, wait=BRIEFLY)

    assert asyncio.run(warn()).entry is None
    until(lambda: room.rings == ["blocked"], "the ring")
    again = asyncio.run(warn())
    assert (again.status, again.rang, room.rings) == (202, True, ["blocked"])
    room.free()
    landed = asyncio.run(warn())
    assert (landed.status, room.landed(), room.rings) == (200, {"task:7": 1}, ["blocked"])


LONG = "k" * 510
RINGS = {
    "no ring": (None, "ring must be a Ring"),
    "an unknown kind": (Ring(kind="nobody", body={}), "Nobody in this app declares"),
    "no payload": (Ring(kind=PAGE, body={"text": object()}), "object"),
    "no destination": (Ring(kind=PAGE, body={"text": "x"}, to=5), "to must be"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("asked", [report_or_ring, ring_then_report])
@pytest.mark.parametrize("name", RINGS)
def test_a_ring_that_cannot_be_is_refused_before_anything_is_stored(room: Room, name: str, asked: Any) -> None:
    """What is wrong with a ring is known when the door is built, not on the day on which the room is busy."""
    ring, said = RINGS[name]
    with pytest.raises(Refused, match=said):
        asyncio.run(asked(room.post, ROOM, {"text": "x"}, key="k", ring=ring))
    assert room.post.dispatches.list() == []
    assert room.landed() == {}
    assert room.post.streams.events(ROOM) == []


@pytest.mark.parametrize(
    "how",
    [
        *({"key": key} for key in ("", LONG, "postroad.x")),
        {"stream": "no stream"}, {"data": object()}, {"wait": -1}, {"owner": "ann"},
    ],
)  # fmt: skip
@pytest.mark.parametrize("asked", [report_or_ring, ring_then_report])
def test_a_report_that_cannot_be_rings_nobody(room: Room, how: dict[str, Any], asked: Any) -> None:
    """A stream, a key, a payload or a wait that is none is refused in either order before anybody is rung."""
    given = {"stream": ROOM, "data": {"text": "x"}, "key": "k", **how}
    ring = Ring(kind=PAGE, body={"text": "x"})
    with pytest.raises(InvalidInput):
        asyncio.run(asked(room.post, given.pop("stream"), given.pop("data"), ring=ring, **given))
    assert room.post.dispatches.list() == []
    assert room.post.streams.events(ROOM) == []


def test_a_key_that_something_else_was_sent_under_is_no_ring(room: Room) -> None:
    """The caller hears that it was not rung, instead of taking another message for its ring."""
    with room.post.begin() as tx:
        tx.send("other", {}, key="ring:coop:1")
    room.occupy()
    with pytest.raises(KeyConflict, match=r"ring:coop:1 was sent before as other"):
        room.told()
    assert room.rings == []
