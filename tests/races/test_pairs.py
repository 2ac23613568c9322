"""Each pair of transactions that can meet, interleaved statement by statement on a real Postgres.

The table of transactions, with the rows at which they meet, is `tests.races.works`; two of the same kind meet too. The
first is run up to one of its statements, then the second until it is blocked or done, then the first to its end,
then the second; besides that in orders that are drawn, and with a first one that dies before its COMMIT. Whatever the
order: no deadlock, no invariant of the tables broken, and answers and rows as if one had come after the other.
What leaves to others what they have locked (claims, the pump) comes again before that is looked at, as loops do.

By default long transactions are stopped at some of their statements, drawn by a seed that is printed;
POSTROAD_TEST_RACES=all stops them at all, POSTROAD_TEST_RACES=<seed> at others. It cannot catch what takes three.
"""

import os
import random
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection
from sqlalchemy.engine import make_url

from postroad.model.errors import PostroadError
from postroad.store import migrations
from postroad.store.database import Database
from tests.races.actors import Crash, Race, racing
from tests.races.scene import Scene, broken, build, came_to, drain, exact, look, lost, plain, restore
from tests.races.transactions import NOTHING, Transaction
from tests.races.works import pairs

ASKED = os.environ.get("POSTROAD_TEST_RACES", "1")
SHORT = 7  # a transaction of so many statements is stopped at each of them
DRAWN = 2  # of a longer one at so many, and at its COMMIT
TO_ITS_END = 200
# Stopped at each of them: what was wrong once (a turn and a block locked timers and dispatches in opposite orders), and
# claims, of which two could be answered for one stream. And what locks rows in two places, for acks and withdrawals.
FOUND = (
    {"commit", "begin_small"}, {"commit_lost", "begin_small"}, {"claim_turns"}, {"claim_sends"},
    {"begin_ack", "withdraw_asked"},
)  # fmt: skip
DELETIONS = ("delete_", "commit_deletes")
PAIRS = pairs()
State = dict[str, list[Any]]
Came = tuple[list[Any], State]


@dataclass
class Track:
    """A scene on Postgres, two transactions at a time on it, and what has come of each state they left."""

    database: Database
    conn: Connection
    scene: Scene
    race: Race
    seen: dict[str, tuple[State, list[str]]] = field(default_factory=dict)
    lone: dict[str, tuple[Any, State]] = field(default_factory=dict)

    def play(self, pair: tuple[Transaction, Transaction], order: list[int], *, crash: bool = False) -> tuple[Came, int]:
        """Race a pair over the scene: what it came to, and how many steps of the order there were."""
        with self.conn.begin():
            restore(self.database, self.conn)
        works = [partial(_carry_out, one, self.scene, who) for one, who in zip(pair, _names(pair), strict=True)]
        answers, steps = self.race.run((works[0], works[1]), order, crash=crash)
        for answer in answers:
            refused = isinstance(answer, PostroadError | Crash)
            assert refused or not isinstance(answer, Exception), f"{_told(pair, order)}: {answer!r}"
        with self.conn.begin():
            twice = list(lost(look(self.conn), answers))
        assert not twice, f"{_told(pair, order)}: {twice}"
        for place, (one, work) in enumerate(zip(pair, works, strict=True)):
            if one.skips and not (crash and place == 0):
                answers[place] = None
                with self.conn.begin():
                    work(self.conn)
        state, wrong = self._look()
        assert not wrong, f"{_told(pair, order)}: {wrong}"
        return ([plain(answer) for answer in answers], state), steps

    def alone(self, one: Transaction) -> tuple[Any, State]:
        """What a transaction answers and comes to with nobody beside it."""
        if one.name not in self.lone:
            found, _ = self.play((NOTHING, one), [])
            self.lone[one.name] = found[0][1], found[1]
        return self.lone[one.name]

    def _look(self) -> tuple[State, list[str]]:
        with self.conn.begin() as transaction:
            now = look(self.conn)
            key = exact(now)
            if key not in self.seen:
                wrong = list(broken(now))
                drain(self.conn, now=self.scene.now)
                end = look(self.conn, end=True)
                self.seen[key] = came_to(end), [*wrong, *broken(end)]
            transaction.rollback()
        return self.seen[key]


def _carry_out(one: Transaction, scene: Scene, who: str, conn: Connection) -> Any:
    return one.fn(conn, scene, who)


def _names(pair: tuple[Transaction, Transaction]) -> str:
    """Who is who, whichever of them begins."""
    return "ba" if pair[0].name > pair[1].name else "ab"


def _of(pair: tuple[Transaction, Transaction], found: Came) -> Came:
    """Without the runs, if both leave things to each other: then they may share them in any way.

    And without what a deletion makes of those who could not see it: a turn that begins its stream's log meets a
    conflict before it hears of the deletion, and a timer that was armed meanwhile is dropped later, with an alert.
    """
    answers, state = found
    if all(one.skips for one in pair):
        state = {**state, "runs": []}
    if any(one.name.startswith(DELETIONS) for one in pair):
        answers = ["StreamDeleted" if answer == "ConcurrencyConflict" else answer for answer in answers]
        state = {**state, "alerts": [alert for alert in state["alerts"] if alert[0] != "timer.refused"]}
    return answers, state


def _turned(found: Came) -> Came:
    """The same, with the answers of a pair that began with the other one."""
    return found[0][::-1], found[1]


def _told(pair: tuple[Transaction, Transaction], order: list[int]) -> str:
    return f"{pair[0].name} and {pair[1].name} in the order {''.join(map(str, order))[:60]}"


def _differences(found: Came, expected: list[Came]) -> str:
    """What is otherwise than after each of the serial runs."""
    told = []
    for answers, state in expected:
        parts = {name: (rows, state[name]) for name, rows in found[1].items() if rows != state[name]}
        told.append({**parts, **({} if found[0] == answers else {"answers": (found[0], answers)})})
    return "\n".join(map(repr, told))


@pytest.fixture(scope="module")
def track(postgres_url: str) -> Iterator[Track]:
    """The scene in a schema of its own."""
    schema = f"test_{secrets.token_hex(6)}"
    database = Database(postgres_url, schema=schema)
    migrations.migrate(database)
    scene = build(database)
    with racing(make_url(postgres_url), schema) as race, database.engine.connect() as conn:
        yield Track(database, database.bind(conn), scene, race)
    database.close()
    with psycopg.connect(postgres_url.replace("+psycopg", "", 1), autocommit=True) as conn:
        conn.execute(f'DROP SCHEMA "{schema}" CASCADE')


def statements(pair: tuple[Transaction, Transaction], steps: int, draw: random.Random) -> list[int]:
    """At which of a transaction's statements its pair is tried; the last, its COMMIT, always."""
    if ASKED == "all" or steps <= SHORT or {one.name for one in pair} in FOUND:
        return list(range(1, steps + 1))
    return sorted({steps, *draw.sample(range(1, steps + 1), min(steps, DRAWN))})


@pytest.mark.parametrize("pair", PAIRS, ids=[f"{a.name}-{b.name}" for a, b in PAIRS])
def test_a_pair_in_any_order_is_one_after_the_other(track: Track, pair: tuple[Transaction, Transaction]) -> None:
    """Two transactions that meet come to what one after the other comes to, and neither waits for ever."""
    print(f"POSTROAD_TEST_RACES={ASKED}")
    draw = random.Random(f"{ASKED}/{pair[0].name}/{pair[1].name}")
    one, steps = track.play(pair, [0] * TO_ITS_END)
    other, steps_back = track.play(pair[::-1], [0] * TO_ITS_END)
    expected = [_of(pair, one), _of(pair, _turned(other))]
    for first, second, length in dict.fromkeys(((*pair, steps), (*pair[::-1], steps_back))):
        orders = [[0] * place + [1] * TO_ITS_END for place in statements(pair, length, draw)]
        for order in [*orders, draw.choices((0, 1), k=TO_ITS_END)]:
            found, _ = track.play((first, second), order)
            found = _of(pair, found if first is pair[0] else _turned(found))
            assert found in expected, f"{_told((first, second), order)}: {_differences(found, expected)}"
        found, _ = track.play((first, second), orders[-1], crash=True)
        answers, state = _of(pair, found)
        answer, lone = track.alone(second)
        assert ([answers[1]], state) == _of(pair, ([answer], lone)), f"{first.name} died beside {second.name}"
