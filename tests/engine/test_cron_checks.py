"""What `postroad doctor` says of crons: whether each has its timer, and whether it runs when it is due."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text

from postroad import Postroad, RetryLater, Turn
from postroad.model.clock import SECOND
from postroad.surfaces.cron_checks import of_crons
from postroad.testing import Harness
from tests.engine.conftest import Open

START = "2026-03-02T06:58Z"
HOUR = 3_600


def hourly(fn: Callable[[Turn], None] = lambda turn: None, **cron: Any) -> Postroad:
    """An app with one job, at each full hour."""
    post = Postroad()
    post.cron("job", **{"spec": "0 * * * *", "tz": "UTC", **cron})(fn)
    return post


def said(post: Postroad, h: Harness, later: float = 0) -> list[tuple[str, str]]:
    """What the doctor says so many seconds later, if nothing happens until then."""
    now = h.clock.wall() + round(later * SECOND)
    return [(one.level, one.found) for one in of_crons(post, h.post.database, now=now)]


def change(post: Postroad, sql: str) -> None:
    """Change rows behind the product's back."""
    schema = post.database.schema
    prefix = f'"{schema}".postroad_' if schema else "postroad_"
    post.database.transact(lambda conn, now: conn.execute(text(sql.replace("{p}", prefix))).rowcount)


def test_a_cron_that_goes(harness: Open) -> None:
    """Before any process has run it has no timer, which nobody can judge; then its next time is said."""
    post = hourly()
    h = harness(post, start=START)
    assert said(post, h) == [("note", "job: it has no timer yet")]
    h.drain()
    assert said(post, h) == [("ok", "job: next at 2026-03-02 07:00:00Z")]
    assert said(post, h, 150) == [("ok", "job: it is due now")]
    assert said(Postroad(), h) == []


def test_a_timer_that_is_missing(harness: Open) -> None:
    """A timer that was cancelled, and that no process has armed again, is told."""
    post = hourly()
    h = harness(post, start=START)
    h.drain()
    change(post, "UPDATE {p}timers SET status = 'cancelled' WHERE status = 'armed'")
    assert said(post, h) == [("warning", "job: it has no timer any more, and no process has armed one again")]


@pytest.mark.parametrize(("spec", "over"), [("0 7 * * *", ""), ("0 * * * *", ", and the next one is due too")])
def test_a_timer_that_does_not_fire(harness: Open, spec: str, over: str) -> None:
    """A fire that is more than a minute late is told with for how long, and whether the next one is due as well."""
    post = hourly(spec=spec)
    h = harness(post, start=START)
    h.drain()
    assert said(post, h, 120 + 60)[0][0] == "ok"
    assert said(post, h, 120 + HOUR) == [
        ("warning", f"job: due for 1 h 0 min, and its timer has not fired{over}"),
    ]  # fmt: skip


def test_a_fire_that_nobody_takes(harness: Open) -> None:
    """A timer that has fired, with no worker for it, is told of who declares it, and as nobody's of who does not."""
    post = hourly()
    h = harness(post, start=START)
    h.drain()
    h.clock.advance(120)
    post.drain(only=["timers"])
    assert said(post, h, 60)[0] == ("ok", "job: it is due now")
    assert said(post, h, 90) == [("warning", "job: due for 1 min 30 s, and no process has taken it")]
    assert said(Postroad(), h, 90) == [("note", "job: due for 1 min 30 s, and this app does not declare it")]
    assert said(Postroad(), h, 60) == []


def test_a_run_that_fails(harness: Open) -> None:
    """A job that is tried again is told with its error once it is late; one that is under way is not."""
    at_work: list[tuple[str, str]] = []

    def fail(turn: Turn) -> None:
        at_work.extend(said(post, h, 90))
        raise RetryLater("the mail server is down", after=600)

    post = hourly(fail)
    h = harness(post, start=START)
    h.advance(120)
    assert at_work == [("ok", "job: it is run")]
    assert said(post, h, 90) == [("warning", "job: due for 1 min 30 s, its run fails: the mail server is down")]


def test_a_cron_that_nobody_speaks_of(harness: Open) -> None:
    """An armed timer is no sign of life: that no process has said for minutes that it declares the cron is told."""
    post = hourly(spec="0 7 1 1 *")
    h = harness(post, start=START)
    h.drain()
    assert said(post, h, 300)[0][0] == "ok"
    assert said(post, h, 302) == [("warning", "job: for minutes no process has said that it declares it")]


def test_another_declaration(harness: Open) -> None:
    """What running processes have otherwise than this code is a note: this code's holds once it runs."""
    h = harness(hourly(), start=START)
    h.drain()
    other = hourly(spec="0 8 * * *", tz="Europe/Berlin", missed="skip")
    assert said(other, h) == [("note", "job: processes have it as '0 * * * *' in UTC, missed='once'")]


def test_a_cron_whose_stream_was_deleted(harness: Open) -> None:
    """It never runs again under this name, which is an error."""
    post = hourly()
    h = harness(post, start=START)
    h.drain()
    post.streams.delete("cron:job/runs", actor="ann")
    h.advance(timedelta(minutes=1))
    assert said(post, h) == [("error", "job: its stream cron:job/runs was deleted, so that it never runs")]
