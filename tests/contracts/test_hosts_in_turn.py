"""Where hosts are looked at one by one, what goes to none of them is one of those that take turns."""

from postroad.model.rows import HostRoom
from postroad.testing.contracts.dispatches import Run, claim, enqueue
from postroad.testing.contracts.gates import keys, to


def test_with_room_for_one_the_oldest_goes_first(run: Run) -> None:
    """A dispatch to a host doesn't wait for ever behind younger ones that go to none."""
    enqueue(run, to(1, None), to(2, "a.example"), to(3, None), to(4, None))
    went = [keys(claim(run, limit=1, room=HostRoom(9), token=f"t{number}")) for number in range(4)]
    assert went == [["key/1"], ["key/2"], ["key/3"], ["key/4"]]
