"""What people see of errors that are pages long; programs get all of it."""

from dataclasses import replace
from typing import Any

import pytest

from postroad import Dispatch, GiveUp, Kind, Postroad, Retry, RetryLater, Turn, Unreachable
from postroad.model.payload import ERROR_CHARS_MAX
from postroad.surfaces import output, screens
from tests.acceptance.test_operating import Place, empty

__all__ = ["empty"]
pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.filterwarnings("ignore::postroad.store.sqlite_version.SQLiteVersionWarning"),
]
HOOK: Kind[Any] = Kind("hook", Any)
WORDS = "the answer was no and "
READABLE = 400  # a row of a table, whose columns are cut
ERRORS = {"words": WORDS * 140, "solid": "x" * 3_000, "lines": "\n".join(f"line {n}" for n in range(300))}


@pytest.fixture(params=ERRORS)
def error(request: pytest.FixtureRequest) -> str:
    return ERRORS[request.param]


@pytest.fixture
def place(empty: Place, error: str) -> Place:
    """A dispatch that died, one that backs off, one that is held, and a turn that failed, each with a long error."""
    post = Postroad(empty.url, schema=empty.schema)

    @post.sender(HOOK, retry=Retry(attempts=2, jitter=False))
    def hook(d: Dispatch[Any]) -> None:
        raise {"dead": GiveUp, "waits": RetryLater, "held": Unreachable}[d.key](error)

    @post.turn("chat")
    def chat(turn: Turn) -> None:
        raise RetryLater(error)

    with post.begin() as tx:
        for key in ("dead", "waits", "held"):
            tx.send(HOOK, {}, to=f"https://{key}.example/x", key=key)
        tx.publish("chat/1", HOOK, {})
    post.drain()
    post.close()
    return empty


def widest(lines: list[str]) -> int:
    return max(map(len, lines))


def told(shown: str) -> tuple[list[str], list[str]]:
    """What `show` has of the last error below its tables, and its notes on what is left out."""
    lines = shown.split("\nlast error\n")[1].split("\nbody (")[0].splitlines()
    notes = [line for line in lines if "--json has all of" in line]
    return [line for line in lines if line not in notes], notes


@pytest.mark.parametrize("key", ["dead", "waits", "held"])
def test_a_dispatch_is_shown_in_lines_that_can_be_read(place: Place, error: str, key: str) -> None:
    """`show` folds the error and cuts it in its tables, and says so; --json has all that was kept."""
    shown = place.said("dispatch", "show", key)
    assert widest(shown.splitlines()) <= READABLE
    lines, notes = told(shown)
    assert widest(lines) <= output.LINE_CHARACTERS
    assert len(lines) <= screens.ERROR_LINES
    assert notes[-1].endswith("than a table has room for: --json has all of it.)")
    kept = place.answer("dispatch", "show", key)["last_error"]
    assert len(kept) == ERROR_CHARS_MAX
    assert kept.startswith(error[:1_000])
    seen, whole = ("".join("".join(text).split()) for text in (lines, kept))
    assert whole.startswith(seen)
    assert (seen == whole) == (len(notes) == 1) == ("line" not in error)


def test_other_views_have_its_beginning_only(place: Place, error: str) -> None:
    """Lists, `why`, gates and a stream's runs have room for the beginning of its first line."""
    start = error.splitlines()[0][:50]
    for command in (
        ("dispatch", "ls"), ("dispatch", "why", "dead"), ("dispatch", "why", "waits"), ("gate", "ls"),
        ("stream", "show", "chat/1"),
    ):  # fmt: skip
        shown = place.said(*command)
        assert start in shown, command
        assert widest(shown.splitlines()) <= READABLE, command


def test_a_narrow_terminal(place: Place, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where lines are shorter it is folded sooner."""
    monkeypatch.setenv("COLUMNS", "60")
    shown = place.said("dispatch", "show", "dead")
    assert widest(told(shown)[0]) <= 60
    assert replace(place, apart=True).said("dispatch", "show", "dead") == shown
