"""`postroad run APP`: the loops of an app as a process of their own, ended by signals.

What needs a database is imported after the app, which may want to settle itself which SQLite the process uses.
"""

import asyncio
import importlib
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from postroad.engine import refusals
from postroad.engine.config import DEFAULTS, database_url, masked, settings, unknown_variables
from postroad.engine.telemetry import logger
from postroad.model.clock import SECOND
from postroad.model.errors import InvalidInput, PostroadError
from postroad.model.payload import safe_error
from postroad.surfaces.configuring import of_app
from postroad.surfaces.output import WrongUse, escaped_lines, show_json, show_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from postroad.engine.app import Postroad
    from postroad.engine.running import Part

PARTS: "tuple[Part, ...]" = ("turns", "sends", "timers")
TOLD = ("attempted", "delivered", "dead_letter", "expired", "retried", "stale", "turns", "timers", "waiting")
GRACE_SECONDS = float(str(DEFAULTS["grace"]))
ENDED_AT_ONCE = 130
STOPS = (signal.SIGTERM, signal.SIGINT)
HARD_END_SECONDS = 4.0  # after the grace, for giving back what has not ended


class BadApp(InvalidInput):
    """This app cannot be run."""


class Stopping:
    """SIGTERM and SIGINT: the first one asks the loops to end, the second ends the process at once.

    Handlers of the signal module, not of the event loop, since a blocked loop must not keep the second from
    being heard; and from the very beginning, since an app's import may take long. A thread that nothing can hold up
    ends the process if it has not ended by itself within `patience` seconds after the first.
    """

    def __init__(self) -> None:
        self.patience = GRACE_SECONDS + HARD_END_SECONDS
        self._asked: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._event = asyncio.Event()

    def install(self) -> None:
        """Handle the signals from now on."""
        heard, hear = os.pipe()
        os.set_blocking(hear, False)
        # Written to when the signal comes, even while the main thread is busy in code that runs no handler.
        signal.set_wakeup_fd(hear, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(heard,), name="postroad-stopping", daemon=True).start()
        for number in STOPS:
            signal.signal(number, self._signalled)

    def _watch(self, heard: int) -> None:
        while os.read(heard, 1)[0] not in STOPS:
            pass
        time.sleep(self.patience)
        os.write(2, b"postroad: it does not end by itself: ended; its leases will free what it held\n")
        os._exit(ENDED_AT_ONCE)

    def event(self) -> asyncio.Event:
        """What is set once a signal has come; to be called in the loop that waits for it."""
        self._loop = asyncio.get_running_loop()
        if self._asked is not None:
            self._event.set()
        return self._event

    def _signalled(self, number: int, _frame: FrameType | None) -> None:
        if self._asked is not None:
            os._exit(ENDED_AT_ONCE)
        self._asked = signal.Signals(number).name
        # Not through logging, whose locks the interrupted code may hold.
        os.write(2, f"postroad: {self._asked}: ending what is under way; once more ends at once\n".encode())
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._event.set)


def run(
    reference: str,
    *,
    only: str | None = None,
    database: str | None = None,
    schema: str | None = None,
    grace: float | None = None,
    poll: float | None = None,
) -> None:
    """Run the app's loops until a signal comes.

    Raises:
        BadApp: It cannot be imported.
        InvalidInput: An option or a setting is wrong.
        SchemaMismatch: The database's schema is missing or does not fit this code.
        Unavailable: The database cannot be reached or read.
    """
    stopping = Stopping()
    stopping.install()
    log_to_stderr()
    parts = parts_of(only)
    lengths = lengths_of(grace, poll)
    stopping.patience = lengths["grace"] / SECOND + HARD_END_SECONDS
    post = _opened(reference, database, schema, grace=grace, poll=poll)
    from postroad.engine.running import run_bounded

    logger.info("%s runs %s on %s", reference, ", ".join(parts), place(post))
    run_bounded(_run(post, stopping, parts, lengths))
    logger.info("%s has ended", reference)


def run_once(
    reference: str, *, only: str | None = None, database: str | None = None, schema: str | None = None, as_json: bool
) -> None:
    """Work until nothing is due, and print what was done: for cron, and for a look at what an app does.

    Raises:
        As `run`.
    """
    log_to_stderr()
    parts = parts_of(only)
    post = _opened(reference, database, schema)
    try:
        drained = post.drain(only=parts)
    finally:
        post.close()
    counts = {name: getattr(drained, name) for name in TOLD}
    if as_json:
        show_json(counts)
    else:
        show_table(("", ""), [(name.replace("_", " "), count) for name, count in counts.items()])


def _opened(
    reference: str, database: str | None, schema: str | None, *, grace: float | None = None, poll: float | None = None
) -> "Postroad":
    """The app, with settings that it can run on, its database open, its failpoint armed and its telling heard."""
    if database is not None:
        database_url(database)
    post = load(reference)
    found = of_app(post, database=database, schema=schema, grace=grace, poll=poll)
    for said in unknown_variables():
        logger.warning("%s", said)
    for refused in refusals.refusals(found):
        raise refused
    _arm()
    post.reconfigure(database=database, schema=schema)
    open_database(post, database)
    post.observe(tell)
    return post


async def _run(post: "Postroad", stopping: Stopping, parts: "Sequence[Part]", lengths: "Mapping[str, int]") -> None:
    try:
        async with post.resources():
            await post.runtime(only=parts, **lengths).run(stopping.event())
    finally:
        post.close()


def load(reference: str) -> "Postroad":
    """The app that `module:attribute` names; the working directory is searched first.

    Raises:
        BadApp: There is no such module or attribute, or it is no Postroad.
    """
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    name, colon, attribute = reference.partition(":")
    if not (name and colon and attribute):
        raise BadApp(f"APP must look like module:attribute, got {reference!r}.", field="app")
    found = _import(name)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise BadApp(f"{name} has no attribute {attribute!r}.", field="app")
        found = getattr(found, part)
    from postroad.engine.app import Postroad

    if not isinstance(found, Postroad):
        raise BadApp(f"{reference} is a {type(found).__name__}, not a Postroad.", field="app")
    return found


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise BadApp(f"{name} could not be imported: {error}.", field="app") from error
        raise BadApp(
            f"There is no module {error.name!r} here; the working directory is {os.getcwd()}.", field="app"
        ) from error
    except PostroadError:
        raise
    except Exception as error:
        logger.exception("importing %s failed", name)
        raise BadApp(f"{name} could not be imported: {safe_error(error)}", field="app") from error


def lengths_of(grace: float | None, poll: float | None) -> dict[str, int]:
    """The grace and the poll interval of the options or the settings, in microseconds."""
    chosen = settings({"grace": grace, "poll": poll})
    return {"grace": refusals.grace(chosen), "poll": refusals.poll(chosen)}


def open_database(post: "Postroad", database: str | None) -> None:
    """Open the app's database and hold its schema against this code; whatever is warned of is told as a line.

    Raises:
        Unavailable: It cannot be reached or read.
        WrongUse: Its URL is none.
    """
    from postroad.surfaces.reading import ON_THE_COMMAND_LINE, parsed, reachable

    source = database or post.source or database_url(None)[0]
    if isinstance(source, str):
        parsed(source)
    with once_readable(), reachable(masked(source if isinstance(source, str) else str(source.url))):
        post.check_schema()
    if database is not None and parsed(database).password:
        logger.warning("%s", ON_THE_COMMAND_LINE)


def parts_of(only: str | None) -> "tuple[Part, ...]":
    """The loops of a list such as `turns,sends`; all of them for None."""
    names = [name.strip() for name in (only or ",".join(PARTS)).split(",")]
    if unknown := [name for name in names if name not in PARTS]:
        raise WrongUse(f"--only takes {', '.join(PARTS)}, got {unknown[0]!r}.", field="only")
    return tuple(part for part in PARTS if part in names)


def place(post: "Postroad") -> str:
    """Where an app's rows are, without secrets."""
    database = post.database
    url = masked(database.engine.url.render_as_string(hide_password=True))
    return f"{url}, schema {database.schema}" if database.schema else url


class Readable(logging.Formatter):
    """One line per record that a terminal may show; a traceback follows on lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        return escaped_lines(super().format(record))


def log_to_stderr() -> None:
    """Have our log written to stderr, and whatever libraries warn of."""
    handler = logging.StreamHandler()
    handler.setFormatter(Readable("%(asctime)s %(name)s %(levelname)s: %(message)s", "%H:%M:%S"))
    logging.getLogger().addHandler(handler)
    logger.setLevel(logging.INFO)


@contextmanager
def once_readable() -> "Iterator[None]":
    """Show a warning as a line of the log, without the place in the source that gave it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        yield
    for said in _distinct(str(one.message) for one in caught):
        logger.warning("%s", said)


def _distinct(texts: "Iterable[str]") -> list[str]:
    return list(dict.fromkeys(texts))


def tell(name: str, values: "Mapping[str, Any]") -> None:
    """Write a line about what an operator would want to know at once."""
    match name:
        case "dispatch.settled" if values["status"] in ("dead_letter", "expired") and not values["stale"]:
            logger.warning("dispatch %s ended: %s", values["id"], values["reason"])
        case "dispatch.settled" if values["stale"] and values["status"] != "acked":
            logger.warning("dispatch %s: an attempt ended after its claim was over: %s", values["id"], values["reason"])
        case "lease.lost":
            logger.warning("the claim of %s is lost; its turn is given up", values["subject"])
        case "turn.ended" if values["end"] not in ("committed", "released"):
            said = f": {values['error']}" if values["error"] else ""
            logger.warning("turn of %s, attempt %d: %s%s", values["stream"], values["attempt"], values["end"], said)
        case _:
            return


def _arm() -> None:
    if os.environ.get("POSTROAD_FAILPOINT"):
        from postroad.testing.failpoints import arm_from_environment

        logger.warning("armed: this process kills itself at %s", arm_from_environment())
