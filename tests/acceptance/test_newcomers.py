"""What people who tried to break it have found: each a promise of the documentation that did not hold."""

import os
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pydantic
import pytest

from postroad import (
    Dispatch,
    DispatchFilter,
    GiveUp,
    InvalidInput,
    Kind,
    OutcomeUnknown,
    Postroad,
    Refused,
    Retry,
    RetryLater,
)
from tests.cases.apps import OpenApp, open_app
from tests.engine.conftest import Open, harness, place

__all__ = ["harness", "open_app", "place"]
MAIL = Kind("mail", dict[str, str])


def test_a_drain_ends_beside_a_sender_that_ignores_its_cancellation(open_app: OpenApp) -> None:
    """An async sender that goes on after its timeout, whatever it is told, is left behind, and the drain ends."""
    post = open_app()
    released = threading.Event()

    @post.sender(MAIL, timeout=0.2, retry=Retry(attempts=1))
    async def stubborn(d: Dispatch[dict[str, str]]) -> None:
        import asyncio

        while not released.is_set():
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue

    with post.begin() as tx:
        tx.send(MAIL, {}, key="k")
    drained: list[Any] = []
    thread = threading.Thread(target=lambda: drained.append(post.drain()), daemon=True)
    thread.start()
    thread.join(timeout=30)
    released.set()
    assert drained[0].attempted == 1
    row = post.dispatches.get("k")
    assert row is not None
    assert row.last_error == "timeout after 0.2 s, still running"


def test_a_dry_run_counts_what_would_be_done(harness: Open) -> None:
    """A bulk retry leaves alone what a person has to think about; its dry run says the same and changes nothing."""
    post = Postroad()

    @post.sender(MAIL, on_unknown="park", retry=Retry(attempts=1))
    def mail(d: Dispatch[dict[str, str]]) -> None:
        raise OutcomeUnknown("no answer") if d.key == "parked" else GiveUp("no such address")

    h = harness(post, senders="run")
    with post.begin() as tx:
        for key in ("dead", "parked"):
            tx.send(MAIL, {}, key=key)
    h.drain()
    wanted = DispatchFilter(status="dead_letter")
    would = post.dispatches.retry(wanted, actor="ann", dry_run=True)
    assert would.said == "1 of 2 would be retried"
    assert {row.status for row in post.dispatches.list()} == {"dead_letter"}
    done = post.dispatches.retry(wanted, actor="ann")
    assert done.said == "1 of 2 were retried"
    assert done.refused == would.refused


@pytest.mark.parametrize("after", ["60", -1, float("nan"), float("inf"), 1e12, timedelta.max])
def test_a_pause_that_is_none_is_told(harness: Open, after: Any) -> None:
    """RetryLater with what is no length of time waits as the schedule says, and the row's error says why."""
    h = refusing(harness, after)
    row = h.post.dispatches.get("k")
    assert row is not None
    assert row.last_error is not None
    assert row.last_error.startswith("busy (after=")


def refusing(harness: Open, after: Any) -> Any:
    post = Postroad()

    @post.sender(MAIL, retry=Retry(attempts=3, first=1, cap=1))
    def mail(d: Dispatch[dict[str, str]]) -> None:
        raise RetryLater("busy", after=after)

    h = harness(post, senders="run")
    with post.begin() as tx:
        tx.send(MAIL, {}, key="k")
    h.drain()
    return h


def test_what_withdraw_answers_cannot_be_misread(harness: Open) -> None:
    """It is true only if the dispatch was ended, and before the block is left nobody can ask."""
    post = Postroad()
    post.elsewhere(MAIL)
    harness(post)
    with post.begin() as tx:
        tx.send(MAIL, {}, key="k")
    with post.begin() as tx:
        there, gone = tx.withdraw("k"), tx.withdraw("nobody's")
        with pytest.raises(Refused, match="when the block is left"):
            bool(there)
        assert repr(there) == "Withdrawn(done=?)"
    assert (bool(there), bool(gone), repr(gone)) == (True, False, "Withdrawn(done=False)")


class Login(pydantic.BaseModel):
    """A payload of which pydantic writes less than there is."""

    password: pydantic.SecretStr
    hidden: int = pydantic.Field(5, exclude=True)


def test_a_payload_that_would_arrive_changed_is_refused(harness: Open) -> None:
    """What pydantic masks or leaves out of its JSON is refused by the verb, with the fields' names."""
    post = Postroad()
    kind = Kind("login", Login)
    post.elsewhere(kind)
    harness(post)
    with pytest.raises(InvalidInput, match="hidden, password"), post.begin() as tx:
        tx.send(kind, Login(password=pydantic.SecretStr("s3cret"), hidden=9))


def test_none_is_a_payload_of_a_kind_that_takes_it(harness: Open) -> None:
    """A body of None is None where the kind has it, and {} elsewhere."""
    post = Postroad()
    optional: Kind[Any] = Kind("optional", int | None)  # type: ignore[arg-type]
    post.sender(optional)(lambda d: None)
    post.sender(MAIL)(lambda d: None)
    h = harness(post)
    with post.begin() as tx:
        tx.send(optional, None, key="none")
        tx.send(MAIL, None, key="empty")
    h.drain()
    assert [d.body for d in h.sent(optional)] == [None]
    assert [d.body for d in h.sent(MAIL)] == [{}]


@pytest.mark.parametrize("ack", ["no", 1, None])
def test_ack_is_yes_or_no(harness: Open, ack: Any) -> None:
    """Whatever is neither True nor False is refused by the verb."""
    post = Postroad(secret_key="a key of sixteen")
    post.elsewhere(MAIL)
    harness(post)
    with pytest.raises(InvalidInput, match="ack must be True or False"), post.begin() as tx:
        tx.send(MAIL, {}, ack=ack)


@pytest.mark.acceptance
@pytest.mark.parametrize("command", [("dispatch", "why", "nobody's"), ("dispatch", "show", "nobody's"), ("ack",)])
def test_an_app_with_the_bundled_sqlite_is_loaded_first(tmp_path: Path, command: tuple[str, ...]) -> None:
    """An app whose first line takes the bundled SQLite can be named with --app, as `postroad run` takes it."""
    (tmp_path / "app.py").write_text(
        "import postroad.bundled_sqlite\nfrom postroad import Postroad\n"
        "post = Postroad('sqlite:///app.db', secret_key='a key of sixteen')\n"
    )
    environ = {name: value for name, value in os.environ.items() if not name.startswith("POSTROAD")}
    done = subprocess.run(
        [sys.executable, "-m", "postroad", *command, "--app", "app:post"], cwd=tmp_path, env=environ,
        input="no token", capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert "ImportError" not in done.stderr
    assert "sqlite3 was imported before" not in done.stderr
