"""A small application with everything in it, for what is measured of running processes."""

import time
from multiprocessing.connection import Connection as Pipe

from benchmarks import work
from benchmarks.ours import DECIDED, EVENT, MAIL, carry_out
from postroad import OUTCOME, TIMER_FIRED, Event, Postroad, Turn


def build(url: str, schema: str | None) -> Postroad:
    """An event and a fired timer are recorded, an event also sends twice; outcomes need no decision."""
    post = Postroad(url, schema=schema)
    post.sender(MAIL)(carry_out)
    post.filter(work.TYPE, OUTCOME)(_no_decision)
    post.turn(work.TYPE)(_decide)
    return post


def _no_decision(event: Event) -> str:
    return "an outcome"


async def _decide(turn: Turn) -> None:
    for event in turn.events:
        turn.record(DECIDED, work.decision(event.key))
        if EVENT.of(event) is not None:
            for each in range(work.SENDS_PER_TURN):
                turn.send(MAIL, work.mail(turn.subject), to="driver", key=f"{event.key}/{each}")
        else:
            assert TIMER_FIRED.of(event) is not None


def run(url: str, schema: str | None, pipe: Pipe) -> None:
    """A process that runs all loops, and answers each question with the seconds of CPU that it has used so far."""
    post = build(url, schema)
    try:
        with post.running():
            pipe.send("ready")
            while True:
                pipe.recv()
                pipe.send(time.process_time())
    finally:
        post.close()
