"""Where a webhook may go: how its URL must look, and to which addresses its host may lead.

A URL comes from customers, so it may be made to reach what only we can reach (server-side request forgery). It is
taken apart once, here; its host is resolved once per attempt; every address is held against this table, and the
connection is made to one of the addresses that were held against it, never by name. The table is our own:
`ipaddress.is_global` differs between versions of Python, and counts as global what leads to a loopback.
"""

import asyncio
import re
import socket
import threading
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from postroad.model.errors import GiveUp, Unreachable

URL_CHARS_MAX = 2_048
HOST_CHARS_MAX = 253
LOOKUPS_MAX = 64

Address = IPv4Address | IPv6Address
Resolver = Callable[[str, int], Awaitable[Sequence[str]]]

_URL = re.compile(
    r"""(?P<scheme>https?)://
        (?P<host>[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})* | \[[0-9a-f:.]{2,45}\])
        (?::(?P<port>[1-9][0-9]{0,4}))?
        (?P<target>(?:/[\w.~:/?\[\]@!$&'()*+,;=%-]*)?(?:\?[\w.~:/?\[\]@!$&'()*+,;=%-]*)?)""",  # RFC 3986, no fragment
    re.VERBOSE | re.IGNORECASE | re.ASCII,
)
_PORTS = {"http": 80, "https": 443}

# IANA's registries of special-purpose IPv4 and IPv6 addresses; what clouds' metadata services use comes first.
# `allow_private` opens the first group of those that follow, never the others.
_METADATA = ("169.254.169.254/32", "100.100.100.200/32", "168.63.129.16/32", "fd00:ec2::254/128", "fd20:ce::254/128")
_PRIVATE = {
    "127.0.0.0/8": "loopback", "::1/128": "loopback",
    "10.0.0.0/8": "private", "172.16.0.0/12": "private", "192.168.0.0/16": "private",
    "100.64.0.0/10": "carrier NAT", "fc00::/7": "unique local",
}  # fmt: skip
_SPECIAL = {
    "0.0.0.0/8": "this network", "169.254.0.0/16": "link-local", "192.0.0.0/24": "protocol assignments",
    "192.0.2.0/24": "documentation", "192.31.196.0/24": "AS112", "192.52.193.0/24": "AMT",
    "192.88.99.0/24": "6to4 relay", "192.175.48.0/24": "AS112", "198.18.0.0/15": "benchmarking",
    "198.51.100.0/24": "documentation", "203.0.113.0/24": "documentation", "224.0.0.0/4": "multicast",
    "240.0.0.0/4": "reserved",
    "::/128": "unspecified", "::ffff:0:0/96": "IPv4-mapped", "::/96": "IPv4-compatible",
    "64:ff9b:1::/48": "local NAT64", "100::/64": "discard-only", "2001::/32": "Teredo",
    "2001::/23": "protocol assignments", "2001:db8::/32": "documentation", "2002::/16": "6to4",
    "2620:4f:8000::/48": "AS112", "3fff::/20": "documentation", "5f00::/16": "segment routing",
    "fe80::/10": "link-local", "fec0::/10": "site-local", "ff00::/8": "multicast",
}  # fmt: skip
_CLASSES = [
    (ip_network(network), name)
    for table in (dict.fromkeys(_METADATA, "metadata service"), _PRIVATE, _SPECIAL)
    for network, name in table.items()
]
_OPENED = frozenset(_PRIVATE.values())
_GLOBAL_UNICAST = ip_network("2000::/3")
_NAT64 = ip_network("64:ff9b::/96")


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressPolicy:
    """What is allowed beyond https to public addresses; `private` trusts the destinations: any port, http too."""

    http: bool = False
    private: bool = False
    ports: Collection[int] = (443,)

    def allows(self, scheme: str, port: int) -> bool:
        if self.private:
            return True
        return port in self.ports if scheme == "https" else self.http and port in (80, *self.ports)

    def refusal(self, address: Address) -> str:
        """The class for which an address is refused, or nothing."""
        name = address_class(address)
        return "" if self.private and name in _OPENED else name


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """A URL, taken apart. `target` is its path and query; a host that is an IPv6 address stands without brackets."""

    scheme: str
    host: str
    port: int
    target: str

    @property
    def authority(self) -> str:
        """Host and port as the Host header has them. Nothing else of a URL is fit to be shown: it may be secret."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


def address_class(address: Address) -> str:
    """What is special about an address: the name of its class, or nothing for a public one."""
    if address in _NAT64 and isinstance(address, IPv6Address):
        # On an IPv6-only network each IPv4 destination looks like this (RFC 6052): what counts is that one.
        name = address_class(IPv4Address(int(address) & 0xFFFF_FFFF))
        return name and f"NAT64 of {name}"
    for network, name in _CLASSES:
        if address in network:
            return name
    return "" if isinstance(address, IPv4Address) or address in _GLOBAL_UNICAST else "not global unicast"


def destination(url: str, policy: AddressPolicy) -> Destination:
    """Take a URL apart, strictly: what two parsers could read in two ways is refused.

    Raises:
        GiveUp: The URL or its port is not allowed. The text never shows the URL.
    """
    found = _URL.fullmatch(url) if len(url) <= URL_CHARS_MAX else None
    if found is None or len(found["host"]) > HOST_CHARS_MAX:
        raise GiveUp(
            "the destination must be an http(s) URL in visible ASCII: host in punycode, no user, no fragment, "
            f"no backslash, at most {URL_CHARS_MAX} characters"
        )
    scheme, host = found["scheme"].lower(), found["host"].lower().strip("[]")
    port = int(found["port"] or _PORTS[scheme])
    if found["host"].startswith("[") and not _is_ipv6(host):
        raise GiveUp("the destination's host is no IPv6 address")
    if port > 65_535 or not policy.allows(scheme, port):
        raise GiveUp(f"{scheme} on port {port} is not allowed as a destination")
    target = found["target"]
    return Destination(scheme=scheme, host=host, port=port, target=target if target[:1] == "/" else "/" + target)


def _is_ipv6(text: str) -> bool:
    try:
        IPv6Address(text)
    except ValueError:
        return False
    return True


async def resolve(where: Destination, policy: AddressPolicy, resolver: Resolver) -> list[str]:
    """The addresses of a destination, in order of preference, each of them allowed.

    Raises:
        GiveUp: One of them is not allowed; the text names its class.
        Unreachable: There is none just now.
    """
    try:
        texts = list(dict.fromkeys(await resolver(where.host, where.port)))
        addresses = [ip_address(text) for text in texts]
    except (OSError, ValueError) as error:  # ValueError: no address, or a name that cannot be looked up
        raise Unreachable(f"{where.authority} could not be resolved: {error}") from None
    if not addresses:
        raise Unreachable(f"{where.authority} has no address")
    for address in addresses:
        if name := policy.refusal(address):
            raise GiveUp(f"{where.authority} leads to an address that is not allowed ({name})")
    return texts


_lookups = threading.BoundedSemaphore(LOOKUPS_MAX)


async def system_resolver(host: str, port: int) -> list[str]:
    """The addresses that the system's resolver knows; numeric forms of IPv4 are among what it understands.

    In a daemon thread of its own: the event loop's threads are few, and a lookup that hangs would keep others,
    and the process's end, waiting.
    """
    if not _lookups.acquire(blocking=False):
        raise OSError(f"{LOOKUPS_MAX} lookups hang already")
    loop = asyncio.get_running_loop()
    future: asyncio.Future[list[str]] = loop.create_future()

    def deliver(addresses: list[str], error: Exception | None) -> None:
        if future.done():  # nobody waits any more
            return
        if error is None:
            future.set_result(addresses)
        else:
            future.set_exception(error)

    def look_up() -> None:
        addresses: list[str] = []
        failure = None
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            addresses = [str(sockaddr[0]) for *_, sockaddr in found]
        except Exception as error:
            failure = error
        finally:
            _lookups.release()
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, addresses, failure)

    try:
        threading.Thread(target=look_up, name="postroad-lookup", daemon=True).start()
    except RuntimeError as error:  # there are as many as the machine allows
        _lookups.release()
        raise OSError(str(error)) from None
    return await future
