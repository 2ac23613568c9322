"""What a page is told, as server-sent events: the log's entries, what the turn says by now, and how things stand."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import anyio
import msgspec
import rows
import tools
from app import MESSAGE, engine, post, stream_of, texts
from sse_starlette import ServerSentEvent

from postroad import Entry, Partial, StreamDeleted, StreamRow

LOOK_SECONDS = 0.25
WORLD_LINES = 20
Pid = Callable[[], int | None]


@dataclass(frozen=True)
class Look:
    """How things stood at one moment; `version`: how many entries the conversation had then."""

    version: int
    state: dict[str, Any]


async def events(conversation: str | None, after: int, pid: Pid, ending: anyio.Event) -> AsyncIterator[ServerSentEvent]:
    """Everything that a page shows, from the entry after `after` on, until `ending`. An entry's seq is its event's id.

    How things stand is told only when all entries up to then are told, and none that came later: so a message is
    never gone from those that wait before it stands in the log, and nobody is said to think who has just answered.
    """
    news: asyncio.Queue[Entry | Partial | Look | Exception | None] = asyncio.Queue(maxsize=100)
    tasks = [asyncio.create_task(look(conversation, pid, news)), asyncio.create_task(end(ending, news))]
    if conversation is not None:
        tasks.append(asyncio.create_task(hear(conversation, after, news)))
    begun, shown = after, dict[str, Any]()
    try:
        while True:
            match await news.get():
                case Entry() as entry:
                    after = entry.seq
                    yield event("entry", await asyncio.to_thread(told, entry), id=after)
                case Partial(text=text):
                    yield event("partial", {"text": text})
                case Look(version) if version < begun:
                    yield event("reset", {})  # the page knows more than the log: this is another database
                    return
                case Look(version, state):
                    if state != shown and version == after:
                        shown = state
                        yield event("state", state)
                case StreamDeleted():
                    yield event("deleted", {})
                    return
                case Exception() as error:
                    raise error
                case None:
                    return
    finally:
        for task in tasks:
            task.cancel()


async def hear(conversation: str, after: int, news: "asyncio.Queue[Any]") -> None:
    """Entries, each once and in order, and words of the turn that runs."""
    try:
        async with aclosing(post.watch(stream_of(conversation), after=after)) as watch:
            async for one in watch:
                await news.put(one)
    except Exception as error:
        await news.put(error)


async def look(conversation: str | None, pid: Pid, news: "asyncio.Queue[Any]") -> None:
    """How things stand, some times a second."""
    try:
        while True:
            await news.put(await asyncio.to_thread(standing, conversation, pid()))
            await asyncio.sleep(LOOK_SECONDS)
    except Exception as error:
        await news.put(error)


async def end(ending: anyio.Event, news: "asyncio.Queue[Any]") -> None:
    """The server ends."""
    await ending.wait()
    await news.put(None)


def standing(conversation: str | None, pid: int | None) -> Look:
    """The list, the worker, what was done in the world, and of one conversation what waits, where, and why."""
    with engine.connect() as conn:
        listed = rows.conversations(conn)
        # Before the stream is looked at: what is not answered then and does not wait by now has landed meanwhile.
        messages = [] if conversation is None else rows.unanswered(conn, conversation)
    stream = None if conversation is None else post.streams.get(stream_of(conversation))
    if stream is not None and stream.deleted_at is not None:
        raise StreamDeleted(stream=stream.stream)
    places = {} if stream is None else {one.key: one.position for one in stream.waiting}
    state = {
        "conversations": listed,
        "worker": pid,
        "world": tools.world()[-WORLD_LINES:],
        "turn": turn_of(stream),
        "attempts": 0 if stream is None else stream.attempts,
        "until": None if stream is None or stream.state != "backing_off" else stream.until,
        "messages": [{**message, "place": places.get(message["id"])} for message in messages],
    }
    return Look(0 if stream is None else stream.version, state)


def turn_of(stream: StreamRow | None) -> str:
    """What the conversation's turn is about: a stream's state, or "lost": nobody hears of its worker any more."""
    if stream is None:
        return "idle"
    return "lost" if stream.silent_since is not None else stream.state


def told(entry: Entry) -> dict[str, Any]:
    """An entry as a page gets it, with the texts of the messages that it is about."""
    match entry.kind:
        case MESSAGE.name:
            ids, at = [entry.key], entry.received_at  # when it was said, not when it was answered
        case "postroad.failed" | "postroad.interrupted":
            ids, at = entry.data["events"], entry.recorded_at
        case _:
            ids, at = [], entry.recorded_at
    return {
        "seq": entry.seq, "kind": entry.kind, "key": entry.key, "at": rows.written(at),
        "data": entry.data, "texts": texts(ids) if ids else {},
    }  # fmt: skip


def event(name: str, data: Any, *, id: int | None = None) -> ServerSentEvent:
    """A server-sent event with JSON."""
    return ServerSentEvent(msgspec.json.encode(data).decode(), event=name, id=None if id is None else str(id))
