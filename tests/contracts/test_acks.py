"""Acknowledgements over both databases and every way to run a transaction; and what a crash leaves of one."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count

from sqlalchemy import event

from postroad.store.acks import acknowledge
from postroad.store.database import Database
from postroad.testing.contracts import acks
from postroad.testing.contracts.dispatches import enqueue, everything, history
from tests.contracts.conftest import run_directly


class TestAck(acks.AckContract):
    """The consumer's word."""


class TestAckWait(acks.AckWaitContract):
    """What was sent, and not acknowledged yet."""


class Crash(Exception):
    """The death of the process."""


@contextmanager
def dying_at(database: Database, number: int) -> Iterator[list[int]]:
    """End what is in the block before its statement of this number, COMMIT among them; whether that was reached."""
    reached = 0
    died: list[int] = []

    def count_down(*_context: object) -> None:
        nonlocal reached
        reached += 1
        if reached == number:
            died.append(number)
            raise Crash

    for name in ("before_cursor_execute", "commit"):
        event.listen(database.engine, name, count_down)
    try:
        with suppress(Crash):
            yield died
    finally:
        for name in ("before_cursor_execute", "commit"):
            event.remove(database.engine, name, count_down)


def test_a_crash_at_any_statement(database: Database) -> None:
    """Whichever statement of an ack, COMMIT too, is not reached: it has not happened, and happens the next time."""
    run = run_directly(database)
    enqueue(run, acks.asking())
    acks.attempt(run)
    before = run(everything)
    for number in count(1):
        with dying_at(database, number) as died:
            run(acknowledge, [acks.token()], actor="ann")
        if not died:
            break
        assert run(everything) == before, f"statement {number}"
    assert number > 7
    assert [reason for *_, reason in run(history)].count("dispatch.acked.consumer") == 1
