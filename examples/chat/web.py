"""The web server: the page, the API, the event stream, and the worker's supervisor. `python web.py [PORT]`."""

import app  # noqa: I001  # before all others: it settles which SQLite this process uses

import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import anyio
import feed
import msgspec
import rows
import uvicorn
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from worker import Worker

from postroad import StreamDeleted

HERE = Path(__file__).parent
ID = r"^[a-z0-9-]{1,64}$"
BODY_BYTES_MAX = 64 * 1024
TEXT_CHARS_MAX = 4_000
PING_SECONDS = 2
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'"
)
FILES = {"/": "index.html", "/page.js": "page.js", "/page.css": "page.css"}
worker = Worker()


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """All that a page may say; whatever else a message has (who waits, what was tried) is the server's business."""

    id: Annotated[str, msgspec.Meta(pattern=ID)]
    text: Annotated[str, msgspec.Meta(min_length=1, max_length=TEXT_CHARS_MAX)]


class Refusal(Exception):
    """This request is refused, with a status and a sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence


async def say(request: Request) -> Response:
    """Accept a message: its row, its conversation's row and its event are one transaction, or there is none of them."""
    conversation, message = conversation_of(request), await message_of(request)
    now = rows.written(datetime.now(UTC))
    try:
        async with app.post.begin() as tx:
            tx.write(partial(rows.accept, conversation=conversation, id=message.id, said=message.text, now=now))
            event = tx.publish(app.stream_of(conversation), app.MESSAGE, {"id": message.id}, key=message.id)
    except rows.OtherMessage:
        raise Refusal(409, "This id belongs to another message.") from None
    return JSONResponse({"id": message.id, "new": event.created}, 201 if event.created else 200)


async def stop(request: Request) -> Response:
    """Withdraw what waits and end the turn that runs."""
    conversation = conversation_of(request)
    async with app.post.begin() as tx:
        tx.stop_stream(app.stream_of(conversation))
        tx.write(partial(rows.stopped, conversation=conversation))
    return Response(status_code=204)


async def delete(request: Request) -> Response:
    """Delete a conversation for good, its own rows and its stream, whatever a turn is doing with it."""
    conversation = conversation_of(request)
    async with app.post.begin() as tx:
        tx.delete_stream(app.stream_of(conversation))
        tx.write(partial(rows.delete, conversation=conversation))
    return Response(status_code=204)


async def seen(request: Request) -> Response:
    """Everything in this conversation was read."""
    async with app.post.begin() as tx:
        tx.write(partial(rows.seen, conversation=conversation_of(request)))
    return Response(status_code=204)


async def kill(request: Request) -> Response:
    """Kill the worker as a crash would; its supervisor begins another one."""
    worker.kill()
    return Response(status_code=204)


async def events(request: Request) -> Response:
    """What a page is told. A page that comes again says what it has seen last, and misses and repeats nothing."""
    last = request.headers.get("last-event-id") or request.query_params.get("after") or "0"
    if not re.fullmatch(r"\d{1,15}", last):
        raise Refusal(422, "after must be the seq of an entry.")
    conversation = conversation_of(request) if "conversation" in request.query_params else None
    ending = anyio.Event()  # set when the server is to end, which waits for those who listen
    told = feed.events(conversation, int(last), lambda: worker.pid, ending)
    ping = ServerSentEvent("{}", event="ping")  # not a comment: the page must hear that we are there
    return EventSourceResponse(
        told, ping=PING_SECONDS, ping_message_factory=lambda: ping, shutdown_event=ending, shutdown_grace_period=1
    )


async def file(request: Request) -> Response:
    """The page and what belongs to it."""
    headers = {"content-security-policy": POLICY, "cache-control": "no-cache", "x-content-type-options": "nosniff"}
    return FileResponse(HERE / FILES[request.url.path], headers=headers)


def conversation_of(request: Request) -> str:
    """The conversation that a request is about."""
    name: str = request.path_params.get("conversation") or request.query_params["conversation"]
    if not re.match(ID, name):
        raise Refusal(422, "A conversation's id has 1 to 64 of a-z, 0-9 and -.")
    return name


async def message_of(request: Request) -> Message:
    """The message in a request's body."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > BODY_BYTES_MAX:
            raise Refusal(413, f"A message has at most {BODY_BYTES_MAX} bytes.")
    try:
        message = msgspec.json.decode(body, type=Message)
    except ValueError as error:  # msgspec's say what is wrong, and where
        raise Refusal(422, f"A message is {{id, text}}. {error}.") from None
    if not message.text.strip() or "\0" in message.text:
        raise Refusal(422, "A message needs a text, without NUL.")
    return message


async def refused(request: Request, error: Exception) -> Response:
    """A refusal as the page can show it."""
    match error:
        case Refusal(status=status, sentence=sentence):
            return JSONResponse({"error": sentence}, status)
        case StreamDeleted():
            return JSONResponse({"error": "This conversation was deleted."}, 410)
        case _:
            raise error


class OwnPagesOnly:
    """Refuses what another site's page sends: any page in the browser can reach this server."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        origin = headers.get("origin")
        answer: ASGIApp = self.app
        if origin is not None and urlsplit(origin).netloc != headers.get("host"):
            answer = JSONResponse({"error": "Only this server's own page may do that."}, 403)
        await answer(scope, receive, send)


@asynccontextmanager
async def lifespan(web: Starlette) -> AsyncIterator[None]:
    """The app's own tables, then the worker, as long as the server runs."""
    async with app.post.begin() as tx:
        tx.write(rows.create)
    async with worker.running():
        yield
    app.post.close()
    app.engine.dispose()


web = Starlette(
    routes=[
        *(Route(path, file) for path in FILES),
        Route("/events", events),
        Route("/conversations/{conversation}/messages", say, methods=["POST"]),
        Route("/conversations/{conversation}/stop", stop, methods=["POST"]),
        Route("/conversations/{conversation}/seen", seen, methods=["POST"]),
        Route("/conversations/{conversation}", delete, methods=["DELETE"]),
        Route("/worker/kill", kill, methods=["POST"]),
    ],
    middleware=[
        Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"]),
        Middleware(OwnPagesOnly),
    ],
    exception_handlers={Refusal: refused, StreamDeleted: refused},
    lifespan=lifespan,
)


def main() -> None:
    """Serve on loopback, at the port given or a free one."""
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))  # a terminal that is closed, too
    try:
        listening = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        sys.exit(f"Port {port} cannot be had: {os.strerror(error.errno or 0)}. Without one a free one is taken.")
    with listening:
        print(f"The chat is at http://127.0.0.1:{listening.getsockname()[1]}/ (Ctrl-C ends it),", flush=True)
        print(f"its database is {app.engine.url.render_as_string()}", flush=True)
        config = uvicorn.Config(web, log_level="warning", timeout_graceful_shutdown=3)
        uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main()
