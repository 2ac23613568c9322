"""The receiver's side of a webhook: whether a request is from whom it should be.

from postroad import webhooks

event_id = webhooks.verify(await request.body(), request.headers, secret)
"""

import hmac
import re
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, Protocol

from postroad.model.clock import SystemClock, micros, moment, span
from postroad.model.errors import InvalidInput, Refused, Span
from postroad.transports.signing import ID, SIGNATURE, TIMESTAMP, VERSION, Secrets, keys_of, signature

__all__ = ["BadSignature", "verify"]

TOLERANCE_SECONDS = 300
SIGNATURES_MAX = 100
# A full stop in the id would let the same signature stand for another id, timestamp and body.
_ID = re.compile(r"[!-\-/-~]{1,255}")
_TIMESTAMP = re.compile(r"[0-9]{1,11}")


class BadSignature(Refused):
    """This webhook is not proven to be from its sender; answer 401."""


class Headers(Protocol):
    """What a dict has and every framework's headers, some of which are no Mapping."""

    def items(self) -> Iterable[tuple[str, str]]: ...


# Of an ASGI scope both are bytes.
Pairs = Iterable[tuple[str, str]] | Iterable[tuple[bytes, bytes]]


def verify(
    body: bytes,
    headers: Headers | Pairs,
    secrets: Secrets,
    *,
    now: datetime | None = None,
    tolerance: Span = TOLERANCE_SECONDS,
) -> str:
    """Check a request as Standard Webhooks 1.0.0 says and return its `webhook-id`, the same on every attempt.

    Make the id the key of what you store or publish: then a repeated or replayed request changes nothing.

    Args:
        body: The request's raw bytes. JSON that was parsed and written again has another signature.
        headers: A dict, a framework's own collection, or pairs of name and value; names in any case.
        secrets: The endpoint's secret, or the old and the new one while they are exchanged.
        now: The receiver's time (aware); its system's clock unless given.
        tolerance: How far the attempt's timestamp may be away from `now`, on either side.

    Raises:
        BadSignature: A header is missing, malformed or given twice, no signature fits, or the timestamp is too
            old or too new.
        InvalidInput: `body` is no bytes, `headers` are none, or a secret of yours is malformed.
    """
    if not isinstance(body, bytes | bytearray | memoryview):
        raise InvalidInput(f"body must be the raw bytes, got {type(body).__name__}.", field="body")
    keys = keys_of(secrets)
    pairs = _pairs(headers)
    message_id = _header(pairs, ID, _ID)
    timestamp = _header(pairs, TIMESTAMP, _TIMESTAMP)
    # Bytes, because compare_digest refuses a str that is not ASCII.
    given = [item.encode(errors="replace") for item in _header(pairs, SIGNATURE).split(" ", SIGNATURES_MAX)]
    wanted = [signature(key, message_id, timestamp=timestamp, body=bytes(body)).encode() for key in keys]
    fits = [hmac.compare_digest(one, other) for one in wanted for other in given]
    if not any(fits):  # only now: all were compared, whichever of them fits
        raise BadSignature(f"No signature of version {VERSION} fits.")
    _check_age(int(timestamp), moment(SystemClock().wall()) if now is None else now, tolerance)
    return message_id


def _pairs(headers: Headers | Pairs) -> list[tuple[object, object]]:
    """Names and values, as text where they came as bytes."""
    given: Any = headers
    try:
        return [_as_text(*pair) for pair in (given.items() if hasattr(given, "items") else given)]
    except TypeError:  # nothing to go through, or no pairs; the error may hold a secret
        said = f"headers must be a dict, what has `items()`, or pairs, got a {type(headers).__name__}"
    raise InvalidInput(f"{said}.", field="headers")


def _as_text(name: object, value: object) -> tuple[object, object]:
    if isinstance(name, bytes) and isinstance(value, bytes):
        return name.decode("latin-1"), value.decode("latin-1")
    return name, value


def _header(pairs: Sequence[tuple[object, object]], name: str, form: re.Pattern[str] | None = None) -> str:
    values = [value for key, value in pairs if isinstance(key, str) and key.lower() == name]
    if len(values) != 1 or not isinstance(values[0], str) or not values[0]:
        raise BadSignature(f"The header {name} must be there, once.")
    if form is not None and not form.fullmatch(values[0]):
        raise BadSignature(f"The header {name} is malformed.")
    return values[0]


def _check_age(timestamp: int, now: datetime, tolerance: Span) -> None:
    age = timedelta(microseconds=micros(now, "now")) - timedelta(seconds=timestamp)
    if abs(age) > timedelta(microseconds=span(tolerance, "tolerance")):
        raise BadSignature(f"The timestamp is too {'old' if age > timedelta(0) else 'new'}.")
