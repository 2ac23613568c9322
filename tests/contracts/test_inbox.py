"""The inbox's contract over both databases, and every way to run a transaction."""

import pytest

from postroad.model.errors import ConcurrencyConflict
from postroad.store import inbox
from postroad.testing.contracts.inbox import InboxContract, InboxRaces
from postroad.testing.contracts.streams import Run, event, waits


class TestInbox(InboxContract):
    """In the ways of the fixture `run`."""


class TestInboxRaces(InboxRaces):
    """With several connections."""


def test_publishing_gives_up(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """An event that can neither be inserted nor found, time and again, is an error, and nothing was written."""
    monkeypatch.setattr(inbox, "_held", lambda *_args: {})
    run(inbox.publish, [event(1)])
    with pytest.raises(ConcurrencyConflict):
        run(inbox.publish, [event(1), event(2)])
    assert [name for _, name, _ in run(waits)] == ["e1"]
