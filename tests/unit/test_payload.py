"""What may be stored, and what is the same content."""

import json
import traceback
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroad.model import payload
from postroad.model.errors import GiveUp, InvalidInput, Refused

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(payload.INT_MIN, payload.INT_MAX)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


def deep(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


@given(JSON)
def test_what_is_accepted_comes_back(value: Any) -> None:
    """Every JSON value within the limits is stored as text that reads as the same value."""
    encoded = payload.encode(value)
    assert json.loads(encoded) == value
    encoded.encode()


@given(JSON)
def test_equal_values_have_one_canonical_text(value: Any) -> None:
    """Spaces, key order and the writing of numbers don't matter; canonical text is its own canonical text."""
    loose = json.dumps(value, indent=1, ensure_ascii=True)
    canonical = payload.canonical(payload.encode(value))
    assert payload.canonical(loose) == canonical == payload.canonical(canonical)
    assert payload.same_content("k", loose, "k", canonical)
    assert payload.content_hash("k", loose) == payload.content_hash("k", canonical)


def test_canonical_numbers() -> None:
    """1.0 is 1; what a float can't hold exactly stays what it is; true is not 1."""
    assert payload.canonical('{"b":[1.0,0.5,1e300,-2.0],"a":true}') == '{"a":true,"b":[1,0.5,1e300,-2]}'
    assert payload.canonical("9007199254740993") == "9007199254740993"
    assert not payload.same_content("k", "true", "k", "1")


def test_the_kind_is_part_of_the_content() -> None:
    """The same JSON under another kind is other content."""
    assert not payload.same_content("a", "1", "b", "1")
    assert payload.content_hash("a", "1") != payload.content_hash("b", "1")
    assert payload.content_hash("a", "1", "2") != payload.content_hash("a", "2", "1")


@dataclass
class Row:
    name: str
    at: datetime


class Struct(msgspec.Struct):
    name: str
    inner: "Struct | None" = None


class Model(pydantic.BaseModel):
    name: str
    price: Decimal = Decimal("1.50")


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        (Row("a", datetime(2026, 1, 1, tzinfo=UTC)), '{"name":"a","at":"2026-01-01T00:00:00Z"}'),
        (Struct("a", Struct("b")), '{"name":"a","inner":{"name":"b","inner":null}}'),
        (Model(name="a"), '{"name":"a","price":"1.50"}'),
        ({"rows": [Model(name="a")]}, '{"rows":[{"name":"a","price":"1.50"}]}'),
        ({1: (1, 2)}, '{"1":[1,2]}'),
        (None, "null"),
    ],
)
def test_objects_are_accepted(value: Any, encoded: str) -> None:
    """Dataclasses, Structs, pydantic models and plain values, inside each other too."""
    assert payload.encode(value) == encoded


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"a": ["x", "\0"]}, r"data\.a\[1\] holds the character NUL"),
        ({"a": "\ud800"}, r"data\.a holds a lone surrogate"),
        ({"a\0": 1}, "data key holds the character NUL"),
        ({"a": float("nan")}, r"data\.a is nan"),
        ([float("inf")], r"data\[0\] is inf"),
        (2**64, "data is an integer beyond 64 bits"),
        ({"a": {"b": -(2**63) - 1}}, r"data\.a\.b is an integer beyond 64 bits"),
        (deep(65), "nested deeper than 64"),
        (deep(50_000), "nested deeper than 64"),
        (object(), "data has no JSON form"),
        ({"a": {1, object()}}, "data has no JSON form"),
        ("x" * payload.PAYLOAD_BYTES_MAX, "data takes 262146 bytes, more than 262144"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, str) else type(value).__name__,
)
def test_what_one_of_the_databases_would_not_keep_is_refused(value: Any, said: str) -> None:
    """Refused at the door on both databases alike, with the path of what is wrong."""
    with pytest.raises(InvalidInput, match=said):
        payload.encode(value)


def test_the_limits_themselves_are_accepted() -> None:
    """Depth 64, 64-bit integers and 256 KiB are within."""
    assert payload.encode(deep(64))
    assert payload.encode([payload.INT_MIN, payload.INT_MAX])
    assert payload.encode("x" * (payload.PAYLOAD_BYTES_MAX - 2))
    with pytest.raises(InvalidInput, match="takes 4 bytes, more than 3"):
        payload.encode("ab", bytes_max=3)


def test_the_field_is_named() -> None:
    """The error carries the field, and a path that somebody made endless is cut."""
    with pytest.raises(InvalidInput) as caught:
        payload.encode({"k" * 9_999: "\0"}, "body")
    assert caught.value.about["field"].startswith("body.kkk")
    assert len(caught.value.about["field"]) == 200


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (7, "key must be a str, got int"),
        (None, "key must be a str, got NoneType"),
        ("", "key must not be empty"),
        (" \n", "key must not be empty"),
        ("a\0", "key holds the character NUL"),
        ("a\udfff", "key holds a lone surrogate"),
        ("ü" * 257, "key is longer than 512 bytes"),
    ],
)
def test_text_that_is_refused(value: Any, said: str) -> None:
    """Keys and names are text, not blank, storable and bounded in bytes."""
    with pytest.raises(InvalidInput, match=said):
        payload.text(value, "key")


def test_text_that_is_accepted() -> None:
    """It comes back unchanged; empty only where that is allowed."""
    assert payload.text("ü" * 256, "key") == "ü" * 256
    assert payload.text("", "to", empty=True) == ""


class Untellable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("no"), "ValueError: no"),
        (ValueError(), "ValueError"),
        (Refused("It is declared twice."), "Refused: It is declared twice."),
        (Refused(), "Refused"),
        (ValueError("ValueError: no"), "ValueError: no"),
        (GiveUp(""), "GiveUp: Trying again will not help."),
        ("exit 3", "exit 3"),
        ("a\0b\ud800c", "a�b?c"),
        (Untellable(), "Untellable (its text could not be had: RuntimeError)"),
        ("x" * 2_000, "x" * 2_000),
        ("x" * 2_001, "x" * 1_999 + "…"),
    ],
)
def test_an_error_s_text_can_always_be_stored(error: object, said: str) -> None:
    """Whatever it is: bounded, without what a database refuses, and its class told once."""
    assert payload.safe_error(error) == said


def test_a_traceback_says_once_that_it_was_refused() -> None:
    """Python shows an error's class before its text, which does not say the same again."""
    (line,) = traceback.format_exception_only(Refused("It is declared twice."))
    assert line == "postroad.model.errors.Refused: It is declared twice.\n"
    assert (str(Refused()), str(InvalidInput("x"))) == ("Refused.", "This value is not accepted. x")


@given(st.text(st.characters(), max_size=50))
def test_a_safe_error_is_text_that_can_be_stored(said: str) -> None:
    """Any text becomes one that the door for text lets in."""
    payload.text(payload.safe_error(said), "error", empty=True, bytes_max=10_000)


class LoudModel(pydantic.BaseModel):
    name: str

    @pydantic.field_serializer("name")
    def _serialise(self, value: str) -> str:
        raise ValueError(f"cannot write {value}")


def test_a_model_that_cannot_be_written_is_refused() -> None:
    """An error inside a payload's own code is InvalidInput with the field's name."""
    with pytest.raises(InvalidInput, match=r"data has no JSON form: .*cannot write x"):
        payload.encode(LoudModel(name="x"))
