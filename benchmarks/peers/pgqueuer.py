"""pgqueuer as its guide to tuning says: asyncpg, uvloop as its command uses, one connection for the worker."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta

import asyncpg
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries
from sqlalchemy import URL

from benchmarks.peers.contestant import BULK, Arrivals, Handler, number_of, payload

JOB = "job"
BATCH = 500


class PgQueuerClient:
    """Enqueues on one connection; a statement is a transaction by itself."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection
        self._queries = Queries(AsyncpgDriver(connection))

    async def enqueue(self, number: int) -> None:
        await self._queries.enqueue(JOB, payload(number).encode())

    async def bulk(self, numbers: Sequence[int]) -> None:
        many = len(numbers)
        await self._queries.enqueue([JOB] * many, [payload(number).encode() for number in numbers], [0] * many)

    async def seed(self, numbers: Sequence[int]) -> None:
        async with self._connection.transaction():
            for first in range(0, len(numbers), BULK):
                await self.bulk(numbers[first : first + BULK])


class PgQueuerSide:
    """Durable tables (the default), its autovacuum settings, and the batch size that drained fastest."""

    package = "pgqueuer"
    settings = f"asyncpg, uvloop, batch_size={BATCH}"
    unfinished = "SELECT count(*) FROM pgqueuer"
    state = """
        SELECT coalesce((SELECT status::text FROM pgqueuer), 'deleted') || '; log: '
            || (SELECT string_agg(status::text, ', ' ORDER BY id) FROM pgqueuer_log)
    """

    def __init__(self, url: URL) -> None:
        self._dsn = url.set(drivername="postgresql").render_as_string()

    def new_loop(self) -> asyncio.AbstractEventLoop:
        return uvloop.new_event_loop()

    async def install(self) -> None:
        connection = await asyncpg.connect(self._dsn)
        queries = Queries(AsyncpgDriver(connection))
        await queries.install()
        await queries.optimize_autovacuum()
        await connection.close()

    @asynccontextmanager
    async def client(self) -> AsyncIterator[PgQueuerClient]:
        connection = await asyncpg.connect(self._dsn)
        try:
            yield PgQueuerClient(connection)
        finally:
            await connection.close()

    async def serve(self, arrivals: Arrivals) -> None:
        queue = PgQueuer(AsyncpgDriver(await asyncpg.connect(self._dsn)))

        @queue.entrypoint(JOB)
        async def carry_out(job: Job) -> None:
            arrivals.note(number_of(job.payload or b""))

        await queue.run(batch_size=BATCH)

    async def hold(self, handler: Handler, lease_seconds: float) -> None:
        queue = PgQueuer(AsyncpgDriver(await asyncpg.connect(self._dsn)))

        @queue.entrypoint(JOB)
        async def carry_out(job: Job) -> None:
            await handler(number_of(job.payload or b""))

        lease = timedelta(seconds=lease_seconds)
        await queue.run(heartbeat_timeout=lease, dequeue_timeout=lease / 2)
