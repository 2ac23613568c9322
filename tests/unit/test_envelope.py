"""The envelope that a destination outside of Python gets."""

import json
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from postroad.testing.contracts.transports import dispatch
from postroad.transports.envelope import envelope

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


def test_version_2_to_the_byte() -> None:
    """One line of compact JSON, its fields in this order: programs out there read it."""
    sent = dispatch(
        "ann", raw='{"b":  1.50, "a": "ü"}', key="order/1", attempt=3, version=4, possible_duplicate=True,
        created_at=NOW, first_attempt_at=NOW + timedelta(microseconds=1), deadline=NOW, expires_at=NOW,
        ack_token="token", headers={"traceparent": "00-1-2-01"}, origin={"session": "s1"},
    )  # fmt: skip
    assert envelope(sent).decode() == (
        '{"schema_version":2,"dispatch_id":"00000000000000000000000000000000","key":"order/1","kind":"note",'
        '"version":4,"to":"ann","body":{"b":  1.50, "a": "ü"},"attempt":3,"created_at":"2026-01-02T03:04:05.000000Z",'
        '"first_attempt_at":"2026-01-02T03:04:05.000001Z","deadline":"2026-01-02T03:04:05.000000Z",'
        '"expires_at":"2026-01-02T03:04:05.000000Z","possible_duplicate":true,"ack_token":"token",'
        '"headers":{"traceparent":"00-1-2-01"},"origin":{"session":"s1"}}'
    )


def test_what_there_is_not_is_null() -> None:
    """A field is always there: without an expiry or a token it is null, without pairs an empty object."""
    said = json.loads(envelope(dispatch("ann")))
    assert (said["expires_at"], said["ack_token"], said["headers"], said["origin"]) == (None, None, {}, {})


def test_the_token_can_be_left_out() -> None:
    """Where others could read it the token is null; all else stays."""
    sent = dispatch("ann", ack_token="canary")
    assert json.loads(envelope(sent, with_token=False)) == {**json.loads(envelope(sent)), "ack_token": None}
    assert b"canary" not in envelope(sent, with_token=False)


def test_times_are_in_utc() -> None:
    """Whatever zone a time comes in, it leaves in UTC."""
    there = NOW.astimezone(timezone(timedelta(hours=5, minutes=30)))
    assert json.loads(envelope(dispatch("ann", created_at=there)))["created_at"] == "2026-01-02T03:04:05.000000Z"


@given(body=JSON, to=st.text(), pairs=st.dictionaries(st.text(), st.text()), ascii_only=st.booleans())
def test_anything_fits(body: Any, to: str, pairs: dict[str, str], ascii_only: bool) -> None:
    """Whatever body, destination and pairs: it is JSON, one line of ours, and the body's bytes are its own."""
    raw = json.dumps(body, ensure_ascii=ascii_only)
    said = envelope(dispatch(to, raw=raw, body=body, headers=pairs, origin=pairs))
    assert b"\n" not in said
    read = msgspec.json.decode(said, type=dict[str, msgspec.Raw])
    assert bytes(read["body"]) == raw.encode()
    whole = json.loads(said)
    assert (whole["to"], whole["headers"], whole["origin"]) == (to, pairs, pairs)
