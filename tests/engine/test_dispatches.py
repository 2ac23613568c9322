"""What code may do as an operator: the functions that the command line calls."""

from typing import Any

import pytest

from postroad import Dispatch, DispatchFilter, GiveUp, InvalidInput, Kind, OutcomeUnknown, Postroad, Retry
from postroad.store import audit
from tests.engine.conftest import Open

MAIL = Kind("mail", dict[str, str])


def app(sent: list[str]) -> Postroad:
    """An app whose route is broken until something is in `sent`."""
    post = Postroad()

    @post.sender(MAIL, retry=Retry(attempts=1), on_unknown="park")
    def mail(d: Dispatch[dict[str, str]]) -> None:
        if d.to == "perhaps":
            raise OutcomeUnknown("broke")
        if not sent:
            raise GiveUp("no route")
        sent.append(d.key)

    return post


def test_a_retry_is_sent_by_the_next_loop(harness: Open) -> None:
    """What an operator has sent again goes out with the same key, as a possible duplicate, and is audited."""
    sent: list[str] = []
    post = app(sent)
    h = harness(post, senders="run")
    with post.begin() as tx:
        tx.send(MAIL, {}, key="a")
    h.drain()
    sent.append("route fixed")
    done = post.dispatches.retry("a", actor="ann", reason="route fixed", expires=60)
    assert (bool(done), done.found, done.done, done.said) == (True, 1, 1, "a was retried")
    assert not post.dispatches.retry("a", actor="ann")
    h.drain()
    assert sent == ["route fixed", "a"]
    row = post.dispatches.get("a")
    assert row is not None
    assert (row.status, row.epoch, row.attempt) == ("delivered", 1, 1)
    assert [each.reason for each in post.database.read(audit.list_)] == ["route fixed"]


def test_a_replay_and_a_resolution(harness: Open) -> None:
    """A replay is sent under its own key; what may have arrived is resolved."""
    sent = ["route is up"]
    post = app(sent)
    h = harness(post, senders="run")
    with post.begin() as tx:
        tx.send(MAIL, {}, key="a")
        tx.send(MAIL, {}, to="perhaps", key="b")
    h.drain()
    made = post.dispatches.replay("a", actor="ann", key="a/2")
    named = post.dispatches.replay("a", actor="ann")
    h.drain()
    assert sent[1:] == ["a", "a/2", named.id]
    old = post.dispatches.get("a")
    assert old is not None
    repeated = post.dispatches.list(origin={"replay_of": old.id})
    assert {row.key for row in repeated} == {"a/2", named.id}
    assert {row.id for row in repeated} == {made.id, named.id}
    assert post.dispatches.resolve("b", "sent", actor="ann").said == "b was resolved (sent)"
    assert post.dispatches.list(reason="unknown_outcome") == []
    assert [row.key for row in post.dispatches.list(reason="dispatch.resolved.sent")] == ["b"]


def test_what_is_not_there_is_an_answer(harness: Open) -> None:
    """A name that nobody has does nothing and says so; a filter that fits nothing likewise."""
    post = app([])
    harness(post)
    d = post.dispatches
    by = {"actor": "ann"}
    for answer in (
        d.retry("x", **by), d.withdraw("x", **by), d.purge("x", **by), d.replay("x", **by),
        d.resolve("x", "sent", **by), d.purge("x", actor="ann", dry_run=True),
    ):  # fmt: skip
        assert (bool(answer), answer.found, answer.said) == (False, 0, "No dispatch has the id or key 'x'")
    assert d.purge(DispatchFilter(status="expired"), actor="ann").said == "no dispatch fits"
    assert post.database.read(audit.list_) == []


def test_a_dry_run_does_nothing(harness: Open) -> None:
    """It counts and shows what is meant, by name or by filter."""
    post = app([])
    h = harness(post, senders="run")
    with post.begin() as tx:
        for n in range(12):
            tx.send(MAIL, {}, key=f"k{n}")
    h.drain()
    one = post.dispatches.purge("k1", actor="ann", dry_run=True)
    assert (one.found, one.done, [row.key for row in one.sample]) == (1, 0, ["k1"])
    many = post.dispatches.purge(DispatchFilter(key="k1"), actor="ann", dry_run=True)
    assert (many.found, many.done, many.said) == (3, 0, "3 would be purged")
    every = post.dispatches.retry(DispatchFilter(kind="mail"), actor="ann", dry_run=True)
    assert (every.found, len(every.sample)) == (12, 10)
    assert len(post.dispatches.list()) == 12
    assert post.dispatches.purge(DispatchFilter(key="k1"), actor="ann").done == 3
    assert len(post.dispatches.list()) == 9


@pytest.mark.parametrize(
    ("verb", "given", "said"),
    [
        ("retry", {"which": DispatchFilter()}, "Give a dispatch's id or key"),
        ("withdraw", {"which": DispatchFilter()}, "Give a dispatch's id or key"),
        ("purge", {"which": DispatchFilter(), "force": True}, "Give a dispatch's id or key"),
        ("retry", {"which": DispatchFilter(status="pending")}, "Only what is dead_letter, expired can be retried"),
        ("purge", {"which": DispatchFilter(status="pending")}, "unless forced"),
        ("purge", {"which": None}, "DispatchFilter"),
        ("retry", {"which": "k", "rate": 0}, "rate"),
        ("retry", {"which": "k", "rate": float("nan")}, "rate"),
        ("retry", {"which": "k", "rate": True}, "rate"),
        ("retry", {"which": "k", "expires": -1}, "expires"),
        ("retry", {"which": ""}, "id must not be empty"),
        ("resolve", {"id": "k", "how": "lost"}, "how"),
        ("replay", {"id": "k", "key": ""}, "key"),
        ("purge", {"which": "k", "actor": ""}, "actor"),
    ],
)
def test_what_makes_no_sense_is_refused(harness: Open, verb: str, given: dict[str, Any], said: str) -> None:
    """A filter that chooses nothing in particular, or wrong values, are errors that name what to give."""
    post = app([])
    harness(post)
    with pytest.raises(InvalidInput, match=said):
        getattr(post.dispatches, verb)(**{"actor": "ann", **given})


def test_a_filter_is_told_to_the_audit_as_people_read_it(harness: Open) -> None:
    """Every criterion is in the audit's subject, times as ISO 8601."""
    post = app([])
    h = harness(post, senders="run")
    with post.begin() as tx:
        tx.send(MAIL, {}, to="ann", key="k", origin={"by": "x"})
    h.drain()
    wanted = DispatchFilter(
        status="dead_letter", kind="mail", to="ann", key="k", reason="permanent", origin={"by": "x"},
        since=h.clock.now, before=h.clock.now.replace(year=2030),
    )  # fmt: skip
    assert post.dispatches.retry(wanted, actor="ann").done == 1
    (row,) = post.database.read(audit.list_)
    assert row.subject == (
        "status=dead_letter kind=mail to=ann key=k reason=permanent origin=by=x "
        f"since={wanted.since.isoformat() if wanted.since else ''} "
        f"before={wanted.before.isoformat() if wanted.before else ''}"
    )


def test_what_arrives_while_a_command_runs_is_left_alone(harness: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command acts upon what was there when it began, also if more keeps coming between its chunks."""
    post = app([])
    h = harness(post, senders="run")

    def send(*keys: str) -> None:
        with post.begin() as tx:
            for key in keys:
                tx.send(MAIL, {}, key=key)
        h.drain()

    send("k1", "k2", "k3")
    monkeypatch.setattr("postroad.engine.dispatches.CHUNK", 1)
    transact = post.database.transact
    more = iter(range(100))

    def and_more(fn: Any, *args: Any, **kwargs: Any) -> Any:
        answer = transact(fn, *args, **kwargs)
        if fn.__name__ == "purge":
            h.clock.advance(1)
            monkeypatch.setattr(post.database, "transact", transact)
            send(f"new{next(more)}")
            monkeypatch.setattr(post.database, "transact", and_more)
        return answer

    monkeypatch.setattr(post.database, "transact", and_more)
    done = post.dispatches.purge(DispatchFilter(status="dead_letter"), actor="ann")
    assert (done.found, done.done) == (3, 3)
    assert sorted(row.key for row in post.dispatches.list()) == ["new0", "new1", "new2"]
