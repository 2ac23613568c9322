"""Acknowledgements over both databases and every way to run a transaction; and what a crash leaves of one."""

from contextlib import suppress
from itertools import count

from postroad.store.acks import acknowledge
from postroad.store.database import Database
from postroad.testing.contracts import acks
from postroad.testing.contracts.dispatches import enqueue, everything, history
from tests.contracts import striking
from tests.contracts.conftest import run_directly


class TestAck(acks.AckContract):
    """The consumer's word."""


class TestAckWait(acks.AckWaitContract):
    """What was sent, and not acknowledged yet."""


def test_a_crash_at_any_statement(database: Database) -> None:
    """Whichever statement of an ack, COMMIT too, is not reached: it has not happened, and happens the next time."""
    run = run_directly(database)
    enqueue(run, acks.asking())
    acks.attempt(run)
    before = run(everything)
    for number in count(1):
        with suppress(striking.Crash), striking.striking(database, number) as seen:
            run(acknowledge, [acks.token()], actor="ann")
        if not seen.struck:
            break
        assert run(everything) == before, f"before {seen.struck}"
    assert number > 7
    assert seen.statements[-1] == striking.COMMIT
    assert [reason for *_, reason in run(history)].count("dispatch.acked.consumer") == 1
