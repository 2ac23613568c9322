"""Whose a stream is: what its name says, or in half of the seeds what a table of the application's own does."""

import zlib

from sqlalchemy import Connection, text

from postroad.model import ids
from postroad.testing.simulation.options import Options

OWNERS = ("ann", "bob", "cid")
NOBODY = "nobody"
NEVER = "load/never"  # there is no such stream
TABLE = (
    "CREATE TABLE sim_owners (place INTEGER PRIMARY KEY, name TEXT)",
    f"INSERT INTO sim_owners VALUES {', '.join(map(str, enumerate(OWNERS)))}",
)
_ASK = text("SELECT name FROM sim_owners WHERE place = :place")


def owner_of(connection: Connection, stream: str) -> str | None:
    """What the application says of a stream's owner, by a query of its own."""
    return None if stream == NEVER else connection.execute(_ASK, {"place": _place(stream)}).scalar_one()


def owner(options: Options, stream: str) -> str:
    """Whose a stream is."""
    return OWNERS[_place(stream)] if options.owners else _named(stream)


def others(options: Options, stream: str) -> list[str]:
    """Whose it is not: nobody's, and where the application says itself whose it is not its name's either."""
    if not options.owners:
        return [NOBODY]
    return [NOBODY, _named(stream), *(name for name in OWNERS if name != owner(options, stream))]


def _named(stream: str) -> str:
    return ids.subject(stream).partition("/")[0]


def _place(stream: str) -> int:
    return zlib.crc32(stream.encode()) % len(OWNERS)
