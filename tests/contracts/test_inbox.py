"""The inbox's contract over both databases, and every way to run a transaction."""

from postroad.testing.contracts.inbox import InboxContract, InboxRaces


class TestInbox(InboxContract):
    """In the ways of the fixture `run`."""


class TestInboxRaces(InboxRaces):
    """With several connections."""
