"""What becomes of a dispatch, whatever its sender does."""

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import event

from postroad import (
    Dispatch,
    GiveUp,
    InvalidInput,
    KeyConflict,
    Kind,
    OutcomeUnknown,
    Postroad,
    Receipt,
    Refused,
    Retry,
    RetryLater,
    UnknownKind,
)
from postroad.store import alerts
from postroad.testing import Harness
from tests.engine.conftest import Open

MAIL = Kind("mail", dict[str, str])
STEADY = Retry(attempts=3, first=10, cap=100, jitter=False)


def app(result: Any = None, **sender: Any) -> tuple[Postroad, list[Dispatch[Any]]]:
    """An app whose sender records its dispatches and then returns, or raises, `result`."""
    post = Postroad()
    seen: list[Dispatch[Any]] = []

    @post.sender(MAIL, **{"retry": STEADY, **sender})
    def mail(d: Dispatch[dict[str, str]]) -> Any:
        seen.append(d)
        if isinstance(result, BaseException):
            raise result
        return result

    return post, seen


def send(post: Postroad, key: str = "k", **more: Any) -> None:
    with post.begin() as tx:
        tx.send(MAIL, {"a": "b"}, to="x", key=key, **more)


def status(post: Postroad, key: str = "k") -> tuple[str, str]:
    row = post.dispatches.get(key)
    assert row is not None
    return row.status, row.reason.rsplit(".", 1)[1]


def codes(h: Harness) -> list[str]:
    return [a.code for a in h.post.database.read(alerts.list_)]


@pytest.mark.parametrize(
    "result", [None, "ref-1", Receipt("ref-2", {"cost": 3}), Receipt("bad\0ref", {"x": float("nan")})]
)
def test_success_is_delivered(harness: Open, result: Any) -> None:
    """A successful send is delivered, whatever odd text the provider answered."""
    post, seen = app(result)
    h = harness(post, senders="run")
    send(post)
    done = h.drain()
    assert (done.attempted, done.delivered) == (1, 1)
    assert status(post) == ("delivered", "transport_ok")
    assert [(d.key, d.to, d.body, d.attempt, d.possible_duplicate) for d in seen] == [("k", "x", {"a": "b"}, 1, False)]


@pytest.mark.parametrize("result", [False, True, {"ok": False}, 500, object()])
def test_any_other_result_is_an_error(harness: Open, result: Any) -> None:
    """A result that does not plainly say success is retried and ends dead, never delivered."""
    post, seen = app(result)
    h = harness(post, senders="run")
    send(post)
    h.advance(1000)
    assert status(post) == ("dead_letter", "max_attempts")
    assert [d.attempt for d in seen] == [1, 2, 3]
    assert "dispatch.dead_letter" in codes(h)


def test_a_forgotten_await_is_an_error(harness: Open) -> None:
    """A sender that returns a coroutine instead of awaiting it has not sent anything."""
    post = Postroad()

    async def later() -> None: ...

    @post.sender(MAIL, retry=Retry(attempts=1))
    def mail(d: Dispatch[dict[str, str]]) -> Any:
        return later()

    h = harness(post, senders="run")
    send(post)
    h.drain()
    assert status(post) == ("dead_letter", "max_attempts")


def test_retries_follow_the_policy(harness: Open) -> None:
    """A failed send is due again after the policy's delay, and a success clears the error."""
    post, _ = app()
    h = harness(post)
    h.fail(MAIL, RetryLater("busy"), times=2)
    send(post)
    h.drain()
    row = post.dispatches.get("k")
    assert row is not None
    assert (row.status, row.attempt, row.last_error) == ("pending", 1, "busy")
    assert row.due_at is not None
    assert row.due_at - h.clock.now == timedelta(seconds=10)
    h.advance(30)
    row = post.dispatches.get("k")
    assert row is not None
    assert (row.status, row.attempt, row.last_error, row.due_at) == ("delivered", 3, None, None)


def test_a_retry_after_is_never_undercut(harness: Open) -> None:
    """RetryLater(after=…) is a floor for the next attempt."""
    post, _ = app()
    h = harness(post)
    h.fail(MAIL, RetryLater("busy", after=500))
    send(post)
    assert h.advance(499).delivered == 0
    assert h.advance(1).delivered == 1


def test_give_up_is_a_dead_letter_at_once(harness: Open) -> None:
    """GiveUp spends no further attempts."""
    post, _ = app()
    h = harness(post)
    h.fail(MAIL, GiveUp("no such address"))
    send(post)
    h.drain()
    assert status(post) == ("dead_letter", "permanent")


@pytest.mark.parametrize(
    ("on_unknown", "end"), [("resend", ("delivered", "transport_ok")), ("park", ("dead_letter", "unknown_outcome"))]
)
def test_an_unknown_outcome_follows_the_setting(harness: Open, on_unknown: str, end: tuple[str, str]) -> None:
    """OutcomeUnknown is sent again, marked as a possible duplicate, or parked for a person."""
    post, _ = app(on_unknown=on_unknown)
    h = harness(post)
    h.fail(MAIL, OutcomeUnknown("connection reset"))
    send(post)
    h.advance(100)
    assert status(post) == end
    assert [d.possible_duplicate for d in h.sent(MAIL)] == ([True] if on_unknown == "resend" else [])


@pytest.mark.parametrize(
    "error", [SystemExit(1), KeyboardInterrupt(), BaseException("own"), RuntimeError("x" * 5_000_000 + "\0\ud83c")]
)
def test_any_exception_is_the_senders_failure(harness: Open, error: BaseException) -> None:
    """Whatever a sender raises fails its attempt with a bounded, storable text, and ends no loop."""
    post, _ = app(error, retry=Retry(attempts=1))
    h = harness(post, senders="run")
    send(post)
    with pytest.raises(type(error)):
        h.drain()
    row = post.dispatches.get("k")
    assert row is not None
    assert row.status == "dead_letter"
    assert row.last_error is not None
    assert row.last_error.startswith(type(error).__name__)
    assert len(row.last_error) <= 2_000


def test_the_budget_runs_from_the_first_attempt(harness: Open) -> None:
    """A backlog spends no budget, the first retry is always allowed, a later one beyond the budget is not."""
    post, _ = app(retry=Retry(attempts=8, budget=15, first=20, cap=20, jitter=False))
    h = harness(post)
    h.fail(MAIL, RetryLater("busy"), times=8)
    send(post, after=1000)
    h.advance(1000)
    assert status(post) == ("pending", "retry_backoff")
    h.advance(20)
    assert status(post) == ("dead_letter", "budget")
    assert post.dispatches.get("k").attempt == 2  # type: ignore[union-attr]


def test_what_has_expired_is_not_sent(harness: Open) -> None:
    """No attempt starts at or after the expiry."""
    post, _ = app()
    h = harness(post)
    send(post, after=60, expires=60)
    h.advance(120)
    assert h.sent(MAIL) == []
    assert status(post) == ("expired", "deadline")


def test_withdrawn_is_not_sent(harness: Open) -> None:
    """A pending dispatch can be withdrawn; too late says so and is no error."""
    post, _ = app()
    h = harness(post)
    send(post, after=60)
    with post.begin() as tx:
        first = tx.withdraw("k")
    with post.begin() as tx:
        second, unknown = tx.withdraw("k"), tx.withdraw("nobody")
    h.advance(120)
    assert (first.done, second.done, unknown.done) == (True, False, False)
    assert h.sent(MAIL) == []
    assert status(post) == ("expired", "withdrawn")


def test_the_same_key_is_one_dispatch(harness: Open) -> None:
    """The same key and content is the same dispatch in every status; other content is an error or, asked for, kept."""
    post, _ = app()
    h = harness(post)
    with post.begin() as tx:
        first = tx.send(MAIL, {"a": "b"}, to="x", key="k")
    for _ in range(2):
        with post.begin() as tx:
            again = tx.send(MAIL, {"a": "b"}, to="x", key="k")
        assert (again.id, again.created) == (first.id, False)
        with pytest.raises(KeyConflict), post.begin() as tx:
            tx.send(MAIL, {"a": "other"}, to="x", key="k")
        with post.begin() as tx:
            kept = tx.send(MAIL, {"a": "other"}, to="x", key="k", on_conflict="keep")
        assert (kept.id, kept.created) == (first.id, False)
        h.drain()
    assert len(h.sent(MAIL)) == 1


def test_without_a_key_every_send_is_a_dispatch(harness: Open) -> None:
    """No key means no dedup: the id is the key."""
    post, _ = app()
    h = harness(post)
    with post.begin() as tx:
        both = [tx.send(MAIL, {"a": "b"}) for _ in range(2)]
    h.drain()
    assert sorted(d.key for d in h.sent(MAIL)) == sorted(a.id for a in both)


def test_kinds_that_nobody_declares_are_refused(harness: Open) -> None:
    """A kind sent must have a sender here or be declared as another app's; the latter waits."""
    post, _ = app()
    post.elsewhere("fax")
    h = harness(post)
    with post.begin() as tx:
        with pytest.raises(UnknownKind):
            tx.send("telegram", {})
        tx.send("fax", {"n": 1}, key="f")
    assert h.advance(100_000).waiting == 1
    assert status(post, "f") == ("pending", "enqueued")


def test_a_payload_that_does_not_fit_its_kind_is_refused(harness: Open) -> None:
    """The payload is held against the kind's type at the verb."""
    post, _ = app()
    harness(post)
    with post.begin() as tx, pytest.raises(InvalidInput, match="body"):
        tx.send(MAIL, {"a": 5})  # type: ignore[dict-item]


def test_a_row_under_a_former_name_finds_its_sender(harness: Open) -> None:
    """A kind's alias is carried out by the sender of its new name."""
    post = Postroad()
    renamed = Kind("letter", dict[str, str], aliases=["mail"])
    post.sender(renamed)(lambda d: None)
    h = harness(post)
    with post.begin() as tx:
        tx.send(MAIL, {"a": "b"}, key="k")
    h.drain()
    assert [d.key for d in h.sent(renamed)] == ["k"]


@pytest.mark.parametrize(
    "settings",
    [{"lease": 11.5}, {"timeout": 0}, {"timeout": -1}, {"concurrency": 0}, {"on_failure": "shrug"}, {"rate": 0}],
)
def test_silly_settings_are_refused_at_start(settings: dict[str, Any]) -> None:
    """A lease that the timeout does not fit into, and other settings that cannot work, are refused."""
    with pytest.raises(Refused):
        Postroad().sender(MAIL, **settings)(lambda d: None)
    with pytest.raises(InvalidInput):
        Retry(attempts=0)


def test_one_kind_has_one_sender() -> None:
    """A second sender of a kind is refused, under a former name too."""
    post, _ = app()
    with pytest.raises(Refused):
        post.sender(Kind("letter", dict[str, str], aliases=["mail"]))(lambda d: None)


def test_what_newer_code_has_written_is_left_to_it(harness: Open) -> None:
    """Older code, in a rolling update or after one was taken back, spends no attempt of a newer version's row."""
    post, _ = app()
    h = harness(post)
    with post.begin() as tx:
        tx.send(Kind("mail", dict[str, int], version=2), {"a": 1}, key="new")
        tx.send(MAIL, {"a": "b"}, key="old")
    h.advance(10_000)
    assert [d.key for d in h.sent(MAIL)] == ["old"]
    assert status(post, "new") == ("pending", "enqueued")


def test_a_send_pays_for_nothing_that_it_does_not_use(harness: Open) -> None:
    """A plain send is the row and its history: no look at lanes, acknowledgements, withdrawals or tombstones."""
    post, _ = app()
    h = harness(post)
    send(post, "first")
    told: list[str] = []

    def heard(_conn: Any, _cursor: Any, sql: str, *_rest: Any) -> None:
        told.append(" ".join(sql.split()[:3]).rpartition(".")[2].removesuffix('"'))

    event.listen(h.post.database.engine, "before_cursor_execute", heard)
    send(post, "second")
    event.remove(h.post.database.engine, "before_cursor_execute", heard)
    tables = [each.rpartition(" ")[2] for each in told if not each.startswith("BEGIN")]
    assert [name for name in tables if name.startswith("postroad_")] == ["postroad_outbox", "postroad_transitions"]
    assert len(tables) == 2, told
