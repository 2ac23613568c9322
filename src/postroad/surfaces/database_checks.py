"""What `postroad doctor` sees of an app's database. Nothing is created, migrated or changed."""

import os
import shlex
import sqlite3
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sqlalchemy import Engine

from postroad.engine.config import Setting, database_url, masked, secret_keys
from postroad.engine.declarations import Elsewhere
from postroad.model.clock import SECOND
from postroad.model.errors import InvalidInput, Refused, SchemaMismatch, UnknownKind
from postroad.store import dialects, health, migrations, sqlite_version
from postroad.store.database import Database
from postroad.store.executor import Inline
from postroad.surfaces import reading
from postroad.surfaces.checks import Check
from postroad.surfaces.cron_checks import of_crons
from postroad.surfaces.output import Unavailable, length

if TYPE_CHECKING:
    from postroad.engine.app import Postroad

CLOCKS_APART_MAX = 1 * SECOND
OVERDUE_MAX = 60 * SECOND
FULL = 2  # PRAGMA synchronous
_OF_SQLITE = ("", "-wal", "-shm")


def of_database(post: "Postroad", settings: Mapping[str, Setting]) -> Iterator[Check]:
    """Whether it is there, fits this code, keeps what is committed, and whether its work is done."""
    found = settings["database_url"]
    place = masked(found.value) if found.value else "no database"
    try:
        with _opened(post, settings) as database:
            version = database.read(migrations.current)
            yield Check("ok", "database", f"{place} ({found.source})")
            own = isinstance(post.source, Engine)
            yield from _of_sqlite(database, own_engine=own) if database.is_sqlite else _of_postgres(database)
            database.read(migrations.check)
            yield Check("ok", "schema", f"{version} fits this code")
            yield from _of_work(post, database, settings)
    except SchemaMismatch as error:
        yield Check("error", "schema", error.detail)
    except Unavailable as error:
        yield Check("error", "database", error.detail, "is it there, and may this user connect?")
    except InvalidInput as error:
        yield Check("error", "database", error.detail)


@contextmanager
def _opened(post: "Postroad", settings: Mapping[str, Setting]) -> Iterator[Database]:
    """The app's database as it will use it: through its own engine, if its code has one."""
    schema = settings["schema"].value
    if not isinstance(post.source, Engine):
        url = settings["database_url"].value
        with reading.opened_at(url if url is not None else database_url()[0], schema) as database:
            yield database
        return
    with reading.reachable(masked(str(post.source.url))):
        path = post.source.url.database or ""
        if post.source.dialect.name == "sqlite" and not os.path.isfile(path):
            raise Unavailable(f"There is no file {path}.")  # connecting would make one
        database = Database(
            post.source, schema=None if post.source.dialect.name == "sqlite" else schema, executor=Inline()
        )
        try:
            yield database
        finally:
            database.close()


def _of_postgres(database: Database) -> Iterator[Check]:
    try:
        losses = database.read(dialects.check_server)
    except Refused as error:
        yield Check("error", "server", error.detail)
        return
    for said in losses:
        yield Check("error", "server", said.rstrip("."), "switch it on")
    if not losses:
        yield Check("ok", "server", "a primary; fsync, full_page_writes and synchronous_commit are on")
    yield _clock(database)


def _clock(database: Database) -> Check:
    before = time.time_ns() // 1000
    server = database.read(dialects.database_micros) or before
    after = time.time_ns() // 1000
    apart = max(before - server, server - after, 0)
    if apart > CLOCKS_APART_MAX:
        return Check("warning", "clock", f"this machine's is {length(apart)} from the server's", "set both by NTP")
    return Check("ok", "clock", "this machine's is less than a second from the server's")


def _of_sqlite(database: Database, *, own_engine: bool) -> Iterator[Check]:
    version = sqlite3.sqlite_version
    if sqlite_version.has_fault():
        cure = "put `import postroad.bundled_sqlite` first in the app's module, or use SQLite 3.51.3 or newer"
        yield Check("warning", "sqlite", f"SQLite {version} can corrupt a file that several connections write to", cure)
    else:
        yield Check("ok", "sqlite", f"SQLite {version}")
    found = database.read(health.sqlite_settings)
    if found.journal != "wal" and not own_engine:  # read-only as we open it; the app's own opening changes it
        yield Check("note", "durability", f"journal_mode is {found.journal}", "it becomes wal when the app connects")
    elif found.journal != "wal":
        yield Check("error", "durability", f"journal_mode is {found.journal}", "the file must be on a local disk")
    elif found.synchronous < FULL:
        cure = "what was committed can be lost in a power cut; set it to FULL"
        yield Check("error", "durability", f"PRAGMA synchronous is {found.synchronous}", cure)
    else:
        yield Check("ok", "durability", "journal_mode is wal, synchronous is FULL")
    yield from _of_files(_path(database))


def _path(database: Database) -> str:
    """The file, whatever its URL looks like."""
    return str(database.read(lambda conn: conn.exec_driver_sql("PRAGMA database_list").first()[2]))


def _of_files(path: str) -> Iterator[Check]:
    files = [path + ending for ending in _OF_SQLITE if os.path.exists(path + ending)]
    if any(os.stat(file).st_mode & stat.S_IRWXO for file in files):
        cure = f"chmod o-rwx {shlex.join(files)}"
        yield Check("warning", "files", "every user of this machine may open the database", cure)
    elif not all(os.access(place, os.W_OK) for place in (*files, os.path.dirname(path))):
        yield Check("error", "files", f"{path} or its folder cannot be written to by this user", "chown or chmod them")
    else:
        yield Check("ok", "files", f"{path} is for its owner and group only")


def _of_work(post: "Postroad", database: Database, settings: Mapping[str, Setting]) -> Iterator[Check]:
    now = database.read(dialects.database_micros) or database.clock.wall()
    found = database.read(health.work, list(post.senders), now=now)
    yield from _of_queued(post, found)
    if found.asking_for_acks and not secret_keys(settings):
        waiting = f"{found.asking_for_acks} dispatches ask for an acknowledgement, and there is no key"
        yield Check("error", "secret_key", waiting, "set secret_key to the one that they were sent under")
    idle = found.attempted_ago is None or found.attempted_ago > OVERDUE_MAX
    if found.overdue > OVERDUE_MAX and idle:
        overdue = f"a dispatch of this app has been due for {length(found.overdue)}, and no attempt began lately"
        yield Check("warning", "dispatcher", overdue, "is `postroad run` up? `postroad dispatch why` tells what else")
    if found.pump_lag > OVERDUE_MAX:
        lag = f"a timer has been due for {length(found.pump_lag)}"
        yield Check("warning", "pump", lag, "is `postroad run` up, with `timers` among its loops?")
    yield from of_crons(post, database, now=now)


def _is_elsewhere(post: "Postroad", kind: str) -> bool:
    try:
        return isinstance(post.declared(kind), Elsewhere)
    except UnknownKind:
        return False


def _of_queued(post: "Postroad", found: health.Work) -> Iterator[Check]:
    """Kinds with unfinished dispatches that this app does not carry out."""
    strangers = 0
    for queued in (one for one in found.queued if one.kind not in post.senders):
        waiting = f"{queued.kind}: {queued.count}{' or more' if queued.more else ''} unfinished"
        waiting += f", the oldest for {length(queued.oldest_age)}"
        if _is_elsewhere(post, queued.kind):
            yield Check("note", "queued", f"{waiting}; another app is to carry them out")
            continue
        strangers += 1
        cure = "give the kind a sender or an alias here, or declare it by `elsewhere`"
        yield Check("error", "queued", f"{waiting}, and no handler here takes them", cure)
    if not strangers:
        yield Check("ok", "queued", "every queued kind has a handler here or is another app's")
