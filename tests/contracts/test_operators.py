"""Operators' verbs over both databases and every way to run a transaction; and what a filter chooses."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection

from postroad.model.clock import micros
from postroad.model.dispatches import DispatchFilter
from postroad.model.errors import InvalidInput
from postroad.model.rows import NewDispatch
from postroad.store import audit, dispatch_filters, dispatch_views, outbox
from postroad.store.database import Database
from postroad.store.statements import as_json
from postroad.testing.contracts import operators
from postroad.testing.contracts.dispatches import dispatch


class TestRetry(operators.RetryContract):
    """Once more, from the beginning."""


class TestResolve(operators.ResolveContract):
    """A person says what became of it."""


class TestWithdraw(operators.WithdrawContract):
    """No longer wanted."""


class TestPurge(operators.PurgeContract):
    """Gone, and its key still taken."""


class TestReplay(operators.ReplayContract):
    """The same words in a new message."""


class TestAudit(operators.AuditContract):
    """Who did what."""


START = datetime(2026, 1, 1, tzinfo=UTC)
# Some that mean something to SQL, to LIKE, to JSON paths, and the ends of what may be stored.
WORDS = ["a", "ab", "a%", "a_", "", "'", '"', "\\", "$.a", "[0]", "0", "é", "\ud7ff", "\ue000", "\U0010ffff", "); --"]
word = st.one_of(st.sampled_from(WORDS), st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
name = word.filter(str.strip)
pairs = st.dictionaries(word, word, max_size=3)


@st.composite
def rows(draw: st.DrawFn) -> list[NewDispatch]:
    """Dispatches with keys, destinations, kinds and origins of every sort."""
    keys = draw(st.lists(name, min_size=1, max_size=6, unique=True))
    return [
        dispatch(n, key=key, kind=draw(name)[:60], destination=draw(word), origin=as_json(draw(pairs)))
        for n, key in enumerate(keys)
    ]


wanted = st.builds(
    DispatchFilter,
    kind=st.none() | name.map(lambda said: said[:60]),
    to=st.none() | word,
    key=st.none() | name,
    origin=pairs,
    since=st.none() | st.integers(-1, 7).map(lambda n: START + timedelta(seconds=n)),
    before=st.none() | st.integers(-1, 7).map(lambda n: START + timedelta(seconds=n)),
)


def fits(made: NewDispatch, created: datetime, asked: DispatchFilter) -> bool:
    """The same filter, in Python."""
    origin: Mapping[str, str] = msgspec.json.decode(made.origin)
    return (
        asked.kind in (None, made.kind)
        and asked.to in (None, made.destination)
        and (asked.key is None or made.key.startswith(asked.key))
        and asked.origin.items() <= origin.items()
        and (asked.since is None or created >= asked.since)
        and (asked.before is None or created < asked.before)
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=rows(), wanted=st.lists(wanted, min_size=1, max_size=5))
def test_a_filter_means_what_it_says(database: Database, rows: list[NewDispatch], wanted: list[DispatchFilter]) -> None:
    """Whatever is stored and whatever is asked for, a list holds exactly what the same filter in Python does."""
    created = {made.id: START + timedelta(seconds=n) for n, made in enumerate(rows)}

    class Undone(Exception):
        pass

    def work(conn: Connection, *, now: int) -> None:
        for made in rows:
            at = micros(created[made.id], "at")
            outbox.insert(conn, [made], source="test", actor="ann", in_turn=False, now=at)
        for asked in wanted:
            found = [row.id for row in dispatch_views.list_(conn, asked)]
            assert found == [made.id for made in reversed(rows) if fits(made, created[made.id], asked)], asked
        raise Undone

    with pytest.raises(Undone):
        database.transact(work)


@pytest.mark.parametrize(
    ("filters", "field"),
    [
        ({"status": "gone"}, "status"), ({"kind": ""}, "kind"), ({"to": "\0"}, "to"), ({"key": ""}, "key"),
        ({"reason": "no_such"}, "reason"), ({"reason": "dispatch.stale.transport_ok"}, "reason"),
        ({"origin": ["a"]}, "origin"), ({"origin": {"a": 1}}, "origin"), ({"since": "now"}, "since"),
        ({"before": datetime(2026, 1, 1)}, "before"),  # noqa: DTZ001
    ],
)  # fmt: skip
def test_a_filter_that_nothing_can_fit_is_refused(filters: dict[str, Any], field: str) -> None:
    """A wrong value is an error that names its field, not an empty list."""
    with pytest.raises(InvalidInput) as refused:
        dispatch_filters.chosen(DispatchFilter(**filters))
    assert refused.value.about["field"] == field


def test_a_filter_is_a_filter() -> None:
    """Anything else is refused."""
    wrong: Any = {"status": "pending"}
    with pytest.raises(InvalidInput, match="DispatchFilter"):
        dispatch_filters.chosen(wrong)


@pytest.mark.parametrize("cursor", ["", "x", "1", "1.", ".a", "-1.a", "9999999999999999999.a", "1 OR 1.a", 5])
def test_a_cursor_is_parsed_strictly(cursor: Any) -> None:
    """What is no cursor is refused before it reaches a statement."""
    with pytest.raises(InvalidInput) as refused:
        dispatch_filters.after(cursor)
    assert refused.value.about["field"] == "after"


@pytest.mark.parametrize(("actor", "reason"), [("", ""), ("a\0", ""), (None, ""), ("ann", "x" * 2001), ("ann", None)])
def test_who_and_why_must_be_text(actor: Any, reason: Any) -> None:
    """An actor must be named; a reason is bounded."""
    with pytest.raises(InvalidInput):
        audit.operator(actor, reason)
