"""Gates and rates as a program uses them."""

import asyncio
from typing import Any

import pytest

from postroad import Dispatch, GiveUp, InvalidInput, Kind, Postroad, Retry, RetryLater, Unreachable
from postroad.store import gates
from postroad.store.statements import Statement
from tests.engine.conftest import Open

HOOK = Kind("hook", dict[str, int])
UNREADABLE = Statement('UPDATE {p}outbox SET body = \'{"n": "x"}\' WHERE key = :key')
STEADY = Retry(attempts=3, first=10, cap=100, jitter=False)


class Hosts:
    """An app that sends to hosts, of which some are down, and what has arrived."""

    def __init__(self, **sender: Any) -> None:
        self.post = Postroad()
        self.down: dict[str, Exception] = {}
        self.tried: list[str] = []
        self.sent: list[str] = []

        @self.post.sender(HOOK, **{"retry": STEADY, **sender})
        def hook(d: Dispatch[dict[str, int]]) -> None:
            host = gates_host(d.to)
            self.tried.append(host)
            if host in self.down:
                raise self.down[host]
            self.sent.append(d.key)

        @self.post.sender("other")
        def other(d: Dispatch[Any]) -> None:
            self.sent.append(d.key)

    def send(self, host: str, *keys: str) -> None:
        with self.post.begin() as tx:
            for key in keys:
                tx.send(HOOK, {}, to=f"https://{host}/x", key=key)


def gates_host(destination: str) -> str:
    return destination.split("/")[2]


def test_a_host_that_is_down_is_probed_and_costs_no_attempts(harness: Open) -> None:
    """Hundreds wait for the one host, a probe a minute tries it, the other host goes on; when it is back all arrive."""
    app = Hosts(retry=Retry(attempts=8))
    app.down["a.example"] = Unreachable("refused")
    h = harness(app.post, senders="run")
    app.send("a.example", *(f"a{n}" for n in range(200)))
    app.send("b.example", "b1")
    h.advance(600)
    assert app.sent == ["b1"]
    assert app.tried.count("a.example") <= 10 + 25  # as many as were under way at first, then probes
    app.send("b.example", "b2")
    assert h.drain().delivered == 1
    app.down.clear()
    h.advance(60)
    assert sorted(app.sent) == sorted(["b1", "b2", *(f"a{n}" for n in range(200))])
    assert {row.attempt for row in app.post.dispatches.list(limit=500)} == {1}


def test_a_whole_kind_is_held_where_its_sender_says_so(harness: Open) -> None:
    """An account that is closed concerns every host of the kind, and no other kind."""
    app = Hosts()
    app.down["a.example"] = Unreachable("account suspended", whole_kind=True)
    h = harness(app.post, senders="run")
    app.send("a.example", "a1")
    h.drain()
    app.send("b.example", "b1")
    with app.post.begin() as tx:
        tx.send("other", {}, key="o1")
    h.drain()
    assert app.sent == ["o1"]
    app.down.clear()
    h.advance(60)
    assert sorted(app.sent) == ["a1", "b1", "o1"]


def test_a_retry_after_is_waited_for(harness: Open) -> None:
    """The host says when to come again: not before that, and then at once."""
    app = Hosts()
    app.down["a.example"] = Unreachable("maintenance", after=300)
    h = harness(app.post, senders="run")
    app.send("a.example", "a1")
    h.advance(299)
    assert app.tried == ["a.example"]
    app.down.clear()
    h.advance(1)
    assert app.sent == ["a1"]


@pytest.mark.parametrize("error", [RetryLater("busy"), GiveUp("gone"), ValueError("odd")])
def test_an_answer_closes_nothing(harness: Open, error: Exception) -> None:
    """Whoever answers is there: what goes wrong then is an attempt like any other."""
    app = Hosts()
    app.down["a.example"] = error
    h = harness(app.post, senders="run")
    h._expected.append(error)
    app.send("a.example", "a1", "a2")
    h.drain()
    assert app.tried == ["a.example"] * 2
    assert app.post.database.read(gates.list_) == []


def test_a_probe_that_cannot_be_read_says_nothing_about_its_host(harness: Open) -> None:
    """Nothing was sent: the gate stays as it is, the host is tried by the next one, and the first one dies in time."""
    app = Hosts()
    app.down["a.example"] = Unreachable("refused")
    h = harness(app.post, senders="run")
    app.send("a.example", "a1")
    h.drain()
    app.post.database.transact(lambda conn, now: UNREADABLE(conn, key="a1").rowcount)
    for _ in range(3):
        with pytest.raises(ValueError, match="Expected `int`"):
            h.advance(60)
        (gate,) = app.post.database.read(gates.list_)
        assert (gate.host, gate.failures, gate.probing, app.tried) == ("a.example", 1, False, ["a.example"])
    row = app.post.dispatches.get("a1")
    assert row is not None
    assert (row.status, row.attempt) == ("dead_letter", 3)
    app.down.clear()
    app.send("a.example", "a2")
    h.drain()
    assert app.sent == ["a2"]
    assert app.post.database.read(gates.list_) == []


def test_an_unreachable_destination_ends_as_a_dead_letter(harness: Open) -> None:
    """A host that never was there: after the time its attempts would have taken they are counted, and it dies."""
    app = Hosts()
    app.down["typo.example"] = Unreachable("no such host")
    h = harness(app.post, senders="run")
    app.send("typo.example", "t1")
    h.advance(3_600)
    row = app.post.dispatches.get("t1")
    assert row is not None
    assert (row.status, row.attempt, row.last_error) == ("dead_letter", 3, "no such host")


def test_a_host_has_its_own_concurrency(harness: Open) -> None:
    """Of what is sent at once only so many go to one host; as one ends the next goes."""
    now: dict[str, int] = {}
    most: dict[str, int] = {}
    post = Postroad()

    @post.sender(HOOK, concurrency=8, concurrency_per_host=2)
    async def hook(d: Dispatch[dict[str, int]]) -> None:
        host = gates_host(d.to)
        now[host] = now.get(host, 0) + 1
        most[host] = max(most.get(host, 0), now[host])
        await asyncio.sleep(0)
        now[host] -= 1

    h = harness(post, senders="run")
    with post.begin() as tx:
        for n in range(20):
            tx.send(HOOK, {}, to=f"https://h{n % 2}.example/", key=f"k{n}")
    assert h.drain().delivered == 20
    assert max(most.values()) <= 2


def test_a_rate_spreads_attempts_over_time(harness: Open) -> None:
    """At two a second twenty take ten seconds, and none of them an attempt more."""
    app = Hosts(rate=2)
    h = harness(app.post, senders="run")
    app.send("a.example", *(f"a{n}" for n in range(20)))
    delivered = [h.advance(1).delivered for _ in range(10)]
    assert sum(delivered) == 20
    assert max(delivered) <= 3
    assert {row.attempt for row in app.post.dispatches.list(limit=50)} == {1}


def test_a_rate_per_host_holds_up_no_other_host(harness: Open) -> None:
    """Each host has its own pace."""
    app = Hosts(rate_per_host=1)
    h = harness(app.post, senders="run")
    app.send("a.example", "a1", "a2", "a3")
    app.send("b.example", "b1")
    h.drain()
    assert sorted(app.sent) == ["a1", "b1"]
    h.advance(2)
    assert sorted(app.sent) == ["a1", "a2", "a3", "b1"]


@pytest.mark.parametrize("field", ["rate", "rate_per_host"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "5", True, 1e9])
def test_a_rate_is_a_number_of_attempts_per_second(field: str, value: Any) -> None:
    """Anything else is refused when it is declared, and the error names the field."""
    with pytest.raises(InvalidInput, match=field):
        Postroad().sender(HOOK, **{field: value})(lambda d: None)


@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True])
def test_a_concurrency_per_host_is_a_number_of_sends(value: Any) -> None:
    """As `concurrency` is."""
    with pytest.raises(InvalidInput, match="concurrency_per_host"):
        Postroad().sender(HOOK, concurrency_per_host=value)(lambda d: None)


def test_with_one_attempt_the_first_one_counts(harness: Open) -> None:
    """Who allows a single attempt gets a dead letter at once; the gate is closed for the others all the same."""
    app = Hosts(retry=Retry(attempts=1))
    app.down["a.example"] = Unreachable("refused")
    h = harness(app.post, senders="run")
    app.send("a.example", "a1")
    assert h.drain().dead_letter == 1
    assert [gate.host for gate in app.post.database.read(gates.list_)] == ["a.example"]
