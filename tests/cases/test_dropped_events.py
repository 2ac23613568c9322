"""Events that end because somebody said so are told apart from those that no turn could process."""

from postroad import GiveUp, Kind, Postroad, Turn
from postroad.store import status, stream_views
from tests.engine.conftest import Open

NOTE = Kind("note", dict[str, int])


def test_only_what_no_turn_could_process_counts_as_dead(harness: Open) -> None:
    """What a stop has withdrawn and what a deleted stream has dropped is no trouble; a poisoned event is."""
    post = Postroad()

    @post.turn("chat")
    def chat(t: Turn) -> None:
        if t.subject == "poisoned":
            raise GiveUp("no")

    h = harness(post)
    streams = ("chat/stopped", "chat/deleted", "chat/poisoned")
    for stream in streams:
        with post.begin() as tx:
            tx.publish(stream, NOTE, {"n": 1}, key="k")
    with post.begin() as tx:
        tx.stop_stream("chat/stopped")
        tx.delete_stream("chat/deleted")
    h.drain()
    dead = {stream: post.database.read(stream_views.dead, stream, limit=9) for stream in streams}
    assert {stream: [event.reason for event in events] for stream, events in dead.items()} == {
        "chat/stopped": ["turn.withdrawn"], "chat/deleted": ["stream_deleted"],
        "chat/poisoned": ["turn.dead.permanent"],
    }  # fmt: skip
    found = post.database.read(status.snapshot, now=h.clock.wall())
    assert (found.events_dead.count, found.events_waiting.count) == (1, 0)
