"""`postroad ack`: a token, from where nobody else reads it, and the dispatch that it acknowledges."""

import getpass
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from postroad.engine import config
from postroad.engine.config import Setting
from postroad.engine.records import BEGIN, Records
from postroad.model.acks import Keyring
from postroad.store import migrations
from postroad.store.database import Database
from postroad.surfaces import configuring, piped, reading
from postroad.surfaces.output import say_error

TOKEN_BYTES_MAX = 4096
AS_ARGUMENT = (
    "a token on the command line is seen in the list of processes and kept in the shell's history: give it on stdin"
)


def acknowledge(token: str | None, reference: str | None, *, database: str | None, schema: str | None) -> str:
    """Acknowledge the dispatch that a token names (None: the token on stdin), and return its id.

    Raises:
        Refused: Of what cannot be acknowledged, as `Transaction.ack`.
        Unavailable: The database cannot be reached.
    """
    if token is not None:
        say_error(AS_ARGUMENT)
    settings = _settings(reference, database=database, schema=schema)
    presented = Keyring(config.secret_keys(settings)).read(_from_stdin() if token is None else token.strip())
    with _opened(settings) as opened:
        opened.group(BEGIN, Records(acks=[presented], tells=True))
    return presented.dispatch


def _settings(reference: str | None, *, database: str | None, schema: str | None) -> Mapping[str, Setting]:
    if database is not None and reading.parsed(database).password:
        say_error(reading.ON_THE_COMMAND_LINE)
    if reference is None:
        return config.settings({"database_url": database, "schema": schema})
    from postroad.surfaces.running import load

    return configuring.of_app(load(reference), database=database, schema=schema)


def _from_stdin() -> str:
    """The token that somebody types without an echo, or that is piped in."""
    if not piped.is_typed():
        return piped.read(TOKEN_BYTES_MAX, "TOKEN").decode("ascii", "replace").strip()
    try:
        return getpass.getpass("token: ").strip()
    except EOFError:  # nothing was typed, which is no token either
        return ""


@contextmanager
def _opened(settings: Mapping[str, Setting]) -> Iterator[Database]:
    place, _ = config.database_url(settings["database_url"].value)
    schema = settings["schema"].value
    with reading.opened_at(place, schema) as database:  # a file that is not ours stays as it is
        database.read(migrations.check)
    with reading.opened_at(place, schema, writing=True) as database:
        yield database
