"""A Postgres that crashes under running loops and is away for longer than their leases."""

import time
from collections import Counter
from typing import Any

import pytest

from postroad import OUTCOME, Dispatch, Kind, Postroad, Turn
from postroad.store import moments, runs
from tests.postgres_server import Own

PING = Kind("ping", dict[str, int])
STREAMS = 40
AWAY_SECONDS = 10


def app(url: str, sent: list[tuple[str, int]]) -> Postroad:
    post = Postroad(url, migrate=True)

    @post.sender("sms", timeout=1, lease=4)
    def sms(d: Dispatch[Any]) -> None:
        time.sleep(0.2)
        sent.append((d.key, d.attempt))

    @post.turn("load", lease=4)
    def load(t: Turn) -> None:
        time.sleep(0.05)
        for event in t.events:  # a claim that was given back takes along what came meanwhile
            t.send("sms", {}, key=f"{t.subject}/{event.key}")

    post.filter("load", OUTCOME)(lambda e: "sent")
    return post


@pytest.mark.acceptance
@pytest.mark.timeout(120)
def test_a_database_that_is_away_loses_and_doubles_nothing(own_postgres: Own) -> None:
    """Ten seconds without the database, longer than every lease: all is sent, and by live loops nothing twice."""
    sent: list[tuple[str, int]] = []
    one, two = app(own_postgres.url, sent), app(own_postgres.url, sent)
    with one.begin() as tx:
        for n in range(STREAMS):
            tx.publish(f"load/{n}", PING, {"n": n}, key="p1")
    with one.running(), two.running():
        while len(sent) < STREAMS // 4:
            time.sleep(0.01)
        own_postgres.crash()
        before = len(sent)
        time.sleep(AWAY_SECONDS)
        with pytest.raises(Exception):  # noqa: B017  # whatever the driver says of it, nothing is accepted
            publish(one, 0)
        assert len(sent) <= before + 20, "nothing new is sent while nothing can be settled"
        own_postgres.start()
        for n in range(STREAMS):
            publish(two, n)
        end = time.monotonic() + 40
        while len(sent) < 2 * STREAMS or one.database.read(moments.waiting):
            assert time.monotonic() < end, f"{len(sent)} sent"
            time.sleep(0.05)
    twice = [key for key, times in Counter(key for key, _ in sent).items() if times > 1]
    assert not twice, [row.history for key in twice if (row := one.dispatches.get(key)) is not None]
    assert sorted(key for key, _ in sent) == sorted(f"{n}/p{i}" for n in range(STREAMS) for i in (1, 2))
    assert {attempt for _, attempt in sent} == {1}
    ends = [str(r.end) for n in range(STREAMS) for r in one.database.read(runs.of_stream, f"load/{n}")]
    # "released": a claim that the server answered too late was given back before a handler saw it.
    assert set(ends) <= {"committed", "conflict", "stale", "interrupted", "released"}, "no turn is counted as failed"
    one.close()
    two.close()


def publish(post: Postroad, n: int) -> None:
    with post.begin() as tx:
        tx.publish(f"load/{n}", PING, {"n": n}, key="p2")
