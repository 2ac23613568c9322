"""One HTTP/1.1 POST over a connection of its own, to an address that was checked.

h11 reads and writes the protocol, asyncio the bytes. An HTTP client would follow redirects, keep cookies, unpack
bodies, ask the environment for proxies and pool connections by name; of all that nothing is wanted here. A
connection is not kept: the answer to a request on one that the server is just closing would be unknown.
"""

import asyncio
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import h11

from postroad.transports.addresses import Destination

READ_BYTES_MAX = 64 * 1024
KEPT_BYTES_MAX = 2 * 1024
ADDRESSES_TRIED_MAX = 4
BODY_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back; names of headers in lower case, of the body the beginning at most."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Posting:
    """One exchange with a destination, and how far it has come.

    Attributes:
        until: The event loop's time at which its caller ends it.
        doing: What it is at.
        reaching: Whether it has come so far that only its destination can be the cause of a failure.
        begun: Something was handed to the connection, so that the destination may have got it.
    """

    def __init__(self, where: Destination, *, until: float) -> None:
        self.where = where
        self.until = until
        self.doing = "preparing it"
        self.reaching = False
        self.begun = False

    async def post(
        self, addresses: Sequence[str], *, headers: Mapping[str, str], body: bytes, tls: ssl.SSLContext | None
    ) -> Answer:
        """Send it to one of the addresses and return the answer.

        Raises:
            OSError: The connection could not be made, or broke, or what came back is no HTTP or has a header
                larger than 64 KiB.
        """
        self.doing = "connecting"
        reader, writer = await self._connect(addresses, tls)
        try:
            parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=READ_BYTES_MAX)
            message = b"".join(parser.send(event) or b"" for event in _request(self.where, headers, body))
            self.doing = "waiting for the answer"
            self.begun = True
            # Not drained: a server may answer, and close, before it has read everything.
            writer.write(message)
            return await _Reading(reader, parser, self.until).answer()
        except h11.ProtocolError as error:
            raise ConnectionError(str(error)) from None
        finally:
            writer.transport.abort()

    async def _connect(
        self, addresses: Sequence[str], tls: ssl.SSLContext | None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to the first address that has one; each gets its share of the time that is left."""
        tried = addresses[:ADDRESSES_TRIED_MAX]
        loop = asyncio.get_running_loop()
        failure: OSError = ConnectionError("no address")
        for position, address in enumerate(tried):
            share = (self.until - loop.time()) / (len(tried) - position)
            try:
                async with asyncio.timeout(share):
                    return await asyncio.open_connection(
                        address, self.where.port, ssl=tls, server_hostname=None if tls is None else self.where.host
                    )
            except OSError as error:  # TimeoutError and what TLS refuses are OSErrors
                failure = error
        raise failure


def _request(where: Destination, headers: Mapping[str, str], body: bytes) -> list[Any]:
    fields = {"host": where.authority, **headers, "content-length": str(len(body)), "connection": "close"}
    request = h11.Request(method="POST", target=where.target, headers=list(fields.items()))
    return [request, h11.Data(data=body), h11.EndOfMessage()]


class _Reading:
    """Reads an answer: 64 KiB of it at the most, header and body together."""

    def __init__(self, reader: asyncio.StreamReader, parser: h11.Connection, until: float) -> None:
        self._reader = reader
        self._parser = parser
        self._until = until
        self._left = READ_BYTES_MAX

    async def answer(self) -> Answer:
        event = await self._event()
        while not isinstance(event, h11.Response):  # before it there may be any number of 1xx
            if not isinstance(event, h11.InformationalResponse):
                raise h11.RemoteProtocolError("no answer")
            event = await self._event()
        headers: dict[str, str] = {}
        for name, value in event.headers:
            headers.setdefault(name.decode("latin-1"), value.decode("latin-1"))
        return Answer(status=event.status_code, headers=headers, body=await self._body())

    async def _body(self) -> bytes:
        """The beginning of the body. Whatever happens here, the status has said what became of the request."""
        kept = bytearray()
        # Half of what is left: this has to end before the caller's time is over, and the status with it.
        seconds = min(BODY_SECONDS, (self._until - asyncio.get_running_loop().time()) / 2)
        try:
            async with asyncio.timeout(seconds):
                while isinstance(event := await self._event(), h11.Data):
                    kept += event.data[: KEPT_BYTES_MAX - len(kept)]
        except (OSError, h11.ProtocolError):  # it dripped, broke, or was too large
            pass
        return bytes(kept)

    async def _event(self) -> Any:
        while (event := self._parser.next_event()) is h11.NEED_DATA:
            if not self._left:
                raise h11.RemoteProtocolError(f"the answer is larger than {READ_BYTES_MAX} bytes")
            data = await self._reader.read(self._left)
            if not data and self._parser.their_state is h11.SEND_RESPONSE:
                raise h11.RemoteProtocolError("the connection was closed without an answer")
            self._left -= len(data)
            self._parser.receive_data(data)
        return event
