"""procrastinate with psycopg, its default; finished jobs are kept, as its worker does unless told otherwise."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from procrastinate import App, PsycopgConnector
from sqlalchemy import URL

from benchmarks.peers.contestant import Arrivals, Handler, number_of, payload

CONCURRENCY = 10


class ProcrastinateClient:
    """Defers on a pool of connections; a call is a transaction."""

    def __init__(self, task: Any) -> None:
        self._task = task

    async def enqueue(self, number: int) -> None:
        await self._task.defer_async(body=payload(number))

    async def bulk(self, numbers: Sequence[int]) -> None:
        await self._task.batch_defer_async(*({"body": payload(number)} for number in numbers))

    async def seed(self, numbers: Sequence[int]) -> None:
        await self.bulk(numbers)


class ProcrastinateSide:
    """An async worker with as many jobs at once as drained fastest."""

    package = "procrastinate"
    settings = f"psycopg, concurrency={CONCURRENCY}"
    unfinished = "SELECT count(*) FROM procrastinate_jobs WHERE status IN ('todo', 'doing')"
    state = """
        SELECT status || ', attempts ' || attempts || '; events: '
            || (SELECT string_agg(type::text, ', ' ORDER BY id) FROM procrastinate_events)
        FROM procrastinate_jobs
    """

    def __init__(self, url: URL) -> None:
        self._handler: Handler
        dsn = url.set(drivername="postgresql").render_as_string()
        self._app = App(connector=PsycopgConnector(conninfo=dsn, max_size=CONCURRENCY + 2))
        self._task = self._app.task(name="job")(self._carry_out)

    def new_loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.new_event_loop()

    async def install(self) -> None:
        async with self._app.open_async():
            await self._app.schema_manager.apply_schema_async()

    @asynccontextmanager
    async def client(self) -> AsyncIterator[ProcrastinateClient]:
        async with self._app.open_async():
            yield ProcrastinateClient(self._task)

    async def serve(self, arrivals: Arrivals) -> None:
        async def note(number: int) -> None:
            arrivals.note(number)

        self._handler = note
        async with self._app.open_async():
            await self._app.run_worker_async(concurrency=CONCURRENCY, install_signal_handlers=False)

    async def hold(self, handler: Handler, lease_seconds: float) -> None:
        self._handler = handler
        async with self._app.open_async(), asyncio.TaskGroup() as tasks:
            tasks.create_task(self._retry_stalled(lease_seconds))
            await self._app.run_worker_async(
                install_signal_handlers=False,
                update_heartbeat_interval=lease_seconds / 4,
                stalled_worker_timeout=lease_seconds,
                fetch_job_polling_interval=lease_seconds / 4,
            )

    async def _retry_stalled(self, lease_seconds: float) -> None:
        """The periodic task of its guide, more often than the once a minute of a cron rule."""
        while True:
            await asyncio.sleep(lease_seconds / 2)
            for job in await self._app.job_manager.get_stalled_jobs(seconds_since_heartbeat=lease_seconds):
                await self._app.job_manager.retry_job(job)

    async def _carry_out(self, body: str) -> None:
        await self._handler(number_of(body))
