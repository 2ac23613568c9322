"""The window of the log that a turn sees."""

from collections.abc import Callable
from typing import Any

import pytest

from postroad import Event, GiveUp, Kind, Postroad, RetryLater, Turn
from postroad.engine.turn import LOG_WINDOW_MAX
from postroad.model.events import Entry
from postroad.store import log, windows
from postroad.testing import Harness
from tests.engine.conftest import Open

NOTE = Kind("note", str)
NOISE = Kind("noise", str)
DECIDED = Kind("decided", str)
STREAM = "chat/1"
Decide = Callable[[Turn], None]


def app(decide: Decide | None = None) -> Postroad:
    """Notes are decided on, noise is answered by a filter: an entry of its own and a noop for each."""
    post = Postroad()

    @post.filter("chat", NOISE)
    def noise(event: Event) -> str:
        return "noise"

    @post.turn("chat", attempts=2)
    def chat(turn: Turn) -> None:
        if decide is not None:
            decide(turn)
        turn.record(DECIDED, turn.events[-1].key)

    return post


def publish(h: Harness, kind: Kind[str], *keys: str) -> None:
    with h.post.begin() as tx:
        for key in keys:
            tx.publish(STREAM, kind, key, key=key)
    h.drain()


def many(name: str, number: int) -> list[str]:
    return [f"{name}{n}" for n in range(number)]


def seen(h: Harness, last: int, most: int = LOG_WINDOW_MAX) -> list[Entry]:
    """What a turn would see that is claimed now."""

    def look(conn: Any) -> list[Entry]:
        return windows.window(conn, STREAM, version=log.version(conn, STREAM), last=last, most=most)

    return h.post.database.read(look)


def keys(entries: list[Entry]) -> list[str]:
    return [entry.key for entry in entries if not entry.key.startswith("postroad.")]


@pytest.mark.parametrize("last", [0, 1, 5])
def test_what_came_since_the_previous_turn_is_in_the_window(harness: Open, last: int) -> None:
    """However much has been answered without a turn since the last one: a shorter window holds all of it."""
    h = harness(app())
    publish(h, NOTE, "a")
    noise = many("n", 20)
    publish(h, NOISE, *noise)

    assert keys(seen(h, last)) == noise
    assert len(seen(h, last)) == 2 * len(noise)


def test_a_window_is_as_long_as_was_asked_for(harness: Open) -> None:
    """Where less has come since the previous turn, the window is the last entries, of earlier turns too."""
    h = harness(app())
    for key in many("a", 5):
        publish(h, NOTE, key)

    assert [entry.seq for entry in seen(h, 4)] == [7, 8, 9, 10]
    assert seen(h, 0) == []
    assert len(seen(h, 100)) == 10


def test_what_ended_without_a_decision_hides_nothing(harness: Open) -> None:
    """A turn that failed for good has seen nothing for those that follow: the window reaches behind it."""

    def fails(turn: Turn) -> None:
        if turn.events[-1].key == "bad":
            raise GiveUp("cannot be read")

    h = harness(app(fails))
    publish(h, NOTE, "a")
    publish(h, NOISE, "before")
    publish(h, NOTE, "bad")
    publish(h, NOISE, "after")

    assert keys(seen(h, 1)) == ["before", "after"]


def test_the_window_has_a_bound(harness: Open) -> None:
    """More than the most it may hold is not read, whatever came since: the newest of it stay."""
    h = harness(app())
    publish(h, NOTE, "a")
    publish(h, NOISE, *many("n", 20))

    assert [entry.seq for entry in seen(h, 1, most=10)] == list(range(33, 43))


def test_an_event_of_a_decided_set_ends_the_window(harness: Open) -> None:
    """A turn that recorded nothing has decided all the same: what it consumed was seen."""
    post = Postroad()

    @post.turn("chat")
    def chat(turn: Turn) -> None: ...

    h = harness(post)
    publish(h, NOTE, "a", "b")
    assert seen(h, 0) == []


def test_a_stream_without_any_turn_shows_all(harness: Open) -> None:
    """Before the first turn everything that has been answered is in the window."""
    h = harness(app())
    noise = many("n", 8)
    publish(h, NOISE, *noise)

    assert keys(seen(h, 1)) == noise


def test_pages_of_a_log_are_ranges(harness: Open) -> None:
    """A page ends at its limit, the last page at the log's end, and one behind that is empty."""
    h = harness(app())
    for key in many("a", 3):
        publish(h, NOTE, key)

    def pages(conn: Any) -> list[list[int]]:
        return [[e.seq for e in log.read(conn, STREAM, after=after, limit=4)] for after in (0, 4, 6, 9)]

    assert h.post.database.read(pages) == [[1, 2, 3, 4], [5, 6], [], []]


def test_a_turn_sees_what_came_since_the_previous_one(harness: Open) -> None:
    """`turn.log` leaves nothing out that came since, on a retry too, and holds nothing younger than the claim."""
    found: list[list[str]] = []
    failures = iter([RetryLater("later", after=1)])

    def decide(turn: Turn) -> None:
        found.append(keys(list(turn.log(last=2))))
        if turn.events[-1].key == "b":
            for failure in failures:
                raise failure

    h = harness(app(decide))
    publish(h, NOTE, "a")
    noise = many("n", 20)
    publish(h, NOISE, *noise)
    publish(h, NOTE, "b")
    h.advance(60)

    assert found == [[], noise, noise]
