"""A chat: each conversation is a stream, each message an event of it, and a turn answers."""

import postroad.bundled_sqlite  # noqa: F401, I001  # first of all: a SQLite that several processes may use

import asyncio
import os
from dataclasses import dataclass
from functools import partial

import model
import rows
import tools
from sqlalchemy import create_engine

from postroad import Kind, Postroad, Turn


@dataclass(frozen=True)
class Reply:
    text: str


MESSAGE = Kind("message", dict[str, str])  # its id, which is its key too; the text stands in the app's own table
REPLY = Kind("reply", Reply)

url = os.environ.get("POSTROAD_DATABASE_URL") or os.environ.get("DATABASE_URL") or "sqlite:///chat.db"
url = url.replace("postgres://", "postgresql://", 1)  # SQLAlchemy knows the longer name only
post = Postroad(url, migrate=True)
post.include(tools.tools)
engine = create_engine(url)  # for reading; what this app writes, it writes in Postroad's transactions
answer = model.chosen()


def stream_of(conversation: str) -> str:
    """The stream of a conversation."""
    return f"chat/{conversation}"


# The lease says how long nobody else answers after this process was killed; the default, 30 s, is long to look at.
@post.turn("chat", debounce=0.3, attempts=3, lease=4, when_interrupted="show")
async def chat(turn: Turn) -> None:
    """Answer what was said since the last turn, in one reply."""
    ids = [event.key for event in turn.events if MESSAGE.of(event) is not None]
    asked = await asyncio.to_thread(texts, ids)
    turn.record(REPLY, Reply(await answer(turn, [asked[id] for id in ids if id in asked])))
    # In the commit of the reply: the list's order, the unread count, and that these messages are answered.
    turn.write(partial(rows.answered, conversation=turn.subject, ids=ids, now=rows.written(turn.now)))


def texts(ids: list[str]) -> dict[str, str]:
    """What messages say, by their ids."""
    with engine.connect() as conn:
        return rows.texts(conn, ids)
