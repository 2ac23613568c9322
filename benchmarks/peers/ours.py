"""Ours: the public API, with fences, history and outcomes on, as they always are."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from sqlalchemy import URL

from benchmarks import work
from benchmarks.peers.contestant import Arrivals, Handler
from benchmarks.places import Place
from postroad import Dispatch, Kind, Postroad

MAIL = Kind(work.MAIL, dict[str, str])
CONCURRENCY = 500
STREAMS = 500


class OursClient:
    """A synchronous client; a block is a transaction."""

    def __init__(self, post: Postroad, place: Place, streams: int) -> None:
        self._post = post
        self._place = place
        self._streams = streams

    async def enqueue(self, number: int) -> None:
        with self._post.begin() as tx:
            tx.send(MAIL, work.mail(f"{number:06}"), to="driver")

    async def bulk(self, numbers: Sequence[int]) -> None:
        with self._post.begin() as tx:
            for number in numbers:
                tx.send(MAIL, work.mail(f"{number:06}"), to="driver")

    async def seed(self, numbers: Sequence[int]) -> None:
        if not self._streams:
            await self.bulk(numbers)
            return
        # Only turns send with a stream. The rows are made as theirs are; the last one wakes the worker.
        self._place.seed_dispatches(len(numbers) - 1, self._streams)
        await self.enqueue(numbers[-1])


class Ours:
    """Each job of the drain belongs to one of 500 streams, whose inbox gets its outcome."""

    package = "postroad"
    settings = f"psycopg, concurrency={CONCURRENCY}, outcomes to {STREAMS} streams"
    unfinished = "SELECT count(*) FROM postroad_outbox WHERE status IN ('pending', 'delivering')"
    state = """
        SELECT status || ', attempt ' || attempt || '; history: '
            || (SELECT string_agg(reason_code, ', ' ORDER BY id) FROM postroad_transitions)
        FROM postroad_outbox
    """
    streams = STREAMS

    def __init__(self, url: URL) -> None:
        self._url = url.render_as_string()
        self._post = Postroad(self._url)

    def new_loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.new_event_loop()

    async def install(self) -> None:
        Place(self._url, None).close()

    @asynccontextmanager
    async def client(self) -> AsyncIterator[OursClient]:
        place = Place(self._url, None)
        self._post.elsewhere(MAIL)
        try:
            yield OursClient(self._post, place, self.streams)
        finally:
            self._post.close()
            place.close()

    async def serve(self, arrivals: Arrivals) -> None:
        @self._post.sender(MAIL, concurrency=CONCURRENCY)
        async def carry_out(dispatch: Dispatch[dict[str, str]]) -> None:
            arrivals.note(int(dispatch.body["number"]))

        await self._post.runtime(only=("sends",)).run(asyncio.Event())

    async def hold(self, handler: Handler, lease_seconds: float) -> None:
        @self._post.sender(MAIL, lease=lease_seconds, timeout=lease_seconds - 2)
        async def carry_out(dispatch: Dispatch[dict[str, str]]) -> None:
            await handler(int(dispatch.body["number"]))

        await self._post.runtime(only=("sends",)).run(asyncio.Event())


class OursWithoutStream(Ours):
    """The same without streams, so without outcomes: what the peers do."""

    settings = f"psycopg, concurrency={CONCURRENCY}, no streams, so no outcomes"
    streams = 0
