"""What the webhook transport sends, and what it makes of what comes back."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import standardwebhooks
from hypothesis import given, settings
from hypothesis import strategies as st

from postroad import Dispatch, GiveUp, InvalidInput, OutcomeUnknown, Receipt, RetryLater, Webhook, webhooks
from postroad.model.clock import FakeClock
from postroad.model.errors import Verdict
from postroad.transports.webhook import retry_after
from tests.transports.receivers import OTHER, SECRET, answers, app, dispatch, receiving, says, silent

NOW = datetime(2026, 1, 5, 7, 0, tzinfo=UTC)


def hook(**options: Any) -> Webhook:
    """A webhook that may go to the tests' own servers."""
    return Webhook(**{"secret": SECRET, "allow_private": True, **options})


async def sent(behave: Any, transport: Webhook | None = None, **fields: Any) -> Receipt | Verdict:
    """What a send to a server that behaves like this came to."""
    async with receiving(behave) as receiver:
        try:
            return await (transport or hook()).send(dispatch(receiver.url, **fields))
        except Verdict as verdict:
            return verdict


async def test_a_receiver_can_verify_what_it_gets() -> None:
    """The reference library and our helper accept the request; the body is the envelope, the id the dispatch's."""
    async with receiving(answers(200)) as receiver:
        await hook().send(dispatch(receiver.url, attempt=3))
    headers, body = receiver.requests[0]
    assert headers[":line"] == "POST /hook HTTP/1.1"
    assert standardwebhooks.Webhook(SECRET).verify(body, headers)["attempt"] == 3
    assert webhooks.verify(body, headers, SECRET) == dispatch("").id
    assert headers["content-type"] == "application/json"
    assert headers["idempotency-key"] == "order/1/paid"
    assert headers["accept-encoding"] == "identity"
    assert json.loads(body)["key"] == "order/1/paid"


async def test_an_attempt_has_its_own_timestamp_and_the_same_id() -> None:
    """A later attempt keeps the id and is signed with its own time, by the app's clock."""
    clock = FakeClock(NOW)
    async with receiving(answers(200)) as receiver:
        for attempt in (1, 2):
            await hook().send(dispatch(
                receiver.url, attempt=attempt, post=app(clock), deadline=clock.now + timedelta(seconds=5)
            ))  # fmt: skip
            clock.advance(3_600)
    first, second = (headers for headers, _ in receiver.requests)
    assert first["webhook-id"] == second["webhook-id"]
    assert int(second["webhook-timestamp"]) - int(first["webhook-timestamp"]) == 3_600
    assert int(first["webhook-timestamp"]) == NOW.timestamp()


async def choose_later(d: Dispatch[Any]) -> list[str]:
    await asyncio.sleep(0)
    return [SECRET, OTHER]


@pytest.mark.parametrize("secret", [[SECRET, OTHER], lambda d: (SECRET, OTHER), choose_later])
async def test_secrets_are_exchanged_without_a_gap(secret: Any) -> None:
    """With two secrets, given or chosen, a receiver that knows either of them accepts the request."""
    async with receiving(answers(200)) as receiver:
        await hook(secret=secret).send(dispatch(receiver.url))
    headers, body = receiver.requests[0]
    assert len(headers["webhook-signature"].split(" ")) == 2
    for known in (SECRET, OTHER):
        assert webhooks.verify(body, headers, known)
        standardwebhooks.Webhook(known).verify(body, headers)


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
async def test_any_2xx_is_success(status: int) -> None:
    """Any 2xx is success; the receipt has the status and the provider's reference, made fit to be shown."""
    receipt = await sent(answers(status, x_request_id="req-\u009b1"))
    assert receipt == Receipt("req-\\x9b1", {"status": status})


@pytest.mark.parametrize("status", [300, 301, 302, 303, 304, 307, 308])
async def test_a_redirect_is_a_failure_and_is_not_followed(status: int) -> None:
    """A redirect fails the attempt and says so; nobody connects to where it leads."""
    async with receiving(answers(200)) as trap:
        said = await sent(answers(status, location=trap.url))
    assert isinstance(said, RetryLater)
    assert "redirect" in str(said)
    assert trap.connections == 0


@pytest.mark.parametrize("status", [400, 401, 403, 404, 408, 409, 413, 425, 429, 500, 501, 503, 599, 999])
async def test_any_other_status_is_tried_again(status: int) -> None:
    """Statuses without a meaning of their own fail the attempt, with the status in the error."""
    said = await sent(answers(status))
    assert isinstance(said, RetryLater)
    assert str(status) in str(said)
    assert said.after is None


async def test_gone_is_permanent() -> None:
    """410 says that this receiver wants no more."""
    assert isinstance(await sent(answers(410)), GiveUp)


@pytest.mark.parametrize("status", [502, 504])
async def test_a_gateway_s_silence_is_unknown(status: int) -> None:
    """A gateway that got no answer can't say whether the receiver acted."""
    assert isinstance(await sent(answers(status)), OutcomeUnknown)


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"HTTP/1.1 2", b"HTTP/1.1 200 OK\r\nContent-", b"hello\r\n\r\n", b"\x16\x03\x01", b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    ],
)  # fmt: skip
async def test_no_answer_or_no_http_is_unknown(raw: bytes) -> None:
    """Once something was sent, a connection that ends or speaks nonsense leaves open what became of it."""
    said = await sent(says(raw))
    assert isinstance(said, OutcomeUnknown)
    assert "while waiting for the answer" in str(said)
    assert ("closed without an answer" in str(said)) is (raw in (b"", b"HTTP/1.1 2", b"HTTP/1.1 200 OK\r\nContent-"))


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.0 200 OK\r\n\r\nbye", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 103 Early Hints\r\nLink: <x>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No\r\n\r\n",
    ],
)  # fmt: skip
async def test_the_status_decides_whatever_the_body_does(raw: bytes) -> None:
    """A 2xx whose body is cut, broken or endless is success all the same."""
    assert isinstance(await sent(says(raw)), Receipt)


async def test_an_early_answer_is_heard() -> None:
    """A receiver that refuses a large request before it has read it is heard."""
    large = '{"text":"' + "x" * 250_000 + '"}'
    async with receiving(answers(413), reads=False) as receiver:
        with pytest.raises((RetryLater, OutcomeUnknown)) as caught:
            await hook().send(dispatch(receiver.url, raw=large, body=json.loads(large)))
    assert "413" in str(caught.value) or "while waiting for the answer" in str(caught.value)


async def test_a_refused_connection_is_a_plain_failure() -> None:
    """Nothing was sent, so nothing is unknown."""
    async with receiving(silent) as receiver:
        pass
    with pytest.raises(RetryLater, match="while connecting"):
        await hook().send(dispatch(receiver.url))


async def test_a_failure_keeps_a_bounded_harmless_snippet() -> None:
    """Of a failure's body 500 characters are kept, with what a terminal would obey or hide escaped."""
    body = "\x1b[31mred\x00\u202eevil\r\nnext".encode() + b"\xff" + b"x" * 10_000
    said = str(await sent(answers(500, body)))
    assert "\\x1b[31mred\\x00\\u202eevil\\r\\nnext\\xff" in said
    assert said.isprintable()
    assert len(said) < 600


async def test_a_packed_body_is_never_unpacked() -> None:
    """Of a body with a content encoding nothing is kept."""
    said = str(await sent(answers(500, b"\x1f\x8b" + b"x" * 100, content_encoding="gzip")))
    assert said.endswith("answered 500")


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("120", 120), ("0", 0), (" 7\t", 7), ("9999999999", 86_400), ("9" * 5_000, 86_400), ("-5", None), ("abc", None),
        ("", None), ("1.5", None), ("٣", None), ("120, 60", None), ("Mon, 05 Jan 2026 07:02:00 GMT", 120),
        ("Monday, 05-Jan-26 07:02:00 GMT", 120), ("Mon Jan  5 07:02:00 2026", 120),
        ("Mon, 05 Jan 2026 06:00:00 GMT", 0), ("Mon, 05 Jan 2999 07:00:00 GMT", 86_400),
        ("Mon, 99 Jan 2026 07:00:00 GMT", None), ("Mon, 05 Jan 99999 07:00:00 GMT", None),
    ],
)  # fmt: skip
def test_retry_after(value: str, seconds: float | None) -> None:
    """Retry-After is read in its three forms of date and as seconds, kept within 24 h; nonsense counts as none."""
    assert retry_after(value, NOW) == seconds


@given(st.one_of(st.text(max_size=60), st.from_regex(r"\A[A-Z][a-z]{2}, \d+ [A-Z][a-z]{2} \d+ \d+:\d+:\d+ [A-Z+-]\w*")))
def test_no_retry_after_does_harm(value: str) -> None:
    """Whatever stands there, it is a length of time from 0 to 24 h or none."""
    found = retry_after(value, NOW)
    assert found is None or 0 <= found <= 86_400


@pytest.mark.parametrize("status", [429, 503, 500, 413])
async def test_a_destination_says_when_to_come_back(status: int) -> None:
    """Any answer that is tried again may say when."""
    said = await sent(answers(status, retry_after="120"))
    assert isinstance(said, RetryLater)
    assert said.after == 120


@settings(max_examples=60, deadline=None)
@given(key=st.text(min_size=1, max_size=40), trace=st.text(max_size=40), path=st.text("/a.~%2F?&=@:;", max_size=20))
def test_what_users_choose_cannot_break_the_request(key: str, trace: str, path: str) -> None:
    """A key or trace context that no header can carry is left out; nothing in them or the URL adds a line."""

    async def exchange() -> dict[str, str]:
        async with receiving(answers(200)) as receiver:
            url = f"{receiver.url}{path}"
            await hook().send(dispatch(url, key=key, headers={"traceparent": trace, "host": "evil", "x": key}))
        assert receiver.requests[0][0][":line"] == f"POST /hook{path} HTTP/1.1"
        return receiver.requests[0][0]

    headers = asyncio.run(exchange())
    assert headers.get("idempotency-key") in (key, None)
    assert headers.get("traceparent") in (trace, None)
    assert set(headers) - {"idempotency-key", "traceparent"} == {
        ":line", "host", "user-agent", "content-type", "content-length", "accept-encoding", "connection",
        "webhook-id", "webhook-timestamp", "webhook-signature",
    }  # fmt: skip
    assert headers["host"].startswith("127.0.0.1:")


async def test_own_headers_are_sent() -> None:
    """What the receiver wants besides is sent; a user agent may be replaced."""
    async with receiving(answers(200)) as receiver:
        transport = hook(headers={"Authorization": "Bearer x", "User-Agent": "shop"})
        await transport.send(dispatch(receiver.url))
    headers = receiver.requests[0][0]
    assert (headers["authorization"], headers["user-agent"]) == ("Bearer x", "shop")


@pytest.mark.parametrize(
    "options",
    [
        {"secret": "whsec_short"}, {"secret": []}, {"secret": "canary" + SECRET}, {"secret": [SECRET, 5]},
        {"secret": SECRET, "headers": {"Host": "canary"}}, {"secret": SECRET, "headers": {"Webhook-Id": "canary"}},
        {"secret": SECRET, "headers": {"a b": "canary"}}, {"secret": SECRET, "headers": {"X": "canary\r\nY: 1"}},
        {"secret": SECRET, "headers": {"X": ""}}, {"secret": SECRET, "ports": [0]},
        {"secret": SECRET, "ports": ["443"]}, {"secret": SECRET, "resolver": "canary"},
    ],
)  # fmt: skip
def test_what_is_malformed_is_refused_at_construction(options: dict[str, Any]) -> None:
    """A malformed secret, header, port or resolver is refused at once, and secrets are not shown."""
    with pytest.raises(InvalidInput) as caught:
        Webhook(**options)
    assert "canary" not in str(caught.value) or "resolver" in options


@pytest.mark.parametrize("choose", [lambda d: "whsec_canary", lambda d: [], lambda d: None])
async def test_a_malformed_chosen_secret_fails_the_attempt(choose: Callable[[Any], Any]) -> None:
    """A function that gives no secret fails the attempt, to be tried again once it is put right; nothing is sent."""
    async with receiving(answers(200)) as receiver:
        with pytest.raises(InvalidInput) as caught:
            await hook(secret=choose).send(dispatch(receiver.url))
    assert receiver.connections == 0
    assert "canary" not in str(caught.value)


CANARIES = ("canary-path", "canary-query", "canary-user", "canary-header", SECRET, OTHER)


@pytest.mark.parametrize(
    "to",
    [
        "https://canary-user@127.0.0.1/canary-path", "https://127.0.0.1/canary-path?canary-query",
        "http://canary-user:x@host.test/", "ftp://canary-path/", "https://host.test:99/canary-path",
        "http://127.0.0.1:{port}/canary-path?token=canary-query", "https://[::1]/canary-path",
    ],
)  # fmt: skip
async def test_errors_and_representations_show_no_secrets(to: str) -> None:
    """No verdict and no repr shows a secret, an own header, a user, a path or a query."""
    transport = hook(secret=[SECRET, OTHER], headers={"x-token": "canary-header"}, allow_private="{port}" in to)
    async with receiving(answers(500)) as receiver:
        with pytest.raises(Verdict) as caught:
            await transport.send(dispatch(to.replace("{port}", str(receiver.port))))
    shown = f"{caught.value!s} {caught.value!r} {transport!r} {caught.value.__cause__}"
    assert not [canary for canary in CANARIES if canary in shown]


def test_one_transport_serves_several_event_loops() -> None:
    """A transport keeps nothing of an event loop: it is used in one after the other."""
    transport = hook()
    for _ in range(2):
        assert isinstance(asyncio.run(sent(answers(200), transport)), Receipt)


def test_the_package_s_import_loads_no_http() -> None:
    """`import postroad`, and a declared Webhook that has sent nothing, load no HTTP library."""
    code = f"import sys, postroad; postroad.Webhook(secret={SECRET!r}); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert not re.search(r"\b(h11|httpx|httpcore|anyio)\b", done.stdout)
