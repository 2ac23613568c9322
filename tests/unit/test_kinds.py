"""Kinds: names with types, and older payloads made today's."""

from dataclasses import dataclass
from typing import Any, TypedDict

import msgspec
import pydantic
import pytest

from postroad.model.errors import InvalidInput
from postroad.model.events import Event
from postroad.model.kinds import Kind


@dataclass
class Mail:
    to: str
    subject: str = "no subject"


class MailStruct(msgspec.Struct):
    to: str
    subject: str = "no subject"


class MailModel(pydantic.BaseModel):
    to: str
    subject: str = "no subject"


class MailDict(TypedDict):
    to: str
    subject: str


def event(kind: str, raw: str, version: int = 1) -> Event:
    return Event(stream="a/1", key="k", kind=kind, raw=raw, version=version)


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (Mail, Mail("ann", "hi")),
        (MailStruct, MailStruct("ann", "hi")),
        (MailModel, MailModel(to="ann", subject="hi")),
        (MailDict, {"to": "ann", "subject": "hi"}),
        (dict[str, str], {"to": "ann", "subject": "hi"}),
    ],
)
def test_a_payload_comes_back_typed(body: type[Any], value: Any) -> None:
    """Dataclass, Struct, pydantic model, TypedDict and dict: what was stored is read as the same type."""
    kind = Kind("mail", body)
    raw = kind.encode(value)
    assert raw == '{"to":"ann","subject":"hi"}'
    assert kind.of(event("mail", raw)) == value


def test_another_kind_s_event_is_not_decoded() -> None:
    """`of` answers None for another kind, whatever its payload looks like."""
    assert Kind("mail", Mail).of(event("sms", '{"to":"ann"}')) is None


def test_aliases_are_former_names() -> None:
    """Rows that wait under a former name are this kind's."""
    kind = Kind("mail", Mail, aliases=["email", "letter"])
    assert kind.names == ("mail", "email", "letter")
    assert kind.of(event("letter", '{"to":"ann"}')) == Mail("ann")


@pytest.mark.parametrize("body", [Mail, MailModel])
def test_a_payload_that_does_not_fit_is_refused(body: type[Any]) -> None:
    """The field is named; what is stored later can be read."""
    with pytest.raises(InvalidInput, match="body does not fit kind 'mail'") as caught:
        Kind("mail", body).encode({"subject": "hi"}, "body")
    assert caught.value.about == {"field": "body"}


def test_a_stored_payload_that_does_not_fit_is_an_error() -> None:
    """A row written by somebody else's hand raises ValueError, not a half-made object."""
    with pytest.raises(ValueError, match="to"):
        Kind("mail", Mail).decode('{"subject":"hi"}', 1)


def rename(old: dict[str, Any]) -> dict[str, Any]:
    return {"to": old["recipient"]}


def greet(old: dict[str, Any]) -> dict[str, Any]:
    return {**old, "subject": "hello"}


@pytest.mark.parametrize(
    ("version", "raw", "expected"),
    [
        (1, '{"recipient":"ann"}', Mail("ann", "hello")),
        (2, '{"to":"ann"}', Mail("ann", "hello")),
        (4, '{"to":"ann","subject":"x"}', Mail("ann", "x")),
        (5, '{"to":"ann","subject":"from newer code"}', Mail("ann", "from newer code")),
    ],
)
def test_older_payloads_are_upgraded(version: int, raw: str, expected: Mail) -> None:
    """One step for each version, a missing one changes nothing; newer versions are read as they are."""
    kind = Kind("mail", Mail, version=4, upgrade={1: rename, 2: greet})
    assert kind.of(event("mail", raw, version)) == expected


@pytest.mark.parametrize("version", [0, -1, True, 1.0, "1"])
def test_a_version_is_a_whole_number_from_1(version: Any) -> None:
    """Everything else is refused, naming the field."""
    with pytest.raises(InvalidInput, match="version must be a whole number from 1 to"):
        Kind("mail", Mail, version=version)


@pytest.mark.parametrize("name", ["", " ", "a\0b", "x" * 256, "evt:x", "out:x", 7])
def test_a_bad_name_is_refused(name: Any) -> None:
    """Blank, NUL, too long, no text, or a prefix that is ours."""
    with pytest.raises(InvalidInput, match="kind"):
        Kind(name, Mail)


def test_a_bad_alias_is_refused() -> None:
    """A former name obeys the rules of names."""
    with pytest.raises(InvalidInput, match="aliases must not be empty"):
        Kind("mail", Mail, aliases=[""])


def test_a_kind_shows_what_it_is() -> None:
    """Its repr has the name and the version; our own kinds may begin with `postroad.`."""
    assert repr(Kind("postroad.noop", Mail, version=2)) == "Kind('postroad.noop', version=2)"
