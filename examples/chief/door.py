"""The notify door: POST /notify {"key", "text"}. It answers within seconds, however busy the room is."""

import app  # noqa: I001  # before all others: it settles which SQLite this process uses

import sys

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from postroad import InvalidInput, Refused
from postroad.agent.doors import Ring, report_or_ring

BODY_BYTES_MAX = 16 * 1024


class Notice(msgspec.Struct, forbid_unknown_fields=True):
    """What somebody outside has to say; the key is their own id of it, the same whenever they come again."""

    key: str
    text: str


async def notify(request: Request) -> Response:
    """Accept a notice: 200 it stands in the room, 202 the pager rang, 503 come again; 422 and 409 never."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > BODY_BYTES_MAX:
            return JSONResponse({"error": "too long"}, 413)
    try:
        notice = msgspec.json.decode(body, type=Notice)
    except msgspec.MsgspecError as error:  # no JSON, or other fields
        return JSONResponse({"error": str(error)}, 422)
    ring = Ring(kind=app.PAGE, body={"text": notice.text})
    try:
        told = await report_or_ring(app.post, app.ROOM, {"text": notice.text}, key=notice.key, ring=ring)
    except Refused as refused:  # a key that cannot be, or that something else has taken
        status = 422 if isinstance(refused, InvalidInput) else 409
        return JSONResponse({"error": str(refused)}, status)
    return JSONResponse({"landed": told.entry is not None, "rang": told.rang}, told.status)


web = Starlette(routes=[Route("/notify", notify, methods=["POST"])])


def main() -> None:
    uvicorn.run(web, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")


if __name__ == "__main__":
    main()
