"""Databases' URLs: which ones are ours to open. Nothing is connected here, and no password is shown."""

from sqlalchemy import make_url
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError

from postroad.model.errors import InvalidInput

# As users write them: the driver that we take for it. aiosqlite: an application's whose own engine is asynchronous.
_DRIVERS = {
    "sqlite": "sqlite",
    "sqlite+pysqlite": "sqlite",
    "sqlite+aiosqlite": "sqlite",
    "postgres": "postgresql+psycopg",
    "postgresql": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
}


def parsed(database: str | URL) -> URL:
    """The URL with the driver that we take for it.

    Raises:
        InvalidInput: It is no URL, or of a database or driver that we do not work with.
    """
    try:
        url = make_url(database)
    except (ArgumentError, ValueError):  # its text may hold a password
        raise InvalidInput(
            "database must be a URL such as sqlite:///app.db or postgresql://user@host:5432/name.", field="database"
        ) from None
    if url.drivername not in _DRIVERS:
        raise InvalidInput(f"database must be sqlite or postgresql (psycopg), got {url.drivername}.", field="database")
    if url.port is not None and not 0 < url.port < 65_536:
        raise InvalidInput(f"database must have a port from 1 to 65535, got {url.port}.", field="database")
    return url.set(drivername=_DRIVERS[url.drivername])


def checked(database: str | URL) -> URL:
    """The URL as `parsed`, if an engine can be made of it: with options that its driver takes, and of a file.

    Raises:
        InvalidInput: An engine of it could not connect, or not to what others see.
    """
    url = parsed(database)
    check_options(url)
    if url.get_backend_name() == "sqlite":
        refuse_memory(url)
    return url


def check_options(url: URL) -> None:
    """Refuse, with InvalidInput, options that the driver would stumble over when it connects."""
    try:
        args, options = url.get_dialect()().create_connect_args(url)
        if url.get_backend_name() == "postgresql":
            from psycopg import ProgrammingError
            from psycopg.conninfo import make_conninfo

            options.pop("prepare_threshold", None)  # ours is taken
            try:
                make_conninfo(*args, **options)
            except ProgrammingError as error:
                raise ValueError(f"libpq knows no such option ({', '.join(url.query)})") from error
    except (ArgumentError, ValueError, TypeError) as error:
        raise InvalidInput(f"database must have options that its driver takes: {error}.", field="database") from None


def refuse_memory(url: URL) -> None:
    """Refuse, with InvalidInput, a SQLite database that only its own connection sees."""
    name = url.database or ":memory:"
    if ":memory:" in name or url.query.get("mode") == "memory":
        raise InvalidInput("database must be a SQLite file: several connections share it.", field="database")
