"""A room with one chief, whose turns are long; a job that reports to it; a pager for what cannot wait."""

import postroad.bundled_sqlite  # noqa: F401, I001  # first of all: a SQLite that several processes may use

import asyncio
import os
from pathlib import Path

from postroad import Dispatch, Kind, Postroad, Turn

ROOM = "room/chief"
ORDER = Kind("order", dict[str, str])
ANSWER = Kind("answer", dict[str, str])
PAGE = Kind("page", dict[str, str])
TURN_SECONDS = 8.0
RINGS = Path("rings.txt")

post = Postroad(os.environ.get("POSTROAD_DATABASE_URL") or "sqlite:///chief.db", migrate=True)


# A report lands behind this turn, never inside it. A lease of 4 s: so soon does another process take over a dead one's.
@post.turn("room", lease=4)
async def room(turn: Turn) -> None:
    """Do what was ordered, which takes its time."""
    orders = [order for event in turn.events if (order := ORDER.of(event)) is not None]
    await asyncio.sleep(TURN_SECONDS)
    turn.record(ANSWER, {"text": ", ".join(f"{order['text']}: done" for order in orders)})


@post.cron("backup", "*/10 * * * * *", tz="UTC")
def backup(turn: Turn) -> None:
    """Back up, and tell the room. It never waits for the room, so that its next run is on time."""
    at = turn.events[0].data["scheduled_at"]
    turn.post.report(ROOM, {"text": f"backup of {at[11:19]}: ok"}, key=f"backup:{at}")


@post.sender(PAGE)
def page(dispatch: Dispatch[dict[str, str]]) -> None:
    """The second channel: here a file, elsewhere a messenger."""
    with RINGS.open("a") as file:
        file.write(f"{dispatch.body['text']}\n")
