"""Publishers, claimants, turns and adopters of one stream, interleaved statement by statement.

Each transaction runs in a greenlet that gives way before each of its statements and before its COMMIT; a seeded
draw says who goes on. All in one thread: an interleaving that fails can be run again. On SQLite transactions
are serial, so there a step is a whole transaction. It cannot catch what only two processors at once show.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import greenlet
import pytest
from sqlalchemy import Connection
from sqlalchemy import event as hooks
from sqlalchemy.exc import OperationalError

from postroad.model.clock import FakeClock
from postroad.model.rows import TurnClaim
from postroad.store import queues, turns
from postroad.store.database import Database
from postroad.testing.contracts.streams import (
    Uses,
    commit,
    decided,
    event,
    hold,
    logged,
    queue_rows,
    waits,
)

ROUNDS = 1_000
LOCK_TIMEOUT = "55P03"
Work = Callable[..., Any]


class Actor:
    """A program of one or more transactions that can be stopped between its statements."""

    def __init__(self, database: Database, clock: FakeClock, program: Work) -> None:
        self._database = database
        self._clock = clock
        self._greenlet = greenlet.greenlet(lambda: program(self.run))

    def step(self) -> bool:
        """Go on to the next statement; whether the program goes on after that."""
        self._greenlet.switch()
        return not self._greenlet.dead

    def run(self, fn: Work, *args: Any, **kwargs: Any) -> Any:
        """One transaction, from the start again while others hold a lock that it needs."""
        while True:
            try:
                return self._once(fn, args, kwargs)
            except OperationalError as error:
                if getattr(error.orig, "sqlstate", None) != LOCK_TIMEOUT:
                    raise
            self.give_way()

    def give_way(self) -> None:
        """Let others go on."""
        assert self._greenlet.parent is not None
        self._greenlet.parent.switch()

    def _once(self, fn: Work, args: Any, kwargs: Any) -> Any:
        with self._database.engine.connect() as conn, conn.begin():
            return fn(self._database.bind(conn), *args, now=self._clock.wall(), **kwargs)


@pytest.fixture
def quick(database: Database) -> Iterator[Database]:
    """The same tables by connections that wait no longer than 5 ms for a lock."""
    if database.is_sqlite:
        yield database
        return
    url = database.engine.url.update_query_dict({"options": "-c lock_timeout=5"})
    made = Database(url, schema=database.schema, clock=database.clock)
    yield made
    made.close()


@contextmanager
def giving_way(database: Database) -> Iterator[None]:
    """Stop every actor before each statement and before its COMMIT."""
    main = greenlet.getcurrent()

    def give_way(*_context: object) -> None:
        if greenlet.getcurrent() is not main:
            main.switch()

    if database.is_sqlite:
        yield
        return
    for name in ("before_cursor_execute", "commit"):
        hooks.listen(database.engine, name, give_way)
    yield
    for name in ("before_cursor_execute", "commit"):
        hooks.remove(database.engine, name, give_way)


def interleave(draw: random.Random, actors: list[Actor]) -> tuple[int, ...]:
    """Run all of them, in an order that is drawn; the order."""
    trace: list[int] = []
    left = list(range(len(actors)))
    while left:
        place = draw.choice(left)
        trace.append(place)
        if not actors[place].step():
            left.remove(place)
    return tuple(trace)


def ended(draw: random.Random, held: TurnClaim) -> Work:
    """One of the ways in which a claim ends."""
    return draw.choice(
        [
            partial(turns.commit, turns=[decided(held)]),
            partial(queues.back_off, hold=hold(held), delay=0, error=""),
            partial(queues.release, hold=hold(held)),
            partial(queues.split, hold=hold(held), error=""),
        ]
    )


@pytest.mark.timeout(400)
class TestInterleavings(Uses):
    """No event is stranded, doubled or out of order, whoever came between whom."""

    def test_an_event_published_while_a_turn_ends(self, database: Database, quick: Database, clock: FakeClock) -> None:
        """What is published while a turn ends, is adopted and is claimed, is decided once and in order."""
        draw = random.Random(0)
        run = partial(over, database, clock)
        traces = set()
        for number in range(ROUNDS):
            stream = f"load/{number}"
            self.publish(run, event(0, stream), event(1, stream))
            held = self.claim_one(run, f"first{number}", batch=draw.choice([1, 2]))
            programs = [
                partial(call, ended(draw, held)),
                partial(call, partial(self.inbox.publish, events=[event(2, stream)])),
                partial(call, partial(self.queue.adopt, stream_type="load")),
                partial(self.work, f"look{number}"),
            ]
            actors = [Actor(quick, clock, program) for program in programs]
            with giving_way(quick):
                traces.add(interleave(draw, actors))
            self.drain(run, f"drain{number}.")
            assert run(left, stream) == (["e0", "e1", "e2"], [], []), f"round {number}"
        assert len(traces) > (20 if database.is_sqlite else ROUNDS * 0.9)

    def test_a_new_stream_that_several_want(self, database: Database, quick: Database, clock: FakeClock) -> None:
        """Of several workers that see a new stream one gets it; nobody's claim is taken from under them."""
        draw = random.Random(1)
        run = partial(over, database, clock)
        for number in range(ROUNDS // 4):
            stream = f"load/{number}"
            self.publish(run, event(0, stream))
            programs = [
                partial(self.work, f"a{number}"),
                partial(self.work, f"b{number}"),
                partial(call, partial(self.inbox.publish, events=[event(1, stream)])),
            ]
            actors = [Actor(quick, clock, program) for program in programs]
            with giving_way(quick):
                interleave(draw, actors)
            self.drain(run, f"drain{number}.")
            assert run(left, stream) == (["e0", "e1"], [], []), f"round {number}"

    def work(self, token: str, run: Work) -> None:
        """A worker's pass: claim, then commit; a StaleClaim would be somebody's fault."""
        won = self.claim(run, token, limit=2, batch=2)
        commit(run, *(decided(held) for held in won))


def call(fn: Work, run: Work) -> None:
    """A program of one transaction."""
    run(fn)


def left(conn: Connection, stream: str, *, now: int) -> tuple[list[str], list[Any], list[Any]]:
    """What the stream's log, the inboxes and the queues hold."""
    return [name for _, name in logged(conn, stream)], waits(conn), queue_rows(conn)


def over(database: Database, clock: FakeClock, fn: Work, *args: Any, **kwargs: Any) -> Any:
    """Run in a transaction of this thread."""
    with database.engine.begin() as conn:
        return fn(database.bind(conn), *args, now=clock.wall(), **kwargs)
