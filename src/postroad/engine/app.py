"""The app: handlers with a database. It connects on first use, so that importing one costs and needs nothing."""

import threading
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from sqlalchemy import Connection, Engine

from postroad.engine import config, notifying
from postroad.engine.calls import Calls, RealCalls
from postroad.engine.declarations import Elsewhere, Sender, Transport, one_of, plain
from postroad.engine.delegations import Delegations
from postroad.engine.dispatches import Dispatches
from postroad.engine.folding import Folding
from postroad.engine.handlers import Handlers
from postroad.engine.leases import Keeper
from postroad.engine.loop import POLL, Parts
from postroad.engine.partials import Partials
from postroad.engine.records import Records
from postroad.engine.reports import OnConflict, Reporting, written
from postroad.engine.running import GRACE, PARTS, Drained, Loops, Part, Runtime, build, drain, linger, run_bounded
from postroad.engine.streams import Streams
from postroad.engine.telemetry import Telemetry, logger
from postroad.engine.transaction import Opening
from postroad.engine.wakeups import Wakeups
from postroad.engine.watching import Hub, watched
from postroad.model.acks import Keyring, key_texts
from postroad.model.dispatches import Accepted
from postroad.model.entropy import Entropy, SystemEntropy
from postroad.model.errors import InvalidInput, Refused, Span, shown
from postroad.model.events import Entry, Partial
from postroad.model.ids import check_schema, check_stream
from postroad.model.payload import callable_, whole
from postroad.store import borrowed, dialects, log, migrations, moments, sqlite_version, stream_views
from postroad.store.database import Database

Lifespan = Callable[["Postroad"], AbstractAsyncContextManager[Any]]
READ_MAX = 10_000


class Postroad(Handlers):
    """Handlers with a database. Connects on first use, so importing an app costs nothing and needs nothing.

    Args:
        database: A URL (`sqlite:///app.db`, `postgresql://…`) or the application's own Engine; None: from the
            settings (`POSTROAD_DATABASE_URL`, `DATABASE_URL`, `postroad.toml`).
        schema: The Postgres schema of our tables.
        secret_key: What signs acknowledgements, at least 16 characters; of several the first signs and all verify, so
            that keys can be exchanged. None: from the settings (`POSTROAD_SECRET_KEY`, `postroad.toml`).
        lifespan: `lifespan(post)` is entered before loops run and left after; what it yields is `post.state`.
        migrate: Whether to bring the schema up to date on first use; None: on SQLite only.
    """

    def __init__(
        self,
        database: str | Engine | None = None,
        *,
        schema: str | None = None,
        secret_key: str | Sequence[str] | None = None,
        lifespan: Lifespan | None = None,
        migrate: bool | None = None,
    ) -> None:
        super().__init__()
        if database is not None:
            dialects.check_source(database)
        if schema is not None:
            check_schema(schema)
        if migrate is not None:
            one_of(migrate, (True, False), "migrate")
        if lifespan is not None:
            callable_(lifespan, "lifespan")
        self.state: Any = None
        self.dispatches = Dispatches(lambda: self.database, lambda: self.entropy, lambda: self._wakeups.ping())
        self.streams = Streams(lambda: self.database, lambda: self.entropy, lambda: self._wakeups.ping())
        self.delegations = Delegations(lambda: self.database, lambda: self._wakeups.ping())
        self.entropy: Entropy = SystemEntropy()
        self._source = database
        self._schema = schema
        self._secret_keys = None if secret_key is None else key_texts(secret_key)
        self._keyring: Keyring | None = None
        self._migrate = migrate
        self.notifier: Transport | None = None
        self._user_lifespan = lifespan
        self._telemetry = Telemetry()
        self._wakeups = Wakeups()
        self._calls: Calls | None = None
        self._opened: Database | None = None
        self._connected: Database | None = None  # not prepared yet: so far only joined by users' transactions
        self._hub: Hub | None = None
        self._opening = threading.Lock()

    @property
    def database(self) -> Database:
        """The open database, its schema checked (and, on SQLite, brought up to date)."""
        with self._opening:
            if self._opened is None:
                self._opened = self._open()
                self._connected = None
            return self._opened

    @property
    def source(self) -> str | Engine | None:
        """The URL or the engine that it was given; None: the settings decide when it connects."""
        return self._source

    @property
    def relayed(self) -> bool:
        """Whether this process's loops tell other processes what was committed here."""
        return self._wakeups.relayed

    @property
    def keyring(self) -> Keyring:
        """The server's keys, as the code or else the settings have them; none if there are none."""
        if self._keyring is None:
            self._keyring = Keyring(config.secret_keys(self.settings()))
        return self._keyring

    @property
    def senders(self) -> Mapping[str, Sender]:
        """Who carries out which kind, by each of the kind's names."""
        return self._registry.senders

    def declared(self, kind: str) -> Sender | Elsewhere:
        """How this app carries out a kind; UnknownKind if nobody declared it."""
        return self._registry.declared(kind)

    def begin(self) -> Opening:
        """A transaction of its own: `with post.begin() as tx` or `async with`."""
        return Opening(self, lambda _: self.database, self._announce)

    def join(self, connection: object) -> Opening:
        """The user's transaction: never committed, retried or closed by us.

        Takes an SQLAlchemy Connection or Session with `with`, an AsyncConnection or AsyncSession with
        `async with`. What is refused takes our rows back (a savepoint) and leaves the transaction usable.

        Raises:
            NotInTransaction: On entering, for an engine or a connection in autocommit mode.
        """
        if connection is None:
            raise InvalidInput("join needs a connection.", field="connection")
        return Opening(self, self._database_of, self._announce, connection)

    def running(self, *, pump_interval: Span | None = None) -> Loops:
        """Worker, dispatcher and pump, for as long as the block lasts."""
        return Loops(lambda: self.runtime(pump_interval=pump_interval), self.resources)

    def lifespan(self, app: Any) -> AbstractAsyncContextManager[None]:
        """`running` as an ASGI lifespan: `FastAPI(lifespan=post.lifespan)`."""
        return self._lifespan()

    def drain(self, *, only: Sequence[Part] = PARTS) -> Drained:
        """Work until nothing is due, then stop; `only` some of turns, sends and timers."""
        return run_bounded(self.adrain(only=only))

    async def adrain(self, *, only: Sequence[Part] = PARTS) -> Drained:
        """Work until nothing is due, then stop; `only` some of turns, sends and timers."""
        parts = self.parts()
        async with self.resources():
            parts.keeper.start()
            try:
                loops = build(parts, only)
                await drain(loops)
                await linger(loops)
            finally:
                parts.keeper.close()
        return Drained(parts.counts, await self.database.aread(moments.waiting))

    def read(self, stream: str, *, after: int = 0, limit: int = 200) -> Sequence[Entry]:
        """A stream's entries with a seq above `after`, oldest first."""
        return self.database.read(log.read, check_stream(stream), after=_seq(after), limit=_limit(limit))

    async def aread(self, stream: str, *, after: int = 0, limit: int = 200) -> Sequence[Entry]:
        """A stream's entries with a seq above `after`, oldest first."""
        return await self.database.aread(log.read, check_stream(stream), after=_seq(after), limit=_limit(limit))

    def report(
        self, stream: str, data: Any, *, key: str, wait: Span | None = 0, source: str | None = None,
        owner: str | None = None, on_conflict: OnConflict = "keep",
    ) -> Entry | None:  # fmt: skip
        """`areport` for a thread, which waits in it."""
        report = written(stream, data, key=key, source=source, owner=owner, on_conflict=on_conflict)
        return self._reporting().report(report, wait)

    async def areport(
        self, stream: str, data: Any, *, key: str, wait: Span | None = 0, source: str | None = None,
        owner: str | None = None, on_conflict: OnConflict = "keep",
    ) -> Entry | None:  # fmt: skip
        """Tell a stream something: durable first, then wait at most that long for it to land in its log.

        It lands between turns, behind what waits already. Who gives up waiting, is cancelled or dies changes nothing.

        Args:
            data: What a payload may be. The entry holds it as `data`, with what a conversation needs (`Report`).
            key: The entry's key, the same on every retry: what was reported under it first stands.
            wait: None waits until the report has landed or its stream is deleted. In a turn nobody waits.
            source: The stream it comes from. It must be there, and be the `owner`'s if one is given (`stream_owner`).
            on_conflict: "error" refuses other content under a key instead.

        Returns:
            The entry; None: it was accepted, and will land.

        Raises:
            SourceRefused: The source is missing, deleted, or not the owner's; nothing was stored.
            KeyConflict: The key is another event's, or ("error") another report's.
            StreamDeleted: The stream was deleted.
        """
        report = written(stream, data, key=key, source=source, owner=owner, on_conflict=on_conflict)
        return await self._reporting().areport(report, wait)

    def watch(self, stream: str, *, after: int = 0) -> AsyncGenerator[Entry | Partial, None]:
        """A stream's entries with a seq above `after`, each once and in order, and what its running turn says.

        A `Partial` holds the whole text of `Turn.partial` so far, not what was added. It comes behind the entries that
        stood there when it was said; the entries that follow it take its place. If it ends otherwise (the turn failed,
        or its process died), one with an empty text follows.

        It never ends by itself, also while the database is away. Whoever stops it with `aclose`, by leaving
        `contextlib.aclosing`, or by cancelling the task that waits for it, leaves nothing behind.

        Raises:
            InvalidInput: At once, for a name or an `after` that cannot be.
            StreamDeleted: The stream was deleted; what entries it had came before.
            Refused: The app was closed meanwhile.
        """
        return watched(self.hub, check_stream(stream), after=_seq(after))

    def hub(self) -> Hub:
        """Where everyone in this process waits for news of streams."""
        database = self.database
        with self._opening:
            if self._hub is None or self._hub.database is not database:
                self._hub = Hub(database, self._wakeups)
            return self._hub

    def position(self, accepted: Accepted) -> int | None:
        """How many events of its stream stand before this one; None once it has landed, or has ended otherwise."""
        if not isinstance(accepted, Accepted):
            raise InvalidInput(f"accepted must be what publish returned, got {shown(accepted)}.", field="accepted")
        if accepted.stream is None or accepted.position is None:
            return None
        return self.database.read(stream_views.place, accepted.stream, accepted.position)

    def observe(self, fn: Callable[[str, Mapping[str, Any]], None]) -> None:
        """The one telemetry seam: `fn(name, values)`, a plain function, for all that happens in this process."""
        plain(fn, "fn")
        self._telemetry.observe(fn)

    def close(self) -> None:
        """End our threads and connections. The app may be used again; it opens its database anew."""
        with self._opening:
            opened, self._opened, self._connected = self._opened or self._connected, None, None
            hub, self._hub = self._hub, None
        if hub is not None:
            hub.close()
        if opened is not None:
            opened.close()

    def reconfigure(self, *, database: str | Engine | None = None, schema: str | None = None) -> None:
        """Another database than the one in the code, as the command line asks for."""
        self.close()
        self._source = database if database is not None else self._source
        self._schema = schema if schema is not None else self._schema

    def settings(self, given: Mapping[str, object] | None = None) -> dict[str, config.Setting]:
        """Every setting of this app: what its code says, then `given` (the command line), then the other places.

        Raises:
            BadSetting: A setting's name or type is wrong.
        """
        source = None if self._source is None else str(getattr(self._source, "url", self._source))
        said: dict[str, object] = {"database_url": source, "schema": self._schema}
        if self._secret_keys is not None:
            said |= {"secret_key": self._secret_keys[0], "secret_keys_former": list(self._secret_keys[1:])}
        return config.settings(given, code=said)

    def check_schema(self) -> None:
        """Open the database and hold its schema against this code.

        Raises:
            SchemaMismatch: The schema is missing, older or too new; it says what to do.
        """
        self.database  # noqa: B018  # opening it checks

    def parts(self, *, poll: int = POLL) -> Parts:
        """What loops of this app share."""
        database, settings = self.database, self.settings()
        self.notifier = notifying.of(settings)
        return Parts(
            post=self,
            registry=self._registry,
            database=database,
            entropy=self.entropy,
            telemetry=self._telemetry,
            wakeups=self._wakeups,
            calls=self._calls or RealCalls(),
            keeper=Keeper(database, self._telemetry),
            partials=Partials(database, self._wakeups),
            folding=Folding(database),
            poll=poll,
            retention=config.retention(settings),
            counts=Counter(),
            started=database.clock.wall(),
        )

    def runtime(
        self,
        *,
        only: Sequence[Part] = PARTS,
        grace: int = GRACE,
        poll: int = POLL,
        pump_interval: Span | None = None,
    ) -> Runtime:
        """The loops of one process. Lengths of time in microseconds."""
        return Runtime(self.parts(poll=poll), only, grace=grace, pump_interval=pump_interval)

    @asynccontextmanager
    async def resources(self) -> AsyncIterator[None]:
        """The user's own lifespan around loops: what it yields is `state`."""
        if self._user_lifespan is None:
            yield
            return
        async with self._user_lifespan(self) as state:
            self.state = state
            yield

    @asynccontextmanager
    async def _lifespan(self) -> AsyncIterator[None]:
        async with self.running():
            yield
        self.close()

    def _open(self) -> Database:
        database = self._connect()
        try:
            if self._migrates(database):
                migrations.migrate(database)
            else:
                database.read(migrations.check)
            for said in database.read(dialects.check_server):
                logger.warning("%s", said)
        except BaseException:
            database.close()
            self._connected = None
            raise
        return database

    def _connect(self) -> Database:
        if self._connected is None:
            source = self._source if self._source is not None else config.database_url(None)[0]
            schema = self.settings()["schema"].value
            database = Database(source, schema=schema)
            if database.is_sqlite:
                if schema is not None:
                    raise Refused("SQLite has no schemas; leave `schema` out.", field="schema")
                sqlite_version.warn_of_sqlite_fault()
            self._connected = database
        return self._connected

    def _migrates(self, database: Database) -> bool:
        return self._migrate if self._migrate is not None else database.is_sqlite

    def _database_of(self, connection: Connection | None) -> Database:
        """The database of a user's transaction.

        On SQLite that transaction holds the one write lock, so that the first use of a new file brings the schema
        up to date inside it. Whether it is committed is not known here: the next one looks again.
        """
        if connection is None or connection.dialect.name != "sqlite" or self._opened is not None:
            return self.database
        with self._opening:
            database = self._opened or self._connect()
        if database is self._opened or not borrowed.same_file(connection, database.engine):
            return self.database
        if self._migrates(database):
            migrations.climb(database.bind(connection), now=database.clock.wall())
        else:
            migrations.check(database.bind(connection))
        return database

    def _reporting(self) -> Reporting:
        return Reporting(self.database, self._wakeups, self.hub(), self._registry.owner_of)

    def _announce(self, records: Records) -> None:
        self._wakeups.announce(records.topics)


def _limit(limit: int) -> int:
    return whole(limit, "limit", most=READ_MAX)


def _seq(after: int) -> int:
    return whole(after, "after", least=0, most=2**63 - 1)
