"""The app of a run: the simulation's program, whose senders, handlers and sinks report to the director.

postroad run postroad.testing.chaos.program:post
"""

import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from postroad.engine.app import Postroad
from postroad.model.dispatches import Alert, Dispatch
from postroad.testing.chaos import down
from postroad.testing.chaos.reporting import Reporter
from postroad.testing.chaos.sizes import LIFE, OPTIONS
from postroad.testing.simulation.workload import Message, Outside, declare

reporter = Reporter()


@asynccontextmanager
async def reporting(_post: Postroad) -> AsyncIterator[None]:
    """Connect to the director before the loops run."""
    reporter.open()
    yield


def reach(d: Dispatch[Message]) -> None:
    """A message is about to reach its destination: raises if that is down."""
    for outage in down.now():
        if (refusal := outage.refusal(d)) is not None:
            reporter.tell("turned", id=d.id)
            raise refusal


def arrive(d: Dispatch[Message]) -> None:
    """A message has reached its destination."""
    reporter.tell(
        "arrive", at=time.time_ns() // 1000, process=os.environ[LIFE], id=d.id, key=d.key, kind=d.kind, to=d.to,
        attempt=d.attempt, body=msgspec.json.encode(d.body).decode(), possible_duplicate=d.possible_duplicate,
    )  # fmt: skip


def tried(stream: str, turn: str, attempt: int) -> None:
    """A handler was called."""
    reporter.tell("tried", stream=stream, turn=turn, attempt=attempt)


def ring(alert: Alert) -> None:
    """An alert has rung."""
    reporter.tell("ring", code=alert.code, subject=alert.subject)


post = Postroad(lifespan=reporting)
declare(post, OPTIONS, Outside(reach=reach, arrive=arrive, tried=tried, ring=ring, alive=lambda: True), faxes=True)
post.observe(reporter.saw)
