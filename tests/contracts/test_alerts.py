"""Alerts are rows first, rung afterwards."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from postroad.model.clock import FakeClock
from postroad.model.dispatches import Alert
from postroad.model.rows import NewAlert
from postroad.store import alerts

Run = Callable[..., Any]


def raised(run: Run, *codes: str) -> None:
    run(alerts.raise_alerts, [NewAlert(code=code, subject="load/1", detail="why") for code in codes])


def test_an_alert_waits_until_it_is_rung(run: Run, clock: FakeClock) -> None:
    """It is there with everything that a person needs, oldest first, until it is marked."""
    raised(run, "one", "two")
    (first, alert), (second, _) = run(alerts.unrung)
    assert alert == Alert(severity="error", code="one", subject="load/1", raised_at=clock.now, detail="why")
    run(alerts.mark_rung, [first])
    assert [number for number, _ in run(alerts.unrung)] == [second]


def test_unrung_alerts_are_read_in_pages(run: Run) -> None:
    """`after` goes on behind the last one that was read."""
    raised(run, "one", "two", "three")
    [(first, _), (second, _)] = run(alerts.unrung, limit=2)
    assert [alert.code for _, alert in run(alerts.unrung, after=second, limit=2)] == ["three"]
    assert len(run(alerts.unrung, after=first)) == 2


def test_nothing_to_do(run: Run) -> None:
    """No alert raised and none marked are no statements at all."""
    run(alerts.raise_alerts, [])
    run(alerts.mark_rung, [])
    assert run(alerts.unrung) == []


def test_an_alert_is_rung_once(run: Run, clock: FakeClock) -> None:
    """Marking it again keeps the first time."""
    raised(run, "one")
    [(number, _)] = run(alerts.unrung)
    run(alerts.mark_rung, [number])
    first = clock.wall()
    clock.advance(timedelta(minutes=1))
    run(alerts.mark_rung, [number])
    assert [row.rung_at for row in run(alerts.list_)] == [first]


def test_the_list_has_the_newest_first(run: Run) -> None:
    """Rung or not, and no more than asked for."""
    raised(run, "one", "two", "three")
    run(alerts.mark_rung, [number for number, _ in run(alerts.unrung, limit=1)])
    assert [(row.code, row.rung_at is None) for row in run(alerts.list_)] == [
        ("three", True),
        ("two", True),
        ("one", False),
    ]
    assert [row.code for row in run(alerts.list_, limit=2)] == ["three", "two"]
    assert [alert.code for _, alert in run(alerts.unrung, limit=1)] == ["two"]
