"""Bugs to plant in reports; `mutants` has the others, and says what a mutant is."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace

from postroad.engine import endings, run, worker
from postroad.engine import reports as engine_reports
from postroad.engine.reports import Reporting
from postroad.model.errors import SourceRefused
from postroad.model.events import REPORT_NAME
from postroad.model.reports import landed
from postroad.store import queues, reports, stopping, watching
from postroad.store.groups import Verb
from postroad.store.reports import accept
from postroad.store.statements import Statement
from postroad.testing.simulation.planting import Mutant, into

MUTANTS: dict[str, Mutant] = {}
planted = into(MUTANTS)


@planted("mix reports into the next turn's set")
def mixes_sorts() -> AbstractContextManager[object]:
    """A set is whatever waits first, reports and messages alike."""
    mixed = queues._SETS._sql.replace("WHERE report IS NULL OR", "WHERE 1 = 1 OR report IS NULL OR")
    return patch.object(queues, "_SETS", Statement(mixed))


@planted("wake a handler with every report")
@contextmanager
def wakes_everybody() -> Iterator[None]:
    """What lands is a turn like any other."""
    with patch.object(worker, "lands", _never), patch.object(run, "lands", _never):
        yield


def _never(claim: object, decider: object) -> bool:
    return False


@planted("bury a report at its turn's last attempt")
def buries_reports() -> AbstractContextManager[object]:
    """A report that a failing handler was woken with goes dead like a message."""
    return patch.object(endings, "_ALWAYS_RECORDED", endings._ALWAYS_RECORDED - {"postroad.report"})


@planted("withdraw reports when a stream is stopped")
def withdraws_reports() -> AbstractContextManager[object]:
    """A stop takes all that waits in front of it."""
    everything = stopping._WITHDRAW._sql.replace("kind NOT LIKE 'postroad.%%'", "kind <> 'postroad.stop'")
    return patch.object(stopping, "_WITHDRAW", Statement(everything))


@planted("the last words stand")
def takes_the_last_words() -> AbstractContextManager[object]:
    """A retry replaces what waits."""

    def accepts(conn: Any, batch: Any, *, now: int) -> Any:
        for one in batch:
            conn.exec_driver_sql(
                "UPDATE postroad_inbox SET data = ? WHERE stream = ? AND event_id = ? AND reason IS NULL",
                (one.event.data, one.event.stream, one.event.event_id),
            )
        return accept(conn, batch, now=now)

    return patch.object(engine_reports, "ACCEPT", Verb(run=accepts, names=engine_reports.ACCEPT.names))


@planted("wait before anything is written down")
def writes_nothing_down() -> AbstractContextManager[object]:
    """A caller is told that its report was accepted, and it stands nowhere."""

    def forgets(conn: Any, batch: Any, *, now: int) -> Any:
        return [None for _ in batch]

    return patch.object(engine_reports, "ACCEPT", Verb(run=forgets, names=engine_reports.ACCEPT.names))


@planted("take the newest entry before the lock")
def names_any_parent() -> AbstractContextManager[object]:
    """A report that lands beside others is the child of what stood there before all of them."""
    return patch.object(reports, "as_entries", lambda events, newest: [_child(event, newest) for event in events])


def _child(event: Any, newest: str | None) -> str:
    return landed(event.data, newest) if event.kind == REPORT_NAME else str(event.data)


@planted("a source is not looked at")
def takes_any_source() -> AbstractContextManager[object]:
    """A report is accepted wherever it says that it comes from."""
    return patch.object(reports, "_check_sources", lambda conn, batch, owner_of: None)


@planted("whose a source is, nobody asks")
def takes_any_owner() -> AbstractContextManager[object]:
    """A source counts if it is there, whosever it is."""
    real = reports._check_sources

    def check(conn: Any, batch: Any, owner_of: Any) -> None:
        real(conn, [replace(one, owner=None) for one in batch], owner_of)

    return patch.object(reports, "_check_sources", check)


@planted("the app is not asked whose a source is")
def asks_no_app() -> AbstractContextManager[object]:
    """A stream belongs to whom its name says, whatever the app knows of it."""
    real = reports._check_sources
    return patch.object(reports, "_check_sources", lambda conn, batch, owner_of: real(conn, batch, None))


@planted("what is refused is stored")
def stores_what_it_refuses() -> AbstractContextManager[object]:
    """A report is written down, and its caller hears that its source is refused."""
    real = Reporting._accept

    async def accepts(self: Any, report: Any) -> Any:
        try:
            return await real(self, report)
        except SourceRefused:
            await real(self, replace(report, source=None))
            raise

    return patch.object(Reporting, "_accept", accepts)


@planted("nobody is told that a report has landed")
def tells_nobody() -> AbstractContextManager[object]:
    """Whoever waits for a report is left waiting."""
    return patch.object(watching, "_ends", lambda conn, asked: {})
