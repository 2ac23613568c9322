"""Signatures of Standard Webhooks 1.0.0 (standardwebhooks.com), its symmetric scheme `v1`: HMAC-SHA256."""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence

from postroad.model.errors import InvalidInput

SECRET_PREFIX = "whsec_"
KEY_BYTES_MIN, KEY_BYTES_MAX = 24, 64
KEYS_MAX = 10

ID = "webhook-id"
TIMESTAMP = "webhook-timestamp"
SIGNATURE = "webhook-signature"
VERSION = "v1"

Secrets = str | Sequence[str]


def keys_of(secrets: Secrets) -> tuple[bytes, ...]:
    """The keys of one secret, or of several while they are exchanged.

    Raises:
        InvalidInput: One is not `whsec_` and the base64 of 24 to 64 bytes. The message never shows it.
    """
    texts = (secrets,) if isinstance(secrets, str) else secrets
    if not isinstance(texts, Sequence) or not 1 <= len(texts) <= KEYS_MAX:
        raise InvalidInput(f"secret must be a str or a list of 1 to {KEYS_MAX} of them.", field="secret")
    return tuple(map(_key, texts))


def _key(secret: object) -> bytes:
    key = b""
    if isinstance(secret, str) and secret.startswith(SECRET_PREFIX):
        encoded = secret.removeprefix(SECRET_PREFIX)
        try:
            # Some dashboards show it without its padding, and the reference library takes that.
            key = base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
        except (binascii.Error, ValueError):  # ValueError: not ASCII
            key = b""
    if not KEY_BYTES_MIN <= len(key) <= KEY_BYTES_MAX:
        raise InvalidInput(
            f"secret must be {SECRET_PREFIX!r} and the base64 of {KEY_BYTES_MIN} to {KEY_BYTES_MAX} random bytes.",
            field="secret",
        )
    return key


def signature(key: bytes, message_id: str, *, timestamp: str, body: bytes) -> str:
    """The signature of one message under one key, as it stands in the header; `timestamp` in seconds, as sent."""
    content = b".".join((message_id.encode(), timestamp.encode(), body))
    return f"{VERSION},{base64.b64encode(hmac.digest(key, content, hashlib.sha256)).decode()}"


def signed_headers(keys: Sequence[bytes], message_id: str, *, timestamp: int, body: bytes) -> dict[str, str]:
    """The three headers of a message; `timestamp` is the attempt's, in seconds since 1970 UTC."""
    sent = str(timestamp)
    signatures = [signature(key, message_id, timestamp=sent, body=body) for key in keys]
    return {ID: message_id, TIMESTAMP: sent, SIGNATURE: " ".join(signatures)}
