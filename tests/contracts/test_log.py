"""The log's contract over both databases, and every way to run a transaction."""

from postroad.testing.contracts.log import LogContract, LogRaces


class TestLog(LogContract):
    """In the ways of the fixture `run`."""


class TestLogRaces(LogRaces):
    """With several connections."""
