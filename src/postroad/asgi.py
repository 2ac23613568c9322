"""HTTP for consumers: an ASGI app at which they acknowledge what they got. It needs no web framework.

from postroad.asgi import AckEndpoint

app.router.routes.append(Route("/acks", AckEndpoint(post)))   # FastAPI, Starlette; by itself: uvicorn module:endpoint
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import msgspec

from postroad.engine.telemetry import logger
from postroad.model.errors import (
    AckNotRequested,
    AckRefused,
    BadAckToken,
    CommitUnknown,
    DispatchNotFound,
    SchemaMismatch,
)
from postroad.store import acks
from postroad.store.dialects import is_away

if TYPE_CHECKING:
    from postroad.engine.app import Postroad

__all__ = ["AckEndpoint"]

BODY_BYTES_MAX = 4096
BODY_SECONDS_MAX = 10
Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class _Answer(msgspec.Struct, frozen=True):
    status: int
    body: bytes
    header: tuple[bytes, bytes] | None = None


class _Wrong(Exception):
    """The request is not as it should be."""

    def __init__(self, status: int, message: str) -> None:
        self.answer = _failure(status, "invalid_input", message)


class _Gone(Exception):
    """The client has left."""


class _Asked(msgspec.Struct, frozen=True):
    token: str


def _failure(status: int, kind: str, message: str, header: tuple[bytes, bytes] | None = None) -> _Answer:
    said = {"ok": False, "error": {"kind": kind, "message": message}}
    return _Answer(status, msgspec.json.encode(said), header)


def _refusal(refused: AckRefused) -> _Answer:
    """What was left as it is, with what it is by now, as the command line answers it."""
    detail = {**{name: str(value) for name, value in refused.about.items()}, "refused": {str(refused): 1}}
    said = {"ok": False, "error": {"kind": "conflict", "message": str(refused), "detail": detail}}
    return _Answer(409, msgspec.json.encode(said))


_OK = _Answer(200, b'{"ok":true}')
# One answer for all that must not be told apart: an unknown dispatch, one that wants no acknowledgement, a bad token.
_NOTHING = _failure(404, "not_found", str(BadAckToken()))
_NOT_ALLOWED = _failure(405, "invalid_input", "Acknowledge by POST.", (b"allow", b"POST"))
_AWAY = _failure(503, "unavailable", "The database is away; try again.", (b"retry-after", b"1"))


class AckEndpoint:
    """An ASGI app at which consumers acknowledge dispatches: POST, on whatever path it is mounted.

    The token comes as `Authorization: Bearer …`, or as the body: JSON `{"token": "…"}`, a form's `token`, or plain
    text; never in the URL. 200 once it is acknowledged, also if it was before; 404 if the token acknowledges nothing,
    whatever the cause; 409 if the dispatch has ended otherwise; 503 while the database is away.

    Args:
        post: The app whose keys and database it uses.
    """

    def __init__(self, post: "Postroad") -> None:
        self._post = post

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                await self._http(scope, receive, send)
            case "lifespan":
                await self._lifespan(receive, send)
            case _:
                await send({"type": "websocket.close"})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer = await self._answer(scope, receive)
        except _Wrong as wrong:
            answer = wrong.answer
        except _Gone:
            return
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(answer.body)).encode()),
            (b"cache-control", b"no-store"),
            (b"x-content-type-options", b"nosniff"),
            *((answer.header,) if answer.header else ()),
        ]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": answer.body})

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        """By itself it is the whole program: it looks at its keys first, and closes the app at the end."""
        await receive()
        try:
            self._post.keyring.require()
        except Exception as error:
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await asyncio.to_thread(self._post.close)
        await send({"type": "lifespan.shutdown.complete"})

    async def _answer(self, scope: Scope, receive: Receive) -> _Answer:
        if scope["method"] != "POST":
            return _NOT_ALLOWED
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        token = _token(headers, await _body(headers, receive))
        try:
            await self._acknowledge(token)
        except (DispatchNotFound, AckNotRequested, BadAckToken):
            return _NOTHING
        except AckRefused as refused:
            return _refusal(refused)
        except Exception as error:
            if not is_away(error) and not isinstance(error, CommitUnknown | SchemaMismatch):
                raise
            logger.warning("an acknowledgement was put off: %s", error)
            return _AWAY
        return _OK

    async def _acknowledge(self, token: str) -> None:
        """Look first: what acknowledges nothing, and what was acknowledged before, takes no lock."""
        presented = self._post.keyring.read(token)
        database = await asyncio.to_thread(lambda: self._post.database)  # it may have to be opened
        if await database.aread(acks.check, [presented]):
            async with self._post.begin() as tx:
                tx.ack(token)


async def _body(headers: Mapping[bytes, str], receive: Receive) -> bytes:
    """The request's body, within bounds of size and time."""
    given = headers.get(b"content-length", "")
    too_large = _Wrong(413, f"A body has at most {BODY_BYTES_MAX} bytes.")
    if given.isdecimal() and int(given[:20]) > BODY_BYTES_MAX:
        raise too_large
    body = b""
    try:
        async with asyncio.timeout(BODY_SECONDS_MAX):
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise _Gone
                body += message.get("body", b"")
                more = message.get("more_body", False)
                if len(body) > BODY_BYTES_MAX:
                    raise too_large
    except TimeoutError:
        raise _Wrong(408, f"The body did not come within {BODY_SECONDS_MAX} s.") from None
    return body


def _token(headers: Mapping[bytes, str], body: bytes) -> str:
    """The token that a request presents; what is wrong with the request never shows it."""
    scheme, _, credentials = headers.get(b"authorization", "").partition(" ")
    if scheme.lower() == "bearer" and credentials.strip():
        return credentials.strip()
    if not body.strip():
        raise _Wrong(400, "Give the token as `Authorization: Bearer`, or in the body.")
    kind = headers.get(b"content-type", "").partition(";")[0].strip().lower()
    try:
        match kind:
            case "application/json":
                return msgspec.json.decode(body, type=_Asked).token
            case "application/x-www-form-urlencoded":
                (token,) = parse_qs(body.decode("ascii"), max_num_fields=10)["token"]
                return token.strip()
            case "text/plain":
                return body.decode("ascii").strip()
    except (ValueError, KeyError):  # msgspec's errors are ValueErrors
        raise _Wrong(400, "The body holds no token.") from None
    raise _Wrong(415, "A body is application/json, application/x-www-form-urlencoded or text/plain.")
