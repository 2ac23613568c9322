"""Identity from the cause."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroad.model import ids
from postroad.model.errors import InvalidInput

NAMES = st.text(min_size=1, max_size=20)


@pytest.mark.parametrize(
    ("stream", "type_", "subject"),
    [("load/481207", "load", "481207"), ("chat/a/b", "chat", "a/b"), ("room", "room", "")],
)
def test_a_stream_s_name_has_two_parts(stream: str, type_: str, subject: str) -> None:
    """The type ends at the first slash; the subject is all that follows."""
    assert (ids.stream_type(stream), ids.subject(stream)) == (type_, subject)


def test_a_stream_s_name_is_checked() -> None:
    """A name with both parts is taken as it is."""
    assert ids.check_stream("load/481207") == "load/481207"


@pytest.mark.parametrize("stream", ["load", "/1", "load/", " /1", "load/ ", "", " ", "a/\0", "a/" + "x" * 600, 7])
def test_a_bad_stream_s_name_is_refused(stream: Any) -> None:
    """A part that is missing or blank, NUL, too many bytes, or no text: refused with the field's name."""
    with pytest.raises(InvalidInput, match=r"^This value is not accepted.*into "):
        ids.check_stream(stream, "into")


def test_kinds_and_handlers_have_short_names() -> None:
    """255 bytes are allowed, 256 are not."""
    assert ids.check_name("x" * 255, "kind")
    with pytest.raises(InvalidInput, match="kind is longer than 255 bytes"):
        ids.check_name("ü" * 128, "kind")


@pytest.mark.parametrize("key", ["postroad.x", "evt:x", "out:x"])
def test_our_prefixes_are_refused(key: str) -> None:
    """A user's event can't pass for one of ours."""
    with pytest.raises(InvalidInput, match="key must not begin with"):
        ids.check_event_key(key)
    assert ids.check_event_key("x" + key) == "x" + key


@pytest.mark.parametrize("key", ["tmr:1#2", "#0"])
def test_a_timer_s_key_does_not_look_like_a_generation(key: str) -> None:
    """Otherwise one timer's event could be another's: `a#1` first armed and `a` rearmed."""
    with pytest.raises(InvalidInput, match="key must not end with #<number>"):
        ids.check_timer_key(key)


@pytest.mark.parametrize("key", ["tmr:481207:A:1", "a#", "a#1b", "#1/x"])
def test_other_timer_s_keys_are_fine(key: str) -> None:
    """Only a number at the very end, after #, is taken."""
    assert ids.check_timer_key(key) == key


@given(st.tuples(NAMES, st.integers(0, 99)), st.tuples(NAMES, st.integers(0, 99)))
def test_a_timer_s_events_are_told_apart(one: tuple[str, int], other: tuple[str, int]) -> None:
    """Different keys or generations never give the same event id."""
    keys = []
    for key, _ in (one, other):
        try:
            keys.append(ids.check_timer_key(key))
        except InvalidInput:
            return
    assert (ids.timer_event_id(*one) == ids.timer_event_id(*other)) == (one == other)


def test_ids_look_as_promised() -> None:
    """The forms that operators read and other systems may rely on."""
    assert ids.timer_event_id("tmr:481207:A:1", 0) == "evt:tmr:481207:A:1"
    assert ids.timer_event_id("tmr:481207:A:1", 2) == "evt:tmr:481207:A:1#2"
    assert ids.outcome_id("481207/A/1/send_sms", 0, "delivered") == "out:481207/A/1/send_sms:delivered"
    assert ids.outcome_id("481207/A/1/send_sms", 1, "delivered") == "out:481207/A/1/send_sms:1:delivered"
    assert ids.entry_id("t", 3) == "postroad.t.3"
    assert ids.key_in_turn("t", 3) == "t/3"


@given(NAMES, st.lists(NAMES))
def test_a_turn_s_id_comes_from_its_events(stream: str, events: list[str]) -> None:
    """The same for the same set in the same order, whoever asks; another for another set."""
    turn = ids.turn_id(stream, events)
    assert turn == ids.turn_id(stream, iter(events))
    assert turn != ids.turn_id(stream, [*events, "more"])
    assert turn != ids.turn_id(stream + "2", events)
    assert len(turn) == 32


def test_joined_ids_are_not_one_id() -> None:
    """Where one event id ends and the next begins is part of the turn's id."""
    assert ids.turn_id("a/1", ["x", "y"]) != ids.turn_id("a/1", ["xy"])


def test_a_run_can_be_looked_up_by_its_claim() -> None:
    """Whoever knows the token and the stream knows the run's id; streams of one claim have their own."""
    assert ids.run_id("token", "a/1") == ids.run_id("token", "a/1")
    assert len({ids.run_id("token", "a/1"), ids.run_id("token", "a/2"), ids.run_id("other", "a/1")}) == 3
