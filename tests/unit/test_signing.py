"""Signatures of Standard Webhooks, held against its vectors and its reference library; the receiver's side."""

import base64
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.message import Message
from typing import Any

import pytest
import standardwebhooks
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from postroad import InvalidInput, Refused, webhooks
from postroad.model.clock import SystemClock, moment
from postroad.transports.signing import keys_of, signature, signed_headers

# The example of the specification's libraries.
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
ID, STAMP, BODY = "msg_p5jXN8AQM9LWM0D4loKWxJek", 1_614_265_330, b'{"test": 2432232314}'
SIGNATURE = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
NOW = datetime.fromtimestamp(STAMP, UTC)
HEADERS = {"webhook-id": ID, "webhook-timestamp": str(STAMP), "webhook-signature": SIGNATURE}
ELSE = "whsec_" + base64.b64encode(b"k" * 32).decode()

keys = st.binary(min_size=24, max_size=64)
ids = st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="."), min_size=1, max_size=60)


def secret(key: bytes) -> str:
    return "whsec_" + base64.b64encode(key).decode()


def test_the_vector_of_the_specification() -> None:
    """The published example is signed and verified as published."""
    assert signature(*keys_of(SECRET), ID, timestamp=str(STAMP), body=BODY) == SIGNATURE
    assert webhooks.verify(BODY, HEADERS, SECRET, now=NOW) == ID


@given(key=keys, message_id=ids, stamp=st.integers(0, 2**33), body=st.text(max_size=200))
def test_the_reference_signs_alike(key: bytes, message_id: str, stamp: int, body: str) -> None:
    """For any key, id, time and body our header is the reference library's."""
    headers = signed_headers(keys_of(secret(key)), message_id, timestamp=stamp, body=body.encode("utf-8", "replace"))
    theirs = standardwebhooks.Webhook(secret(key)).sign(
        message_id, datetime.fromtimestamp(stamp, UTC), body.encode("utf-8", "replace").decode()
    )
    assert headers == {"webhook-id": message_id, "webhook-timestamp": str(stamp), "webhook-signature": theirs}


@given(key=keys, message_id=ids, body=st.text(max_size=200).map(lambda text: text.encode("utf-8", "replace")))
def test_both_verify_what_the_other_signs(key: bytes, message_id: str, body: bytes) -> None:
    """Each side accepts the other's signature of now and refuses it for another body, id or secret."""
    now = moment(SystemClock().wall())
    reference = standardwebhooks.Webhook(secret(key))
    ours = signed_headers([key], message_id, timestamp=int(now.timestamp()), body=body)
    reference.verify(body, ours, json_parse=False)
    theirs = {**ours, "webhook-signature": reference.sign(message_id, now, body.decode())}
    assert webhooks.verify(body, theirs, secret(key)) == message_id
    for changed in (
        (body + b" ", theirs, secret(key)), (body, {**theirs, "webhook-id": message_id + "x"}, secret(key)),
        (body, {**theirs, "webhook-timestamp": str(int(now.timestamp()) + 1)}, secret(key)),
        (body, theirs, secret(bytes(byte ^ 1 for byte in key))),
    ):  # fmt: skip
        with pytest.raises(webhooks.BadSignature):
            webhooks.verify(*changed)


@pytest.mark.parametrize("seconds", [-300, 0, 300])
def test_within_five_minutes_on_either_side(seconds: int) -> None:
    """A timestamp is accepted up to five minutes away."""
    assert webhooks.verify(BODY, HEADERS, SECRET, now=NOW + timedelta(seconds=seconds)) == ID


@pytest.mark.parametrize(("seconds", "word"), [(-301, "new"), (301, "old"), (10**9, "old")])
def test_a_replay_after_the_tolerance_is_refused(seconds: int, word: str) -> None:
    """A rightly signed request with a timestamp further away is refused, on either side."""
    with pytest.raises(webhooks.BadSignature, match=f"too {word}"):
        webhooks.verify(BODY, HEADERS, SECRET, now=NOW + timedelta(seconds=seconds))
    tolerance = timedelta(seconds=abs(seconds))
    assert webhooks.verify(BODY, HEADERS, SECRET, now=NOW + timedelta(seconds=seconds), tolerance=tolerance)


def test_a_body_that_was_parsed_and_written_again_fails() -> None:
    """The signature is of the raw bytes."""
    with pytest.raises(webhooks.BadSignature):
        webhooks.verify(b'{"test":2432232314}', HEADERS, SECRET, now=NOW)
    wrong: Any = BODY.decode()
    with pytest.raises(InvalidInput, match="raw bytes"):
        webhooks.verify(wrong, HEADERS, SECRET, now=NOW)


def test_either_secret_verifies_while_they_are_exchanged() -> None:
    """A receiver may know several secrets, and a header may hold several signatures, of other versions too."""
    assert webhooks.verify(BODY, HEADERS, [ELSE, SECRET], now=NOW) == ID
    several = {**HEADERS, "webhook-signature": f"v1a,b25l v1,dHdv {SIGNATURE} v2,x"}
    assert webhooks.verify(BODY, several, SECRET, now=NOW) == ID


def test_headers_of_any_kind_are_read() -> None:
    """HTTP's names have no case, and headers may be a dict or a framework's own collection."""
    message = Message()
    for name, value in HEADERS.items():
        message[name] = value
    assert webhooks.verify(BODY, message, SECRET, now=NOW) == ID
    message["Webhook-Id"] = "second"
    with pytest.raises(webhooks.BadSignature, match="once"):
        webhooks.verify(BODY, message, SECRET, now=NOW)
    assert webhooks.verify(BODY, {name.title(): value for name, value in HEADERS.items()}, SECRET, now=NOW) == ID


class Collection:
    """A framework's own, which is no Mapping; of some the same name may come twice."""

    def __init__(self, *pairs: tuple[str, str]) -> None:
        self._pairs = pairs

    def items(self) -> Iterator[tuple[str, str]]:
        return iter(self._pairs)


PAIRS = [(name.title(), value) for name, value in HEADERS.items()]
RAW = [(name.upper().encode(), value.encode()) for name, value in HEADERS.items()]


@pytest.mark.parametrize(
    "headers",
    [
        PAIRS, tuple(PAIRS), iter(PAIRS), dict(PAIRS), Collection(*PAIRS), RAW, tuple(RAW), list(map(list, RAW)),
        Headers(dict(PAIRS)), Headers(raw=RAW), Headers(raw=RAW).raw, [*PAIRS, ("accept", "*/*"), ("accept", "x")],
    ],
    ids=lambda headers: type(headers).__name__,
)  # fmt: skip
def test_headers_come_as_pairs_too(headers: Any) -> None:
    """A list of pairs, an ASGI scope's bytes, a framework's collection: all are read, in any case of letters."""
    assert webhooks.verify(BODY, headers, SECRET, now=NOW) == ID


@pytest.mark.parametrize("pairs", [[], PAIRS[:2], [*PAIRS, PAIRS[0]], [*RAW, RAW[2]], [*PAIRS, *RAW]])
def test_pairs_that_lack_or_repeat_a_header_are_refused(pairs: Any) -> None:
    """What is missing, or there twice in whatever form, is a bad signature, as in a mapping."""
    with pytest.raises(webhooks.BadSignature, match="must be there, once"):
        webhooks.verify(BODY, pairs, SECRET, now=NOW)


@pytest.mark.parametrize("wrong", [None, 7, "webhook-id: canary", b"canary", ["canary"], [("a", "b", "c")], [None]])
def test_what_are_no_headers_is_told(wrong: Any) -> None:
    """Anything else is a mistake of the receiver's own, named without what is in it."""
    with pytest.raises(InvalidInput, match="headers must be") as caught:
        webhooks.verify(BODY, wrong, SECRET, now=NOW)
    assert caught.value.about == {"field": "headers"}
    assert "canary" not in f"{caught.value} {caught.value.__context__!r}"


MALFORMED: list[dict[str, Any]] = [
    {}, {"webhook-id": None}, {"webhook-id": ""}, {"webhook-id": "a.b"}, {"webhook-id": "a b"}, {"webhook-id": "ü"},
    {"webhook-id": "x" * 256}, {"webhook-timestamp": ""}, {"webhook-timestamp": "1e9"}, {"webhook-timestamp": "-1"},
    {"webhook-timestamp": "1_614_265_330"}, {"webhook-timestamp": "١٦١٤٢٦٥٣٣٠"}, {"webhook-timestamp": "NaN"},
    {"webhook-timestamp": f" {STAMP}"}, {"webhook-timestamp": f"{STAMP}.0"}, {"webhook-timestamp": "9" * 5_000},
    {"webhook-signature": ""}, {"webhook-signature": "v1"}, {"webhook-signature": ","}, {"webhook-signature": "v1,"},
    {"webhook-signature": SIGNATURE.replace("v1", "v1a")}, {"webhook-signature": SIGNATURE[3:]},
    {"webhook-signature": "v1,ü"}, {"webhook-signature": "v1,\udcff"}, {"webhook-signature": SIGNATURE.lower()},
    {"webhook-signature": SIGNATURE.encode()}, {"WEBHOOK-SIGNATURE": SIGNATURE}, {"Webhook-Id": ID},
]  # fmt: skip


@pytest.mark.parametrize("changes", MALFORMED)
def test_a_malformed_header_is_refused_as_a_bad_signature(changes: dict[str, Any]) -> None:
    """A header that is missing, malformed or there twice is a BadSignature, a Refused, never another error."""
    with pytest.raises(webhooks.BadSignature):
        webhooks.verify(BODY, {**HEADERS, **changes} if changes else {}, SECRET, now=NOW)
    assert issubclass(webhooks.BadSignature, Refused)


def test_an_id_with_a_full_stop_is_refused_though_signed() -> None:
    """A full stop in the id would let one signature stand for two messages."""
    first = signed_headers(keys_of(SECRET), "a", timestamp=STAMP, body=b"1614265330.{}")
    shifted = {**first, "webhook-id": f"a.{STAMP}"}
    assert webhooks.verify(b"1614265330.{}", first, SECRET, now=NOW) == "a"
    with pytest.raises(webhooks.BadSignature, match="webhook-id is malformed"):
        webhooks.verify(b"{}", shifted, SECRET, now=NOW)


@given(st.dictionaries(st.sampled_from(sorted(HEADERS)), st.text(max_size=80)))
def test_no_header_raises_anything_else(changes: dict[str, str]) -> None:
    """Whatever the headers hold, the answer is the id or a BadSignature."""
    try:
        assert webhooks.verify(BODY, {**HEADERS, **changes}, SECRET, now=NOW) == ID
        assert {**HEADERS, **changes} == HEADERS
    except webhooks.BadSignature:
        pass


@pytest.mark.parametrize(
    "wrong",
    [
        "", "whsec_", "canary", SECRET.removeprefix("whsec_"), "whsk_" + "A" * 44, secret(b"canary" * 3),
        secret(b"canary" * 11), "whsec_canary_-" + "A" * 40, "whsec_" + "é" * 40,
        "whsec_!!!!" + "A" * 44, "whsec_" + "A" * 41, None, 7, [],
        [""], b"whsec_", [SECRET] * 11, [SECRET, None], {SECRET: 1},
    ],
)  # fmt: skip
def test_a_malformed_secret_is_refused_unseen(wrong: Any) -> None:
    """A secret is `whsec_` and base64 of 24 to 64 bytes; the error doesn't show what it was."""
    with pytest.raises(InvalidInput) as caught:
        keys_of(wrong)
    assert "canary" not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize("size", [24, 25, 26, 32, 64])
def test_padding_is_optional(size: int) -> None:
    """A secret may come with or without the padding of base64, as the reference library has it."""
    whole = secret(b"k" * size)
    assert keys_of(whole) == keys_of(whole.rstrip("=")) == (b"k" * size,)
