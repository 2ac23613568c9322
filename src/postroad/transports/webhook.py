"""The webhook transport: an HTTPS POST of the envelope, signed as Standard Webhooks 1.0.0 says."""

import asyncio
import inspect
import re
import ssl
from collections.abc import Awaitable, Callable, Collection, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from postroad.model.clock import SECOND, moment
from postroad.model.dispatches import Dispatch, Receipt
from postroad.model.errors import GiveUp, InvalidInput, OutcomeUnknown, RetryLater, Unreachable, shown
from postroad.model.payload import callable_, whole
from postroad.transports import signing
from postroad.transports.addresses import AddressPolicy, Resolver, destination, resolve, system_resolver
from postroad.transports.deadlines import seconds_left
from postroad.transports.envelope import envelope

if TYPE_CHECKING:
    from postroad.transports.posting import Answer, Posting

RETRY_AFTER_SECONDS_MAX = 86_400
REFERENCE_CHARS_MAX = 200
SNIPPET_CHARS_MAX = 500

Secrets = signing.Secrets
ChooseSecret = Callable[[Dispatch[Any]], Secrets | Awaitable[Secrets]]

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}")  # RFC 9110, 5.6.2
_VALUE = re.compile(r"[!-~](?:[ -~]{0,4094}[!-~])?")
_OURS = frozenset({
    "accept-encoding", "connection", "content-encoding", "content-length", "content-type", "expect", "host",
    "idempotency-key", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade",
    signing.ID, signing.TIMESTAMP, signing.SIGNATURE,
})  # fmt: skip
_TRACE = ("traceparent", "tracestate")
_REFERENCES = ("x-request-id", "request-id")


class Webhook:
    """An HTTPS POST signed as Standard Webhooks 1.0.0 says; a dispatch's `to` is the URL, the envelope is the body.

    `webhook-id` is the dispatch's id, the same on every attempt. An answer 2xx is success, 410 permanent, any other
    a failure; a redirect is not followed. A connection that breaks after something was sent, and 502 and 504, whose
    senders don't know either, are unknown outcomes.

    Args:
        secret: `whsec_…`, or several while they are exchanged, or what gives them for a dispatch: a function that
            does not block, or an async one. One secret per endpoint. What such a function raises, or gives that is
            no secret, fails the attempt and is tried again: it can be put right meanwhile.
        allow_private: The destinations are trusted: private and loopback addresses, http and any port are allowed.
            Link-local, multicast and metadata services never are.
        allow_http: Allow http, on port 80 too. The payload is signed, but everybody on the way can read it.
        ports: The ports that may be used.
        headers: What else to send, such as an authorization. Not shown anywhere.
        tls: For own authorities or client certificates; the system's trusted authorities unless given.
        resolver: Gives the addresses of a host and port; the system's unless given.

    Raises:
        InvalidInput: A secret, port or header is malformed. The message shows neither secret nor header's value.
    """

    def __init__(
        self,
        *,
        secret: Secrets | ChooseSecret,
        allow_private: bool = False,
        allow_http: bool = False,
        ports: Collection[int] = (443,),
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
        resolver: Resolver = system_resolver,
    ) -> None:
        callable_(resolver, "resolver")
        checked = frozenset(whole(port, "ports", most=65_535) for port in ports)
        self._keys = () if callable(secret) else signing.keys_of(secret)
        self._choose = secret if callable(secret) else None
        self._policy = AddressPolicy(http=allow_http, private=allow_private, ports=checked)
        self._headers = _checked(headers or {})
        self._given_tls = tls
        self._resolver = resolver

    async def send(self, dispatch: Dispatch[Any], /) -> Receipt:
        """Send it, within the dispatch's deadline.

        Raises:
            RetryLater: It failed, or was refused for now; `after` is what the destination asked for, 24 h at most.
            Unreachable: There was no connection to its host, so that nobody else need try it now.
            GiveUp: The destination is not allowed, or it answered 410.
            OutcomeUnknown: It may have arrived.
        """
        from postroad.transports.posting import Posting  # only who sends webhooks loads what speaks HTTP

        now = dispatch.post.database.clock.wall()
        where = destination(dispatch.to, self._policy)
        posting = Posting(where, until=asyncio.get_running_loop().time() + seconds_left(dispatch))
        try:
            async with asyncio.timeout_at(posting.until):
                answer = await self._post(dispatch, posting, now)
        except TimeoutError:
            raise _ended(posting, "its time was over") from None
        except OSError as error:
            raise _ended(posting, printable(str(error)) or type(error).__name__) from None
        return verdict(answer, where.authority, moment(now))

    async def _post(self, dispatch: Dispatch[Any], posting: "Posting", now: int) -> "Answer":
        body = envelope(dispatch)
        keys = await self._keys_for(dispatch)
        signed = signing.signed_headers(keys, dispatch.id, timestamp=now // SECOND, body=body)
        posting.doing, posting.reaching = "resolving the host", True
        addresses = await resolve(posting.where, self._policy, self._resolver)
        tls = self._tls if posting.where.scheme == "https" else None
        headers = {**_beside(dispatch), **self._headers, **signed}
        return await posting.post(addresses, headers=headers, body=body, tls=tls)

    async def _keys_for(self, dispatch: Dispatch[Any]) -> tuple[bytes, ...]:
        if self._choose is None:
            return self._keys
        chosen = self._choose(dispatch)
        return signing.keys_of(await chosen if inspect.isawaitable(chosen) else chosen)

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return self._given_tls or ssl.create_default_context()


def _checked(headers: Mapping[str, str]) -> dict[str, str]:
    checked = {}
    for name, value in headers.items():
        if not isinstance(name, str) or not _TOKEN.fullmatch(name) or name.lower() in _OURS:
            raise InvalidInput(
                f"headers must not hold {shown(name)}: it is ours, or no header's name.", field="headers"
            )
        if not isinstance(value, str) or not _VALUE.fullmatch(value):
            raise InvalidInput(f"headers: the value of {name} must be visible ASCII.", field="headers")
        checked[name.lower()] = value
    return checked


def _beside(dispatch: Dispatch[Any]) -> dict[str, str]:
    """The headers of every request, but for the signature's."""
    carried = {"idempotency-key": dispatch.key, **{name: dispatch.headers.get(name, "") for name in _TRACE}}
    return {
        "user-agent": "postroad",
        "content-type": "application/json",
        "accept-encoding": "identity",
        # The key is in the envelope too, so one that no header can carry is not lost.
        **{name: value for name, value in carried.items() if _VALUE.fullmatch(value)},
    }


def _ended(posting: "Posting", why: str) -> RetryLater | OutcomeUnknown:
    """What an exchange without an answer came to."""
    said = f"{posting.where.authority}: {why} while {posting.doing}"
    if posting.begun:
        return OutcomeUnknown(said)
    return Unreachable(said) if posting.reaching else RetryLater(said)


def verdict(answer: "Answer", who: str, now: datetime) -> Receipt:
    """What an answer says; `who` is the destination as it may be shown. Raises as `Webhook.send` does."""
    if 200 <= answer.status < 300:
        return Receipt(_reference(answer.headers), {"status": answer.status})
    said = f"{who} answered {answer.status}"
    if 300 <= answer.status < 400:
        said += ", a redirect, which is not followed: change the destination"
    if snippet := _snippet(answer):
        said += f": {snippet}"
    if answer.status == 410:
        raise GiveUp(said)
    if answer.status in (502, 504):  # a gateway that heard nothing from behind it
        raise OutcomeUnknown(said)
    raise RetryLater(said, after=retry_after(answer.headers.get("retry-after", ""), now))


def retry_after(value: str, now: datetime) -> float | None:
    """The seconds of a Retry-After, from 0 to 24 h, or None if there is none that makes sense (RFC 9110, 10.2.3)."""
    text = value.strip(" \t")
    if re.fullmatch(r"[0-9]+", text):
        return min(float(text), RETRY_AFTER_SECONDS_MAX)  # a float takes any number of digits
    try:
        until = parsedate_to_datetime(text)
    except (TypeError, ValueError, IndexError, OverflowError):  # by what is wrong with it
        return None
    until = until if until.tzinfo else until.replace(tzinfo=UTC)
    return min(max((until - now).total_seconds(), 0.0), RETRY_AFTER_SECONDS_MAX)


def _reference(headers: Mapping[str, str]) -> str:
    found = next((headers[name] for name in _REFERENCES if headers.get(name)), "")
    return printable(found)[:REFERENCE_CHARS_MAX]


def _snippet(answer: "Answer") -> str:
    """The beginning of the body, if it is not packed: as text without anything that a terminal would obey."""
    if answer.headers.get("content-encoding", "identity").lower() != "identity":
        return ""
    return printable(answer.body.decode("utf-8", "backslashreplace"))[:SNIPPET_CHARS_MAX].strip()


def printable(text: str) -> str:
    """Text from outside as it may be shown: control, format and other invisible characters are escaped."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
