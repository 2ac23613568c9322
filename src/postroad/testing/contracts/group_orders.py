"""A group is its members one after the other: for drawn members, the same answers and the same rows.

What the draws leave out is turns that publish to each other's streams: see the last test.
"""

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from postroad.engine.records import BEGIN, Records
from postroad.model.errors import PostroadError
from postroad.model.rows import TimerChange, TurnClaim, TurnCommit
from postroad.store import outbox, turns
from postroad.store.database import Database
from postroad.store.groups import Verb
from postroad.testing.contracts import streams
from postroad.testing.contracts.dispatches import dispatch
from postroad.testing.contracts.groups import (
    GroupContract,
    HeldLane,
    Run,
    answers,
    block,
    comparable,
    emptied,
    sending,
    tables,
    timer,
    written,
)
from postroad.testing.contracts.streams import append_next, decided, delete_stream, entry
from postroad.testing.contracts.streams import event as note

SEEDS = 40
Same = Callable[[Verb[Any, Any], Callable[[], list[Any]]], int]


def some(draw: random.Random, most: int) -> range:
    """None, one or several."""
    return range(draw.randint(0, most))


class EquivalenceContract(GroupContract):
    """A group is its members one after the other, in the order in which they are answered."""

    @pytest.fixture
    def same(self, grouping: Database, lane: HeldLane, run: Run) -> Same:
        """Write what a call makes as a group, then, on emptied tables, one by one; how many were refused."""

        def check(verb: Verb[Any, Any], make: Callable[[], list[Any]]) -> int:
            grouped = written(grouping, lane, verb, make())
            rows = run(tables)
            run(emptied)
            items = make()
            alone = [(place, self.alone(run, verb, items[place])) for place, _ in grouped]
            assert [(place, comparable(one)) for place, one in grouped] == [
                (place, comparable(one)) for place, one in alone
            ]
            assert run(tables) == rows
            run(emptied)
            return sum(isinstance(one, Exception) for _, one in grouped)

        return check

    def alone(self, run: Run, verb: Verb[Any, Any], item: Any) -> Any:
        """The answer to an item that is written by itself."""
        try:
            return run(verb.run, [item])[0]
        except PostroadError as error:
            return error

    @pytest.mark.parametrize("first", range(0, SEEDS, 20))
    def test_blocks(self, same: Same, run: Run, first: int) -> None:
        """Whatever blocks collide in, answers and rows are those of one block after the other."""
        refused = 0
        for seed in range(first, first + 20):
            print(f"seed {seed}")

            def make(seed: int = seed) -> list[Records]:
                draw = random.Random(seed)
                run(delete_stream, "load/3")
                run(BEGIN.run, [block(sends=[sending(900 + n, f"k{n}") for n in range(3)])])
                return [self.drawn_block(draw, place) for place in range(draw.randint(2, 40))]

            refused += same(BEGIN, make)
        assert refused > 20

    def drawn_block(self, draw: random.Random, place: int) -> Records:
        """A block that wants what others want too."""
        keys = [f"k{n}" for n in range(40)]
        return block(
            *(
                note(draw.randrange(8), f"load/{draw.randrange(12)}", draw.choice(["1", "1", "2"]))
                for _ in some(draw, 2)
            ),
            sends=[
                sending(
                    place * 10 + n,
                    draw.choice(["", *keys]),
                    draw.choice(["1", "1", "1", "2"]),
                    keep=draw.random() < 0.2,
                )
                for n in some(draw, 2)
            ],
            withdraw=[draw.choice(keys) for _ in some(draw, 1)],
            timers=[
                timer(draw.choice(["set", "rearm", "cancel"]), f"t{draw.randrange(20)}", draw.choice(["1", "2"]))
                for _ in some(draw, 1)
            ],
        )

    @pytest.mark.parametrize("first", range(0, SEEDS, 20))
    def test_turns(self, same: Same, run: Run, first: int) -> None:
        """Whatever turns collide in, answers and rows are those of one turn after the other."""
        refused = 0
        for seed in range(first, first + 20):
            print(f"seed {seed}")

            def make(seed: int = seed) -> list[TurnCommit]:
                draw = random.Random(seed)
                held = self.turns(run, draw.randint(2, 10))
                run(delete_stream, "chat/3")
                run(outbox.insert, [dispatch(n) for n in range(900, 903)], source="x", actor="x", in_turn=False)
                for claim in held:
                    if draw.random() < 0.1:
                        run(append_next, claim.stream, entry(draw.choice(["e1", "new"])))
                return [self.drawn_turn(draw, claim, place) for place, claim in enumerate(held)]

            refused += same(turns.COMMIT, make)
        assert refused > 10

    def drawn_turn(self, draw: random.Random, held: TurnClaim, place: int) -> TurnCommit:
        """A turn that wants what others want too; to streams that have no turn here (see the test below)."""
        if draw.random() < 0.1:
            held = msgspec.structs.replace(held, token="lost")
        keys = [f"key/{n}" for n in (900, 901, *range(20))]
        events = [
            note(draw.randrange(6), f"chat/{draw.randrange(5)}", draw.choice(["1", "1", "2"])) for _ in some(draw, 2)
        ]
        return decided(
            held,
            "a",
            dispatches=[dispatch(place * 10 + n, key=draw.choice(keys)) for n in some(draw, 2)],
            withdrawals=[draw.choice(keys) for _ in some(draw, 1)],
            timers=[
                TimerChange(verb=draw.choice(["set", "rearm", "cancel"]), stream="chat/1", key=f"t{draw.randrange(9)}")
                for _ in some(draw, 1)
            ],
            publishes=[*events, *([note(9, held.stream)] if draw.random() < 0.3 else [])],
        )

    def test_turns_that_write_to_each_other(self, grouping: Database, lane: HeldLane, run: Run) -> None:
        """Each of them sees what the others publish, as the later one of two does; both streams are ready."""
        one, two = self.turns(run, 2)
        items = [decided(one, publishes=[note(7, two.stream)]), decided(two, publishes=[note(8, one.stream)])]
        found = answers(written(grouping, lane, turns.COMMIT, items))
        assert [each.events_left for each in found] == [True, True]
        assert [(row.stream, row.state) for row in run(streams.queue_rows)] == [
            (one.stream, "ready"), (two.stream, "ready"),
        ]  # fmt: skip
        again = sorted(self.claim(run, "t2"), key=lambda held: held.stream)
        assert [[each.event_id for each in held.events] for held in again] == [["e8"], ["e7"]]
