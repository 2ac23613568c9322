"""faststream-outbox as its page on performance says: asyncpg for LISTEN, deletes in batches, uvloop as its command."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import uvloop
from faststream_outbox import OutboxBroker, make_outbox_table, outbox_autovacuum_ddl
from sqlalchemy import URL, MetaData, text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from benchmarks.peers.contestant import BULK, Arrivals, Handler, number_of, payload

QUEUE = "jobs"
WORKERS = 1
FETCH = 500
FLUSH = 500


class FastStreamOutboxClient:
    """Publishes in SQLAlchemy sessions."""

    def __init__(self, broker: OutboxBroker, sessions: async_sessionmaker[AsyncSession]) -> None:
        self._broker = broker
        self._sessions = sessions

    async def enqueue(self, number: int) -> None:
        async with self._sessions() as session, session.begin():
            await self._broker.publish(payload(number).encode(), queue=QUEUE, session=session)

    async def bulk(self, numbers: Sequence[int]) -> None:
        async with self._sessions() as session, session.begin():
            await self._batch(session, numbers)

    async def seed(self, numbers: Sequence[int]) -> None:
        async with self._sessions() as session, session.begin():
            for first in range(0, len(numbers), BULK):
                await self._batch(session, numbers[first : first + BULK])

    async def _batch(self, session: AsyncSession, numbers: Sequence[int]) -> None:
        bodies = [payload(number).encode() for number in numbers]
        await self._broker.publish_batch(*bodies, queue=QUEUE, session=session)


class FastStreamOutboxSide:
    """One worker with batched deletes: by its own page faster than several without."""

    package = "faststream-outbox"
    settings = f"asyncpg, uvloop, max_workers={WORKERS}, fetch_batch_size={FETCH}, terminal_flush_batch_size={FLUSH}"
    unfinished = "SELECT count(*) FROM outbox"
    state = """
        SELECT coalesce((SELECT 'a claim, delivery ' || deliveries_count FROM outbox WHERE acquired_token IS NOT NULL),
            (SELECT 'unclaimed' FROM outbox), 'deleted')
    """

    def __init__(self, url: URL) -> None:
        self._engine = create_async_engine(url.set(drivername="postgresql+asyncpg"))
        self._metadata = MetaData()
        self._table = make_outbox_table(self._metadata, table_name="outbox")
        self._broker = OutboxBroker(self._engine, outbox_table=self._table, logger=None)

    def new_loop(self) -> asyncio.AbstractEventLoop:
        return uvloop.new_event_loop()

    async def install(self) -> None:
        async with self._engine.begin() as connection:
            await connection.run_sync(self._metadata.create_all)
            await connection.execute(text(outbox_autovacuum_ddl("outbox")))
        await self._engine.dispose()

    @asynccontextmanager
    async def client(self) -> AsyncIterator[FastStreamOutboxClient]:
        try:
            yield FastStreamOutboxClient(self._broker, async_sessionmaker(self._engine, expire_on_commit=False))
        finally:
            await self._engine.dispose()

    async def serve(self, arrivals: Arrivals) -> None:
        @self._broker.subscriber(QUEUE, max_workers=WORKERS, fetch_batch_size=FETCH, terminal_flush_batch_size=FLUSH)
        async def carry_out(body: bytes) -> None:
            arrivals.note(number_of(body))

        await self._broker.start()
        await asyncio.Event().wait()

    async def hold(self, handler: Handler, lease_seconds: float) -> None:
        # Its own logger writes every message to stderr; this one leaves that to whoever looks at warnings.
        broker = OutboxBroker(self._engine, outbox_table=self._table, logger=logging.getLogger("outbox"))

        @broker.subscriber(
            QUEUE, lease_ttl_seconds=lease_seconds, min_fetch_interval=0.1, max_fetch_interval=lease_seconds / 2
        )
        async def carry_out(body: bytes) -> None:
            await handler(number_of(body))

        await broker.start()
        await asyncio.Event().wait()
