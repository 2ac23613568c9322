"""Webhooks to receivers that hang, flood, throttle, redirect or vanish, through the whole engine."""

import asyncio
import base64
import json
import socket
import threading
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from postroad import DispatchRow, Kind, Postroad, Retry, Webhook, webhooks
from postroad.store import gates
from tests.cases.apps import OpenApp, idle, until
from tests.transports.receivers import (
    SECRET,
    Behaviour,
    Receiver,
    answers,
    receiving_beside,
    repeats,
    says,
    silent,
)

PAID = Kind("paid", dict[str, int])
PING = Kind("ping", dict[str, int])
ONCE = Retry(attempts=1)


def hook(**options: Any) -> Webhook:
    return Webhook(**{"secret": SECRET, "allow_private": True, **options})


def send(post: Postroad, kind: Kind[Any], receiver: Receiver | str, *keys: str) -> None:
    to = receiver if isinstance(receiver, str) else receiver.url
    with post.begin() as tx:
        for key in keys:
            tx.send(kind, {"n": 1}, to=to, key=key)


def row_of(post: Postroad, key: str) -> DispatchRow:
    row = post.dispatches.get(key)
    assert row is not None
    return row


async def never(host: str, port: int) -> Sequence[str]:
    await asyncio.Event().wait()
    return []


async def closes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


HANGING: dict[str, tuple[Behaviour, dict[str, Any]]] = {
    "never answers": (silent, {}),
    "one header, then a byte at a time": (repeats(b"HTTP/1.1 200 OK\r\nX: ", b"x", times=6_000, pause=0.05), {}),
    "accepts and closes": (closes, {}),
    "slow DNS": (silent, {"resolver": never}),
}


@pytest.mark.parametrize("what", HANGING)
def test_a_hanging_receiver_ends_within_its_time(open_app: OpenApp, what: str) -> None:
    """Each attempt ends by its total deadline, inside its lease, and is settled once."""
    behave, options = HANGING[what]
    post = open_app()
    post.transport(PAID, hook(**options), timeout=1, retry=ONCE)
    with receiving_beside(behave) as receiver:
        send(post, PAID, receiver, *"abc")
        drained = post.drain()
    assert (drained.attempted, drained.dead_letter, drained.stale) == (3, 3, 0)
    for key in "abc":
        row = row_of(post, key)
        assert (row.status, row.attempt) == ("dead_letter", 1)
        assert " while " in str(row.last_error)


def test_a_host_where_nobody_listens_costs_no_attempts(open_app: OpenApp) -> None:
    """Its gate is closed under its own name and port, and another host's webhooks are delivered."""
    post = open_app()
    post.transport(PAID, hook())
    with receiving_beside(answers(200)) as gone:
        pass
    with receiving_beside(answers(200)) as there:
        send(post, PAID, gone, "a")
        drained = post.drain()
        assert (drained.attempted, drained.dead_letter) == (1, 0)
        send(post, PAID, there, "b")
        assert post.drain().delivered == 1
    row = row_of(post, "a")
    assert (row.status, row.attempt, row.reason) == ("pending", 0, "dispatch.pending.held")
    assert "while connecting" in str(row.last_error)
    (gate,) = post.database.read(gates.list_)
    assert (gate.kind, gate.host) == ("paid", gone.url.split("/")[2])


def full(post: Postroad) -> bool:
    """Whether all of a kind's room is taken by sends that hang."""
    return len(post.dispatches.list(status="delivering", kind="paid")) == 10


def deliver_beside(post: Postroad, receiver: Receiver) -> None:
    """See another kind's dispatches delivered while the first kind's room is taken."""
    until(lambda: full(post), "all sends of a kind hang")
    send(post, PING, receiver, *(f"ping/{n}" for n in range(50)))
    until(lambda: len(post.dispatches.list(status="delivered", kind="ping")) == 50, "the others are delivered")
    assert full(post)


def test_a_receiver_that_never_answers_holds_up_no_other_route(open_app: OpenApp) -> None:
    """While one kind's sends all hang, another's are delivered."""
    post = open_app()
    post.transport(PAID, hook(), timeout=60, retry=ONCE)
    post.transport(PING, hook())
    with receiving_beside(answers(200)) as healthy, post.running():
        with receiving_beside(silent) as hanging:
            send(post, PAID, hanging, *(f"paid/{n}" for n in range(10)))
            deliver_beside(post, healthy)
        until(lambda: idle(post), "nobody listens any more")
    assert len(post.dispatches.list(status="dead_letter", kind="paid")) == 10


def test_slow_dns_holds_up_no_other_route(open_app: OpenApp, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lookups that hang, more than an event loop has threads, keep no other lookup waiting."""
    ended, real = threading.Event(), socket.getaddrinfo

    def slow(host: Any, *args: Any, **options: Any) -> Any:
        if host == "slow.test":
            ended.wait(60)
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return real(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    post = open_app()
    post.transport(PAID, hook(), timeout=60, retry=ONCE)
    post.transport(PING, hook())
    with receiving_beside(answers(200)) as healthy, post.running():
        send(post, PAID, "http://slow.test/", *(f"paid/{n}" for n in range(10)))
        deliver_beside(post, healthy)
        ended.set()
        until(lambda: idle(post), "the lookups have ended")
    assert "Temporary failure" in str(row_of(post, "paid/0").last_error)


CHUNK = b"\x1b[2Jx\0" * 10_000
FLOODS: dict[str, tuple[Behaviour, str]] = {
    "200 MB after 200": (repeats(b"HTTP/1.1 200 OK\r\n\r\n", CHUNK, times=4_000), "delivered"),
    "200 MB after 500": (repeats(b"HTTP/1.1 500 No\r\n\r\n", CHUNK, times=4_000), "dead_letter"),
    "a header of 1 MB": (repeats(b"HTTP/1.1 200 OK\r\nX: ", CHUNK, times=20), "dead_letter"),
}


@pytest.mark.parametrize("what", FLOODS)
def test_of_an_answer_little_is_kept(open_app: OpenApp, what: str) -> None:
    """A flood is cut; what is stored and shown of it is short, and nothing in it is obeyed by a terminal."""
    behave, status = FLOODS[what]
    post = open_app()
    post.transport(PAID, hook(), retry=ONCE)
    with receiving_beside(behave) as receiver:
        send(post, PAID, receiver, "k")
        post.drain()
    row = row_of(post, "k")
    assert row.status == status
    assert (row.last_error or "").isprintable()
    assert len(row.last_error or "") < 700


SECONDS_OF_BACKOFF = 30.0
RETRY_AFTERS = {"120": 120, "DATE": 120, "9999999999": 86_400, "-5": 0, "abc": 0, "0": 0}


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("value", RETRY_AFTERS)
@pytest.mark.parametrize("jitter", [True, False])
def test_a_retry_after_is_a_floor(open_app: OpenApp, status: int, value: str, jitter: bool) -> None:
    """The next attempt is due no earlier than asked for, jitter or not, 24 h later at the most; nonsense is ignored."""
    begun = datetime.now(UTC).replace(microsecond=0)  # a date has whole seconds
    asked = begun + timedelta(seconds=RETRY_AFTERS[value])
    post = open_app()
    post.transport(PAID, hook(), retry=Retry(attempts=5, first=SECONDS_OF_BACKOFF, jitter=jitter))
    with receiving_beside(
        answers(status, retry_after=format_datetime(asked, usegmt=True) if value == "DATE" else value)
    ) as receiver:
        send(post, PAID, receiver, "k")
        drained = post.drain()
    row = row_of(post, "k")
    assert (row.status, row.attempt, drained.attempted, len(receiver.requests)) == ("pending", 1, 1, 1)
    assert row.due_at is not None
    backoff = begun + timedelta(seconds=SECONDS_OF_BACKOFF)
    assert row.due_at >= (asked if jitter else max(asked, backoff))
    assert row.due_at <= max(asked, backoff) + timedelta(seconds=60)  # this test may be slow


VERDICTS: dict[str, tuple[Behaviour, str, str]] = {
    "gone": (answers(410), "resend", "dispatch.dead_letter.permanent"),
    "a redirect": (answers(302, location="https://shop.test/"), "resend", "dispatch.dead_letter.max_attempts"),
    "no answer, resent": (says(b""), "resend", "dispatch.dead_letter.max_attempts"),
    "no answer, parked": (says(b""), "park", "dispatch.dead_letter.unknown_outcome"),
    "a gateway's silence, parked": (answers(504), "park", "dispatch.dead_letter.unknown_outcome"),
    "a failure where unknown ones are parked": (answers(500), "park", "dispatch.dead_letter.max_attempts"),
}


@pytest.mark.parametrize("what", VERDICTS)
def test_what_an_answer_means_for_the_dispatch(open_app: OpenApp, what: str) -> None:
    """Each answer ends the dispatch with the reason that fits; an unknown outcome follows `on_unknown`."""
    behave, on_unknown, reason = VERDICTS[what]
    post = open_app()
    post.transport(PAID, hook(), retry=Retry(attempts=2, first=0), on_unknown=on_unknown)
    with receiving_beside(behave) as receiver:
        send(post, PAID, receiver, "k")
        post.drain()
    assert row_of(post, "k").reason == reason
    assert len(receiver.requests) == (1 if "permanent" in reason or "unknown" in reason else 2)


def test_an_inner_address_is_a_dead_letter_at_once(open_app: OpenApp) -> None:
    """A destination that the address policy refuses is not tried again, and not connected to."""
    post = open_app()
    with receiving_beside(answers(200)) as receiver:
        post.transport(PAID, Webhook(secret=SECRET, ports=(receiver.port,)))
        send(post, PAID, f"https://localhost:{receiver.port}/hook?token=canary", "k")
        post.drain()
    row = row_of(post, "k")
    assert (row.status, row.reason) == ("dead_letter", "dispatch.dead_letter.permanent")
    assert "loopback" in str(row.last_error)
    assert "canary" not in str(row.last_error)
    assert receiver.connections == 0


def test_a_retried_webhook_is_recognised(open_app: OpenApp) -> None:
    """Each attempt carries the same verified id, so that a receiver which dedupes acts once."""
    acted: set[str] = set()

    async def loses_the_first_answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        headers, body = receiver.requests[-1]
        acted.add(webhooks.verify(body, headers, SECRET))
        if len(receiver.requests) > 1:
            writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
            await writer.drain()

    post = open_app()
    post.transport(PAID, hook(), retry=Retry(attempts=3, first=0))
    with receiving_beside(loses_the_first_answer) as receiver:
        send(post, PAID, receiver, "order/1/paid")
        assert post.drain().delivered == 1
    row = row_of(post, "order/1/paid")
    assert (row.status, row.attempt, acted) == ("delivered", 2, {row.id})
    bodies = [json.loads(body) for _, body in receiver.requests]
    assert [body["attempt"] for body in bodies] == [1, 2]
    assert {body["key"] for body in bodies} == {"order/1/paid"}


def test_no_secret_reaches_the_database(tmp_path: Path) -> None:
    """Whatever a webhook comes to, its secret and own headers are in no byte of the database's files."""
    canary = base64.b64encode(b"canary-key-of-32-bytes-canary-ab").decode()
    post = Postroad(f"sqlite:///{tmp_path}/shop.db")
    post.transport(PAID, hook(secret="whsec_" + canary, headers={"x-token": "canary-header"}), timeout=1, retry=ONCE)
    for n, behave in enumerate((answers(200), answers(500), answers(410), silent)):
        with receiving_beside(behave) as receiver:
            send(post, PAID, receiver, f"k{n}")
            post.drain()
    stored = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    post.close()
    assert b"answered 500" in stored
    assert canary.encode() not in stored
    assert b"canary-header" not in stored
    assert b"canary-key" not in stored
