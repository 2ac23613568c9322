"""`postroad report`: what a shell script has to tell a conversation, and whether it has landed."""

from postroad.engine.reports import Reporting, written
from postroad.engine.wakeups import Wakeups
from postroad.engine.watching import Hub
from postroad.model.clock import SECOND
from postroad.model.events import Entry
from postroad.model.lengths import read as length
from postroad.model.payload import PAYLOAD_BYTES_MAX
from postroad.surfaces import configuring, piped, reading


def report(
    stream: str, text: str, *, key: str, wait: str, source: str | None, owner: str | None, reference: str | None,
    database: str | None, schema: str | None,
) -> Entry | None:  # fmt: skip
    """Report a text (`-`: what stands on stdin) and wait for its entry; None: it was accepted, and will land.

    Raises:
        Refused: As `Postroad.report`; or the wait is no length of time, or nothing can be read from stdin.
        Unavailable: The database cannot be reached.
    """
    seconds = length(wait, "wait") / SECOND
    said = _from_stdin() if text == "-" else text
    if reference is not None:
        return _by_app(
            reference, stream, said, key=key, wait=seconds, source=source, owner=owner, database=database,
            schema=schema,
        )  # fmt: skip
    new = written(stream, said, key=key, source=source, owner=owner, on_conflict="keep")
    with reading.changing(database, schema, waiting=True) as opened:
        wakeups = Wakeups()
        hub = Hub(opened, wakeups)
        try:
            return Reporting(opened, wakeups, hub, None).report(new, seconds)
        finally:
            hub.close()


def _from_stdin() -> str:
    """What is piped in, without the end of its last line. Too long, or no UTF-8, it is refused like any such text."""
    return piped.read(PAYLOAD_BYTES_MAX + 1, "TEXT").decode("utf-8", "surrogateescape").rstrip("\n")


def _by_app(
    reference: str, stream: str, said: str, *, key: str, wait: float, source: str | None, owner: str | None,
    database: str | None, schema: str | None,
) -> Entry | None:  # fmt: skip
    """The same as an app would say it: by its code it knows whose a stream is."""
    from postroad.surfaces.running import load

    post = load(reference)
    configuring.of_app(post, database=database, schema=schema)
    if database is not None or schema is not None:
        post.reconfigure(database=database, schema=schema)
    try:
        with reading.reachable("the app's database"):
            return post.report(stream, said, key=key, wait=wait, source=source, owner=owner)
    finally:
        post.close()
