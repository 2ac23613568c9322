"""Receivers of webhooks on loopback, most of them hostile, and dispatches to send to them."""

import asyncio
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from postroad import Dispatch
from postroad.model.clock import SystemClock, moment

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
OTHER = "whsec_" + "b3RoZXI" * 8

Behaviour = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Receiver:
    """A server, and what came to it."""

    port: int = 0
    connections: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    requests: list[tuple[dict[str, str], bytes]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"


@asynccontextmanager
async def receiving(
    behave: Behaviour, *, host: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None, reads: bool = True
) -> AsyncIterator[Receiver]:
    """A server that reads each request, unless told not to, and then behaves; `ended` is set when a client leaves."""
    receiver = Receiver()
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if reads:
                receiver.requests.append(await read_request(reader))
            await behave(reader, writer)
        except (OSError, asyncio.IncompleteReadError):  # the client has left
            pass
        finally:
            receiver.ended.set()
            writer.transport.abort()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        receiver.connections += 1
        task = asyncio.ensure_future(serve(reader, writer))
        tasks.add(task)

    server = await asyncio.start_server(accept, host, port, ssl=tls)
    receiver.port = server.sockets[0].getsockname()[1]
    try:
        yield receiver
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def receiving_beside(behave: Behaviour) -> Iterator[Receiver]:
    """The same in a thread of its own, for programs that have event loops themselves."""
    begun, receivers, over = threading.Event(), list[Receiver](), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with receiving(behave) as receiver:
            receivers.append(receiver)
            begun.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert begun.wait(60)
        yield receivers[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()


async def read_request(reader: asyncio.StreamReader) -> tuple[dict[str, str], bytes]:
    """Headers, with the request line as `:line`, and body."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {":line": head[0]}
    for line in head[1:-2]:
        name, _, value = line.partition(":")
        assert name.lower() not in headers, f"{name} came twice"
        headers[name.lower()] = value.strip()
    return headers, await reader.readexactly(int(headers["content-length"]))


def says(raw: bytes) -> Behaviour:
    """Writes this and closes."""

    async def behave(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    return behave


def answers(status: int, body: bytes = b"", **headers: str) -> Behaviour:
    """Answers as HTTP/1.1; a name's underscores are hyphens."""
    fields = {"content-length": str(len(body)), **{name.replace("_", "-"): value for name, value in headers.items()}}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return says(f"HTTP/1.1 {status} Text\r\n{head}\r\n".encode("latin-1") + body)


async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    """Takes everything, says nothing and waits until the client leaves."""
    while await reader.read(65_536):
        pass


def repeats(head: bytes, piece: bytes, *, times: int, pause: float = 0) -> Behaviour:
    """Says something, then the same thing again and again; the pauses are those of a slow network."""

    async def behave(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        for _ in range(times):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause)

    return behave


def dispatch(to: str, *, seconds: float = 5, **fields: Any) -> Dispatch[Any]:
    """A dispatch whose attempt begins now and may last so long."""
    now = moment(SystemClock().wall())
    return Dispatch(**{
        "id": "0123456789abcdef0123456789abcdef", "key": "order/1/paid", "kind": "paid", "to": to, "body": {"n": 1},
        "raw": '{"n":1}', "attempt": 1, "created_at": now, "first_attempt_at": now,
        "deadline": now + timedelta(seconds=seconds), "possible_duplicate": False, "post": app(SystemClock()), **fields,
    })  # fmt: skip


def app(clock: Any) -> Any:
    """What a transport sees of the app: its clock."""
    return SimpleNamespace(database=SimpleNamespace(clock=clock))
