"""The envelope: what a destination outside of Python gets of a dispatch, as one JSON object."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from postroad.model.dispatches import Dispatch

SCHEMA_VERSION = 2


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """Version 2. A field that may be null can be added without a new version; readers ignore what they don't know.

    `body` is what was accepted, byte for byte the same on every attempt, in `version` of its `kind`; `attempt`,
    `deadline` and `possible_duplicate` are this attempt's. Times are ISO 8601, UTC. `headers` travel beside the
    payload, a trace's context (`traceparent`) among them; `origin` are the pairs that the sender gave.
    """

    schema_version: int = SCHEMA_VERSION
    dispatch_id: str
    key: str
    kind: str
    version: int
    to: str
    body: msgspec.Raw
    attempt: int
    created_at: str
    first_attempt_at: str
    deadline: str
    expires_at: str | None
    possible_duplicate: bool
    ack_token: str | None
    headers: Mapping[str, str]
    origin: Mapping[str, str]


def envelope(dispatch: Dispatch[Any], *, with_token: bool = True) -> bytes:
    """A dispatch's envelope as UTF-8 JSON; without the token that acknowledges it where others could read that."""
    return msgspec.json.encode(
        Envelope(
            dispatch_id=dispatch.id,
            key=dispatch.key,
            kind=dispatch.kind,
            version=dispatch.version,
            to=dispatch.to,
            body=msgspec.Raw(dispatch.raw.encode()),
            attempt=dispatch.attempt,
            created_at=_utc(dispatch.created_at),
            first_attempt_at=_utc(dispatch.first_attempt_at),
            deadline=_utc(dispatch.deadline),
            expires_at=None if dispatch.expires_at is None else _utc(dispatch.expires_at),
            possible_duplicate=dispatch.possible_duplicate,
            ack_token=dispatch.ack_token if with_token else None,
            headers=dispatch.headers,
            origin=dispatch.origin,
        )
    )


def _utc(time: datetime) -> str:
    return time.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
