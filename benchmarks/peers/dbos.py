"""DBOS: workflows without steps on a queue, enqueued by its client. There is no bulk call; bulk is one transaction."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from dbos import DBOS, DBOSClient, DBOSConfig, EnqueueOptions
from sqlalchemy import URL, Engine, create_engine

from benchmarks.peers.contestant import Arrivals, number_of, payload

QUEUE = "jobs"
WORKFLOW = "job"
POLL_SECONDS = 0.01


class DBOSSideClient:
    """Its synchronous client; a call is a transaction."""

    def __init__(self, client: DBOSClient, engine: Engine) -> None:
        self._client = client
        self._engine = engine
        self._options: EnqueueOptions = {"queue_name": QUEUE, "workflow_name": WORKFLOW}

    async def enqueue(self, number: int) -> None:
        self._client.enqueue(self._options, payload(number))

    async def bulk(self, numbers: Sequence[int]) -> None:
        with self._engine.begin() as connection:
            for number in numbers:
                self._client.enqueue_in_transaction(connection, self._options, payload(number))

    async def seed(self, numbers: Sequence[int]) -> None:
        await self.bulk(numbers)


class DBOSSide:
    """It finds work by polling, by default once a second; here a hundred times."""

    package = "dbos"
    settings = f"psycopg, sync workflow, polling_interval_sec={POLL_SECONDS}"
    unfinished = "SELECT count(*) FROM dbos.workflow_status WHERE status IN ('ENQUEUED', 'PENDING')"

    def __init__(self, url: URL) -> None:
        self._url = url.render_as_string()

    def new_loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.new_event_loop()

    async def install(self) -> None:
        await asyncio.to_thread(self._launch, Arrivals())
        DBOS.destroy()

    @asynccontextmanager
    async def client(self) -> AsyncIterator[DBOSSideClient]:
        engine = create_engine(self._url)
        client = DBOSClient(system_database_engine=engine)
        try:
            yield DBOSSideClient(client, engine)
        finally:
            client.destroy()
            engine.dispose()

    async def serve(self, arrivals: Arrivals) -> None:
        await asyncio.to_thread(self._launch, arrivals)
        await asyncio.Event().wait()

    def _launch(self, arrivals: Arrivals) -> None:
        config: DBOSConfig = {"name": "bench", "system_database_url": self._url, "log_level": "ERROR"}
        DBOS(config=config)

        @DBOS.workflow(name=WORKFLOW)
        def carry_out(body: str) -> None:
            arrivals.note(number_of(body))

        DBOS.launch()
        DBOS.register_queue(QUEUE, polling_interval_sec=POLL_SECONDS)
