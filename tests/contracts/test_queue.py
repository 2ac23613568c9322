"""The queue's contract over both databases, and every way to run a transaction."""

from postroad.testing.contracts.queue import ClaimContract, FrontContract, QueueRaces
from postroad.testing.contracts.queue_life import DebounceContract, LifeContract


class TestClaim(ClaimContract):
    """In the ways of the fixture `run`."""


class TestLife(LifeContract):
    """In the ways of the fixture `run`."""


class TestDebounce(DebounceContract):
    """In the ways of the fixture `run`."""


class TestFront(FrontContract):
    """In the ways of the fixture `run`."""


class TestQueueRaces(QueueRaces):
    """With several connections."""
