"""The benchmarks of conversations: fair ones and long ones."""

import warnings
from collections.abc import Iterator
from contextlib import closing
from functools import partial

import pytest

from benchmarks import conversations, expectations, fairness, places, seeds
from benchmarks.figures import QUICK, Figure
from postroad.store import log
from postroad.store.sqlite_version import SQLiteVersionWarning


@pytest.fixture(autouse=True)
def any_sqlite() -> Iterator[None]:
    """Whatever SQLite this process has may be measured."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SQLiteVersionWarning)
        yield


def test_a_long_conversation_is_one_that_goes_on() -> None:
    """What was written at one stroke is a log like any other: a turn folds it, looks into it and appends to it."""
    with places.sqlite_places() as (place, _):
        seeds.conversation(place, "bench/long", 30)
        talk = conversations.Talk(place.url, place.schema, 20)
        with closing(talk.post), talk.post.running():
            assert talk.turn("bench/long", "e") > 0
        entries = place.database.read(partial(log.read, stream="bench/long", limit=100))

    assert [entry.seq for entry in entries] == list(range(1, 33))
    assert entries[-1].data["event"] == "15/20"  # of thirty entries every other one was decided; the window is full


def test_every_cold_conversation_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round measures each of the cold ones, beside the hot one and without it, and both ways to come."""
    monkeypatch.setattr(fairness, "COLD", 5)
    monkeypatch.setattr(fairness, "MESSAGES", 20)
    monkeypatch.setattr(fairness, "AT_ONCE", 10)
    with places.sqlite_places() as (ours, limit):
        for hot in (True, False):
            for pause in (0.0, 0.001):
                # Not above 0, all of them: a turn may begin before its publisher has heard that the commit is over.
                assert len(fairness._lengths(ours, pause, hot=hot)) == 5
                ours.clear()
        found = list(fairness.measure("sqlite", ours, limit, QUICK, lambda _: None))

    assert [figure.case.partition("beside")[2] for figure in found] == [" a hot one, p50", " a hot one, p95"] * 2
    assert len(list(expectations.judged(found))) == 2


@pytest.mark.parametrize(("ours", "verdict"), [(26.0, "ok"), (26.4, "FALLS SHORT")])
def test_a_long_conversation_may_cost_a_third_more(ours: float, verdict: str) -> None:
    """Turn 10,000 is held against 1.3 times of turn 10."""
    case = f"turn {conversations.LATE:,}, log(last=20)"
    figure = Figure(work=conversations.NAME, database="postgres", case=case, unit="ms", ours=ours, against=20)

    (judged,) = expectations.judged([figure])

    assert (judged.what, judged.verdict) == ("turn 10,000 of turn 10, log(last=20)", verdict)
