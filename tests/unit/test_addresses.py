"""Where a webhook may go: the forms of a URL and the classes of an address, as tables."""

import asyncio
import socket
import threading
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroad import GiveUp, RetryLater
from postroad.transports import addresses
from postroad.transports.addresses import AddressPolicy, Destination, address_class, destination, resolve

PUBLIC, TRUSTED = AddressPolicy(), AddressPolicy(private=True)

CLASSES = {
    "loopback": ["127.0.0.1", "127.255.255.255", "::1"],
    "private": ["10.0.0.0", "10.255.255.255", "172.16.0.0", "172.31.255.255", "192.168.0.1"],
    "carrier NAT": ["100.64.0.1", "100.127.255.255"],
    "unique local": ["fc00::1", "fdff::1"],
    "metadata service": ["169.254.169.254", "100.100.100.200", "168.63.129.16", "fd00:ec2::254", "fd20:ce::254"],
    "link-local": ["169.254.0.1", "169.254.170.2", "fe80::1", "febf::1", "fe80::1%eth0"],
    "this network": ["0.0.0.0", "0.255.255.255"],
    "protocol assignments": ["192.0.0.8", "192.0.0.192", "2001:1::1", "2001:10::1", "2001:20::1", "2001:1ff:ffff::"],
    "documentation": ["192.0.2.1", "198.51.100.1", "203.0.113.255", "2001:db8::1", "3fff:fff::1"],
    "AS112": ["192.31.196.1", "192.175.48.1", "2620:4f:8000::1"],
    "AMT": ["192.52.193.1"],
    "6to4 relay": ["192.88.99.1"],
    "benchmarking": ["198.18.0.1", "198.19.255.255"],
    "multicast": ["224.0.0.1", "239.255.255.255", "ff02::1"],
    "reserved": ["240.0.0.1", "255.255.255.255"],
    "unspecified": ["::"],
    "IPv4-mapped": ["::ffff:127.0.0.1", "::ffff:8.8.8.8"],
    "IPv4-compatible": ["::7f00:1", "::8.8.8.8"],
    "NAT64 of loopback": ["64:ff9b::7f00:1"],
    "NAT64 of metadata service": ["64:ff9b::169.254.169.254"],
    "NAT64 of private": ["64:ff9b::10.0.0.1"],
    "local NAT64": ["64:ff9b:1::7f00:1"],
    "discard-only": ["100::1"],
    "Teredo": ["2001::1", "2001:0:4136:e378:8000:63bf:3fff:fdd2"],
    "6to4": ["2002:7f00:1::", "2002:808:808::1"],
    "segment routing": ["5f00::1"],
    "site-local": ["fec0::1"],
    "not global unicast": ["4000::1", "1fff::1", "e000::1", "64:ff9b:2::1", "::1:0:0:0"],
    "": ["8.8.8.8", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0", "172.15.255.255", "172.32.0.0",
         "192.0.1.1", "223.255.255.255", "2001:200::1", "2600::1", "2a00:1450::1", "64:ff9b::8.8.8.8"],
}  # fmt: skip


@pytest.mark.parametrize(("name", "address"), [(name, one) for name, some in CLASSES.items() for one in some])
def test_the_class_of_an_address(name: str, address: str) -> None:
    """Each special range, to its edges, has its class, and its neighbours have none."""
    assert address_class(ip_address(address)) == name


@pytest.mark.parametrize("name", CLASSES)
def test_trust_opens_what_is_inside_and_nothing_else(name: str) -> None:
    """Trusted destinations may be loopback, private, carrier NAT and unique local; never another class."""
    opened = name in {"", "loopback", "private", "carrier NAT", "unique local"}
    for text in CLASSES[name]:
        assert (TRUSTED.refusal(ip_address(text)) == "") is opened
        assert PUBLIC.refusal(ip_address(text)) == name


@given(st.ip_addresses())
def test_what_is_not_global_for_python_is_not_public_for_us(address: IPv4Address | IPv6Address) -> None:
    """Our table is never laxer than the standard library's, whose own gaps it closes."""
    if not address.is_global or address.is_multicast:
        assert address_class(address)


URLS = {
    "https://shop.test": ("https", "shop.test", 443, "/", "shop.test"),
    "HTTPS://Shop.Test/A?b=C": ("https", "shop.test", 443, "/A?b=C", "shop.test"),
    "https://shop.test?x": ("https", "shop.test", 443, "/?x", "shop.test"),
    "https://shop.test:443/": ("https", "shop.test", 443, "/", "shop.test"),
    "https://xn--bcher-kva.test//evil.test/@x": ("https", "xn--bcher-kva.test", 443, "//evil.test/@x",
                                                  "xn--bcher-kva.test"),
    "https://a_b.test/%2e%2e/?q=%00#"[:-1]: ("https", "a_b.test", 443, "/%2e%2e/?q=%00", "a_b.test"),
    "https://[2600::1]/": ("https", "2600::1", 443, "/", "[2600::1]"),
    "https://2130706433/": ("https", "2130706433", 443, "/", "2130706433"),
}  # fmt: skip


@pytest.mark.parametrize("url", URLS)
def test_a_url_is_taken_apart(url: str) -> None:
    """Scheme and host in lower case, path and query untouched."""
    where = destination(url, PUBLIC)
    assert (where.scheme, where.host, where.port, where.target, where.authority) == URLS[url]


REFUSED = [
    "", "shop.test", "//shop.test", "ftp://shop.test", "file:///etc/passwd", "javascript:alert(1)", "https:shop.test",
    "https:/shop.test", "https:///shop.test", "https://", "https://:443/", "https://user@shop.test/",
    "https://user:pass@shop.test/", "https://shop.test@evil.test/", "https://shop.test#@evil.test/",
    "https://shop.test/#part", "https://shop.test\\@evil.test/", "https://shop.test\\evil", "https://shop.test/\\evil",
    " https://shop.test/", "https://shop.test/ ", "https://shop.test/a b", "https://shop.test/\r\nX: y",
    "https://shop.test/\n", "ht\ntps://shop.test/", "https://shop.test/\t", "https://shop.test/\0", "https://sh\0op.test/",
    "https://bücher.test/", "https://shop.test/ü", "https://shop。test/", "https://①②⑦.0.0.1/", "https://%6c%6f.test/",
    "https://shop.test:/", "https://shop.test:0/", "https://shop.test:65536/", "https://shop.test:0443/", "https://shop.test:443:80/",
    "https://shop.test:+443/", "https://shop.test:４４３/", "https://shop.test./", "https://.shop.test/",
    "https://shop..test/", "https://[::1/", "https://::1/", "https://[::1]x/", "https://[fe80::1%25eth0]/",
    "https://[fe80::1%eth0]/", "https://[1.2.3.4]/", "https://[::g]/", "https://[:::]/", "https://[v1.a]/",
    "https://" + "a" * 64 + ".test/", "https://" + "a." * 130 + "test/", "https://shop.test/" + "a" * 2_048,
    "https://shop.test/<b>", 'https://shop.test/"', "https://shop.test/{x}", "https://shop.test/^", "https://shop.test|x",
]  # fmt: skip


@pytest.mark.parametrize("url", REFUSED)
@pytest.mark.parametrize("policy", [PUBLIC, TRUSTED], ids=["public", "trusted"])
def test_what_could_be_read_in_two_ways_is_refused(url: str, policy: AddressPolicy) -> None:
    """Users, fragments, blanks, controls, backslashes, other scripts, zones and odd ports are refused for good."""
    with pytest.raises(GiveUp) as caught:
        destination(url, policy)
    assert str(caught.value).isprintable()


PARTS = ["", ":", "/", "//", "@", "\\", "#", "?", "%", ".", "[", "]", "[::1]", "a", "evil.test", "127.1", ":443", ":80",
         "ü", " ", "\t", "\n", "\0", "0x7f", "。"]  # fmt: skip


@given(st.lists(st.sampled_from(PARTS), max_size=8).map(lambda parts: "https://" + "".join(parts)))
def test_whatever_is_accepted_has_one_reading(url: str) -> None:
    """An accepted URL is what its parts give when put together, and the standard library reads the same host in it."""
    try:
        where = destination(url, TRUSTED)
    except GiveUp:
        return
    host = f"[{where.host}]" if ":" in where.host else where.host
    ports, targets = ("", f":{where.port}"), (where.target, where.target[1:])
    assert url in {f"https://{host}{port}{target}" for port in ports for target in targets}
    other = urlsplit(url)
    assert (other.hostname, other.port or 443, other.username, other.fragment) == (where.host, where.port, None, "")


POLICIES = [
    (PUBLIC, {"https:443"}),
    (AddressPolicy(ports=(443, 8443)), {"https:443", "https:8443"}),
    (AddressPolicy(http=True), {"https:443", "http:80", "http:443"}),
    (TRUSTED, {"https:443", "https:8443", "https:22", "http:80", "http:443", "http:8443", "http:22"}),
]


@pytest.mark.parametrize(("policy", "allowed"), POLICIES)
def test_schemes_and_ports(policy: AddressPolicy, allowed: set[str]) -> None:
    """Public destinations are https on the ports that are allowed, http only on purpose; trusted ones may be any."""
    for scheme in ("https", "http"):
        for port in (443, 80, 8443, 22):
            if policy is TRUSTED or f"{scheme}:{port}" in allowed:
                assert destination(f"{scheme}://shop.test:{port}/", policy).port == port
            else:
                with pytest.raises(GiveUp, match=f"{scheme} on port {port}"):
                    destination(f"{scheme}://shop.test:{port}/", policy)


SHOP = Destination(scheme="https", host="shop.test", port=443, target="/")


def resolving(answer: Sequence[str] | Exception) -> addresses.Resolver:
    async def resolver(host: str, port: int) -> Sequence[str]:
        assert (host, port) == ("shop.test", 443)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return resolver


async def test_all_addresses_come_out_in_order_once() -> None:
    """The resolver's order is kept, repetitions are dropped."""
    found = await resolve(SHOP, PUBLIC, resolving(["2600::1", "8.8.8.8", "2600::1"]))
    assert found == ["2600::1", "8.8.8.8"]


@pytest.mark.parametrize(
    "answer", [[], socket.gaierror(-2, "Name or service not known"), UnicodeError("label too long"), ["nonsense"]]
)
async def test_no_address_is_tried_again(answer: Sequence[str] | Exception) -> None:
    """A name without an address, or a resolver in trouble, is a failure of now."""
    with pytest.raises(RetryLater, match=r"shop\.test"):
        await resolve(SHOP, PUBLIC, resolving(answer))


@pytest.mark.parametrize("place", [0, 1, 2])
async def test_one_refused_address_is_enough(place: int) -> None:
    """Wherever it stands in the answer; the text names the class."""
    answer = ["8.8.8.8", "2600::1"]
    answer.insert(place, "192.168.1.1")
    with pytest.raises(GiveUp, match=r"\(private\)"):
        await resolve(SHOP, PUBLIC, resolving(answer))


async def test_lookups_that_hang_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """When 64 lookups hang the next one fails at once; when they end there is room again."""
    hang, begun = threading.Event(), threading.Semaphore(0)

    def hanging(*args: object, **options: object) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        begun.release()
        hang.wait(60)
        return [(2, 1, 6, "", ("8.8.8.8", 443))]

    monkeypatch.setattr(socket, "getaddrinfo", hanging)
    waiting = [asyncio.ensure_future(addresses.system_resolver("x", 443)) for _ in range(addresses.LOOKUPS_MAX)]
    try:
        await asyncio.sleep(0)
        with pytest.raises(OSError, match="64 lookups"):
            await addresses.system_resolver("x", 443)
    finally:
        hang.set()
    assert await asyncio.gather(*waiting) == [["8.8.8.8"]] * addresses.LOOKUPS_MAX
    assert await addresses.system_resolver("x", 443) == ["8.8.8.8"]


async def test_a_lookup_that_nobody_waits_for_any_more_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result of an abandoned lookup is dropped, and nobody is told of an error."""
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    hang = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: hang.wait(60) and [])
    waiting = asyncio.ensure_future(addresses.system_resolver("x", 443))
    await asyncio.sleep(0)
    threads = [thread for thread in threading.enumerate() if thread.name == "postroad-lookup"]
    waiting.cancel()
    await asyncio.wait([waiting])
    hang.set()
    for thread in threads:
        thread.join()
    await asyncio.sleep(0)
    assert threads
    assert waiting.cancelled()
    assert errors == []


async def test_a_failed_lookup_says_why() -> None:
    """What the system's resolver raises comes out of it, and from the destination as a failure of now."""
    for _ in range(addresses.LOOKUPS_MAX + 1):  # each has left its place
        with pytest.raises((OSError, UnicodeError)):
            await addresses.system_resolver("a" * 64 + ".test", 443)


async def test_without_threads_a_lookup_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the machine allows no more threads, that is the failure, and no place is lost."""

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        for _ in range(addresses.LOOKUPS_MAX + 1):
            with pytest.raises(OSError, match="new thread"):
                await addresses.system_resolver("127.0.0.1", 443)
    assert await addresses.system_resolver("127.0.0.1", 443) == ["127.0.0.1"]


def test_a_lookup_that_outlives_its_loop_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may end its event loop while a lookup hangs."""
    hang = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: hang.wait(60) and [])

    async def leave() -> list[threading.Thread]:
        waiting = asyncio.ensure_future(addresses.system_resolver("x", 443))
        await asyncio.sleep(0)
        waiting.cancel()
        return [thread for thread in threading.enumerate() if thread.name == "postroad-lookup"]

    threads = asyncio.run(leave())
    hang.set()
    for thread in threads:
        thread.join()  # an exception in it would fail this test
    assert threads
