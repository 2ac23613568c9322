"""Sinks: each takes every alert once in a process, and one that fails or hangs harms nobody but itself."""

import logging
import threading
from typing import Any

import pytest

from postroad import Postroad
from postroad.model.dispatches import Alert
from postroad.model.rows import NewAlert
from postroad.store import alerts
from tests.cases.apps import OpenApp, open_app, until
from tests.engine.conftest import Open

__all__ = ["open_app"]


def ring(post: Postroad, *codes: str) -> None:
    post.database.transact(alerts.raise_alerts, [NewAlert(code=code, subject="load/1") for code in codes])


def unrung(post: Postroad) -> int:
    return len(post.database.read(alerts.unrung))


def failing(post: Postroad) -> tuple[list[str], list[str], list[Exception]]:
    """A good sink and one that raises what is left in the third list."""
    good, tries, errors = list[str](), list[str](), list[Exception]()
    post.alert_sink(lambda alert: good.append(alert.code))

    @post.alert_sink
    def bad(alert: Alert) -> None:
        tries.append(alert.code)
        if errors:
            raise errors[0]

    return good, tries, errors


def test_a_failing_sink_does_not_ring_the_good_ones_again(harness: Open, caplog: pytest.LogCaptureFixture) -> None:
    """The good sink hears of each alert once; the failing one is tried ever more rarely, its trace logged once."""
    post = Postroad()
    good, tries, errors = failing(post)
    errors.append(ConnectionError("no such host"))
    h = harness(post)
    ring(post, "one", "two")
    with caplog.at_level(logging.ERROR, "postroad"):
        for _ in range(600):
            h.advance(1)
    assert good == ["one", "two"]
    assert 10 <= len(tries) <= 20
    assert sum("Traceback" in record.getMessage() for record in caplog.records) == 1
    assert unrung(post) == 2
    ring(post, "three")
    h.drain()
    assert good == ["one", "two", "three"]
    errors.clear()
    h.advance(60)
    h.drain()
    assert (tries[-3:], good, unrung(post)) == (["one", "two", "three"], ["one", "two", "three"], 0)


def test_a_backlog_of_a_failing_sink_hides_no_new_alert(harness: Open) -> None:
    """However many alerts wait for the failing sink, the good one hears of those behind them."""
    post = Postroad()
    good, _, errors = failing(post)
    errors.append(ConnectionError("no such host"))
    h = harness(post)
    ring(post, *(str(n) for n in range(250)))
    h.drain()
    ring(post, "new")
    h.drain()
    assert good == [*(str(n) for n in range(250)), "new"]


def test_a_sink_around_an_async_function_has_failed(harness: Open, caplog: pytest.LogCaptureFixture) -> None:
    """A plain function that returns a coroutine took nothing, and the log says why."""

    async def sleepy(alert: Alert) -> None: ...

    post = Postroad()
    awaited: Any = lambda alert: sleepy(alert)  # noqa: E731
    post.alert_sink(awaited)
    h = harness(post)
    ring(post, "one")
    h.drain()
    assert unrung(post) == 1
    assert "nothing awaits it" in caplog.text


def test_a_hanging_sink_delays_no_timer(open_app: OpenApp) -> None:
    """Sinks run in threads, and the pump goes on while one hangs."""
    post = open_app()
    held, fired = threading.Event(), threading.Event()
    threads: list[str] = []

    @post.alert_sink
    def slow(alert: Alert) -> None:
        threads.append(threading.current_thread().name)
        held.wait(30)

    post.turn("chat")(lambda turn: fired.set())
    ring(post, "one")
    with post.running():
        until(lambda: threads)
        with post.begin() as tx:
            tx.set_timer("t", after=0, stream="chat/1")
        assert fired.wait(5)
        held.set()
        until(lambda: unrung(post) == 0)
    assert threads == ["postroad-handler"]
