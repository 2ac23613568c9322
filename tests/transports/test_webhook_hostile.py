"""Hostile destinations: each attempt ends within its time and its memory, and reaches only where it may."""

import asyncio
import gzip
import logging
import ssl
import time
import tracemalloc
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest
import trustme

from postroad import GiveUp, OutcomeUnknown, Receipt, RetryLater, Webhook
from postroad.model.errors import Verdict
from tests.transports.receivers import SECRET, Behaviour, answers, dispatch, receiving, repeats, silent

MEBIBYTE = 1 << 20


def hook(**options: Any) -> Webhook:
    """A webhook that may go to the tests' own servers."""
    return Webhook(**{"secret": SECRET, "allow_private": True, **options})


async def verdict(transport: Webhook, url: str, seconds: float = 5) -> Receipt | Verdict:
    try:
        return await transport.send(dispatch(url, seconds=seconds))
    except Verdict as said:
        return said


DRIPS: dict[str, tuple[Behaviour, type]] = {
    "nothing": (silent, OutcomeUnknown),
    "a header's bytes": (repeats(b"HTTP/1.1 200 OK\r\nX: ", b"x", times=1_000, pause=0.02), OutcomeUnknown),
    "headers": (repeats(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n", times=1_000, pause=0.02), OutcomeUnknown),
    "1xx": (repeats(b"", b"HTTP/1.1 100 Continue\r\n\r\n", times=1_000, pause=0.02), OutcomeUnknown),
    "a body after 200": (repeats(b"HTTP/1.1 200 OK\r\n\r\n", b"x", times=1_000, pause=0.02), Receipt),
    "a body after 500": (repeats(b"HTTP/1.1 500 No\r\n\r\n", b"x", times=1_000, pause=0.02), RetryLater),
}


@pytest.mark.parametrize("what", DRIPS)
async def test_one_deadline_holds_for_everything(what: str) -> None:
    """Whatever is dripped, the attempt ends before its deadline, and a status that came counts."""
    behave, expected = DRIPS[what]
    async with receiving(behave) as receiver:
        begun = time.monotonic()
        said = await verdict(hook(), receiver.url, seconds=1)
        assert time.monotonic() - begun < 10  # the drip lasts for 20 s
        assert isinstance(said, expected), said
        await receiver.ended.wait()  # we have left


async def test_a_slow_lookup_ends_at_the_deadline_with_nothing_sent() -> None:
    """DNS is part of the one deadline; since nothing was sent, it is a plain failure."""

    async def never(host: str, port: int) -> Sequence[str]:
        await asyncio.Event().wait()
        return []

    said = await verdict(hook(resolver=never), "http://slow.test/", seconds=0.3)
    assert isinstance(said, RetryLater)
    assert "while resolving the host" in str(said)


async def test_a_tls_handshake_that_hangs_ends_at_the_deadline_with_nothing_sent() -> None:
    """A server that never shakes hands is a plain failure."""
    async with receiving(silent, reads=False) as receiver:
        said = await verdict(hook(), f"https://127.0.0.1:{receiver.port}/", seconds=0.3)
        assert isinstance(said, RetryLater)
        assert "while connecting" in str(said)
        await receiver.ended.wait()


async def test_a_deadline_that_is_over_sends_nothing() -> None:
    """An attempt without time left connects to nobody."""
    async with receiving(answers(200)) as receiver:
        assert isinstance(await verdict(hook(), receiver.url, seconds=-1), RetryLater)
    assert receiver.connections == 0


async def test_an_attempt_that_is_cancelled_leaves_at_once() -> None:
    """The engine's own end of an attempt closes the connection and comes out as a cancellation."""
    async with receiving(silent) as receiver:
        attempt = asyncio.ensure_future(hook().send(dispatch(receiver.url, seconds=60)))
        while not receiver.requests:
            await asyncio.sleep(0)
        attempt.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attempt
        await receiver.ended.wait()


CHUNK = b"x" * 65_536
BOMBS: dict[str, tuple[Behaviour, type]] = {
    "200 MB after 200": (
        repeats(b"HTTP/1.1 200 OK\r\nContent-Length: 209715200\r\n\r\n", CHUNK, times=3_200), Receipt,
    ),
    "endless chunks after 500": (
        repeats(b"HTTP/1.1 500 No\r\nTransfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + CHUNK + b"\r\n", times=3_200),
        RetryLater,
    ),
    "gzip": (
        answers(500, gzip.compress(b"0" * 100 * MEBIBYTE), content_encoding="gzip", content_type="text/plain"),
        RetryLater,
    ),
    "a header of 1 MB": (
        repeats(b"HTTP/1.1 200 OK\r\nX: " + b"x" * MEBIBYTE, b"\r\n\r\n", times=1), OutcomeUnknown,
    ),
    "100,000 headers": (repeats(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n" * 1_000, times=100), OutcomeUnknown),
    "endless 1xx": (repeats(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100, times=10_000), OutcomeUnknown),
    "endless trailers": (
        repeats(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"X: y\r\n" * 100, times=10_000),
        Receipt,
    ),
    "a chunk's endless extension": (
        repeats(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;", CHUNK, times=1_000), Receipt,
    ),
}  # fmt: skip


@pytest.mark.parametrize("bomb", BOMBS)
async def test_memory_stays_flat(bomb: str) -> None:
    """However much a destination says, at most 64 KiB are read, and an attempt takes less than 1 MiB."""
    behave, expected = BOMBS[bomb]
    async with receiving(behave) as receiver:
        await verdict(hook(), receiver.url)  # what is loaded once is loaded
        tracemalloc.start()
        try:
            said = await verdict(hook(), receiver.url)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert isinstance(said, expected), said
    print(f"{bomb}: {peak} bytes at the most")
    assert peak < MEBIBYTE  # the server's own writing is among it


@pytest.mark.parametrize("status", [b"200 OK", b"500 No"])
async def test_no_more_than_the_beginning_is_read(status: bytes) -> None:
    """An attempt leaves after 64 KiB, whatever the status: of 200 MB only what fits into buffers is ever sent."""
    written = 0

    async def endless(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        writer.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: 209715200\r\n\r\n")
        for _ in range(3_200):
            writer.write(CHUNK)
            await writer.drain()
            written += len(CHUNK)

    async with receiving(endless) as receiver:
        await verdict(hook(), receiver.url)
        await receiver.ended.wait()
    assert written < 20 * MEBIBYTE


async def test_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Proxies and passwords of the environment are not used."""
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login canary password canary\n")
    async with receiving(silent, reads=False) as proxy, receiving(answers(200)) as receiver:
        for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        monkeypatch.setenv("NETRC", str(netrc))
        assert isinstance(await verdict(hook(), receiver.url), Receipt)
    assert proxy.connections == 0
    assert "authorization" not in receiver.requests[0][0]


NUMBERS = ["127.0.0.1", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]",
           "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "0.0.0.0", "169.254.169.254", "[fe80::1]", "100.64.0.1"]  # fmt: skip


@pytest.mark.parametrize("host", NUMBERS)
async def test_no_form_of_an_inner_address_is_reached(host: str) -> None:
    """Whatever the system's resolver makes of a host, an address that is not public is refused, for good."""
    async with receiving(answers(200)) as receiver:
        with pytest.raises(GiveUp, match="not allowed"):
            await Webhook(secret=SECRET, ports=(receiver.port,)).send(dispatch(f"https://{host}:{receiver.port}/"))
    assert receiver.connections == 0


@pytest.mark.parametrize("host", ["169.254.169.254", "0.0.0.0", "[fd00:ec2::254]", "224.0.0.1", "255.255.255.255"])
async def test_trust_has_its_bounds(host: str) -> None:
    """Metadata services, multicast and the unspecified address are refused even where inner addresses are allowed."""
    with pytest.raises(GiveUp):
        await hook().send(dispatch(f"http://{host}/"))


async def test_one_bad_address_spoils_all() -> None:
    """Every address is checked, not only the first one."""

    async def mixed(host: str, port: int) -> Sequence[str]:
        return ["93.184.215.14", "10.0.0.1"]

    with pytest.raises(GiveUp, match=r"mixed\.test .*\(private\)"):
        await Webhook(secret=SECRET, resolver=mixed).send(dispatch("https://mixed.test/"))


async def test_the_checked_address_is_the_connected_one() -> None:
    """A name is looked up once per attempt; what its next answer would be is never connected to."""
    asked: list[str] = []

    async def rebinding(host: str, port: int) -> Sequence[str]:
        asked.append(host)
        return ["127.0.0.1"] if len(asked) % 2 else ["169.254.169.254"]

    transport = hook(resolver=rebinding)
    async with receiving(answers(200)) as receiver:
        url = f"http://rebind.test:{receiver.port}/"
        assert isinstance(await verdict(transport, url), Receipt)
        assert asked == ["rebind.test"]
        # Each attempt looks again: no old answer, and no old connection, lets it pass.
        assert isinstance(await verdict(transport, url), GiveUp)
    assert receiver.connections == 1


async def test_the_next_address_is_tried() -> None:
    """A destination with several addresses is reached while one of them answers."""

    async def both(host: str, port: int) -> Sequence[str]:
        return ["127.0.0.9", "127.0.0.1"]

    async with receiving(answers(200)) as receiver:
        assert isinstance(await verdict(hook(resolver=both), f"http://two.test:{receiver.port}/"), Receipt)


async def test_an_address_that_hangs_leaves_time_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each address gets its share of the time that is left."""
    real = asyncio.open_connection

    async def hanging(host: str, *args: Any, **kwargs: Any) -> Any:
        if host == "127.0.0.9":
            await asyncio.Event().wait()
        return await real(host, *args, **kwargs)

    async def both(host: str, port: int) -> Sequence[str]:
        return ["127.0.0.9", "127.0.0.1"]

    monkeypatch.setattr(asyncio, "open_connection", hanging)
    async with receiving(answers(200)) as receiver:
        transport = hook(resolver=both)
        assert isinstance(await verdict(transport, f"http://two.test:{receiver.port}/", seconds=1), Receipt)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def server_tls(authority: trustme.CA, *names: str) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(*names).configure_cert(context)
    return context


def client_tls(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


async def at_home(host: str, port: int) -> Sequence[str]:
    return ["127.0.0.1"]


async def test_the_certificate_is_held_against_the_name(authority: trustme.CA) -> None:
    """Though connected by address, the host's name is asked for, checked and sent as Host."""
    names: list[Any] = []
    context = server_tls(authority, "shop.test")
    context.sni_callback = lambda _, name, __: names.append(name)
    async with receiving(answers(200), tls=context) as receiver:
        transport = hook(tls=client_tls(authority), resolver=at_home)
        assert isinstance(await verdict(transport, f"https://SHOP.test:{receiver.port}/"), Receipt)
        said = await verdict(transport, f"https://other.test:{receiver.port}/")
        assert isinstance(said, RetryLater)
        assert "certificate verify failed" in str(said)
    assert names == ["shop.test", "other.test"]
    assert receiver.requests[0][0]["host"] == f"shop.test:{receiver.port}"
    assert len(receiver.requests) == 1


async def test_a_literal_address_has_its_certificate(authority: trustme.CA) -> None:
    """A certificate for an IPv6 address serves a URL with it, whose Host header keeps the brackets."""
    async with receiving(answers(200), host="::1", tls=server_tls(authority, "::1")) as receiver:
        said = await verdict(hook(tls=client_tls(authority)), f"https://[::1]:{receiver.port}/x")
        assert isinstance(said, Receipt), said
    assert receiver.requests[0][0]["host"] == f"[::1]:{receiver.port}"


async def test_an_unknown_authority_is_a_plain_failure(authority: trustme.CA) -> None:
    """Without trust nothing is sent, and it is tried again: certificates are put right."""
    async with receiving(answers(200), tls=server_tls(authority, "127.0.0.1")) as receiver:
        said = await verdict(hook(), f"https://127.0.0.1:{receiver.port}/")
    assert isinstance(said, RetryLater)
    assert receiver.requests == []


async def test_nothing_secret_is_logged(caplog: pytest.LogCaptureFixture, authority: trustme.CA) -> None:
    """With every logger at its most talkative, no secret, own header, path or query is logged."""
    caplog.set_level(logging.DEBUG)
    transport = hook(tls=client_tls(authority), resolver=at_home, headers={"x-token": "canary-header"})
    async with AsyncExitStack() as stack:
        for behave in (answers(200), answers(500), silent):
            receiver = await stack.enter_async_context(receiving(behave, tls=server_tls(authority, "shop.test")))
            await verdict(transport, f"https://shop.test:{receiver.port}/canary-path?canary-query", seconds=0.5)
    assert "canary" not in caplog.text
    assert SECRET.removeprefix("whsec_") not in caplog.text
