"""Revival: what brings back a consumer that is dead."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from postroad import Alert, Dispatch, InvalidInput, Postroad, Retry, RetryLater
from postroad.agent.revival import REVIVAL_PING, send_revivals
from tests.engine.conftest import Open

EPOCH = 1_767_225_600
NAIVE = datetime(2026, 1, 1)  # noqa: DTZ001


def app(**sender: Any) -> tuple[Postroad, list[str]]:
    """An app whose seats are reached once `alive` holds them."""
    post = Postroad()
    alive: list[str] = []

    @post.sender(REVIVAL_PING, retry=Retry(attempts=3, first=60, jitter=False), **sender)
    def ping(d: Dispatch[dict[str, str]]) -> None:
        if d.to not in alive:
            raise RetryLater(f"{d.to} is not there")

    return post, alive


def test_a_consumer_that_comes_back_is_pinged_once(harness: Open) -> None:
    """The consumer is dead, the producer fires again and again; whoever comes back gets one ping."""
    post, alive = app()
    h = harness(post, senders="run")
    for _ in range(3):
        with post.begin() as tx:
            sent = send_revivals(tx, ["seat-2", "seat-1"], epoch=EPOCH + 0.0)
        h.drain()
    assert [each.created for each in sent] == [False, False]
    assert [row.key for row in post.dispatches.list()] == [f"revival:seat-{n}:{EPOCH}" for n in (1, 2)]
    alive += ["seat-1", "seat-2"]
    h.advance(600)
    assert {(row.status, row.attempt) for row in post.dispatches.list()} == {("delivered", 2)}


@pytest.mark.parametrize("epoch", [EPOCH, float(EPOCH), datetime.fromtimestamp(EPOCH, UTC)])
def test_an_epoch_is_written_in_one_way(harness: Open, epoch: Any) -> None:
    """However it is given, it is one epoch; the ping expires when it is of no more use."""
    post, _ = app()
    harness(post)
    with post.begin() as tx:
        send_revivals(tx, ["s", "s"], epoch=epoch, ttl=60)
    (row,) = post.dispatches.list()
    assert row.key == f"revival:s:{EPOCH}"
    assert row.expires_at == datetime.fromtimestamp(EPOCH, UTC) + timedelta(seconds=60)


def test_an_unknown_epoch_never_expires(harness: Open) -> None:
    """Epoch 0 says that nobody knows when the seat was reset."""
    post, _ = app()
    harness(post)
    with post.begin() as tx:
        send_revivals(tx, ["s"], epoch=0)
    (row,) = post.dispatches.list()
    assert (row.key, row.expires_at) == ("revival:s:0", None)


def test_a_seat_that_stays_dead_alerts(harness: Open) -> None:
    """After the last attempt an operator is told."""
    post, _ = app()
    rung: list[Alert] = []
    post.alert_sink(rung.append)
    h = harness(post, senders="run")
    for error in (ConnectionRefusedError("s"),) * 3:
        h.fail(REVIVAL_PING, error)
    with post.begin() as tx:
        send_revivals(tx, ["s"], epoch=0)
    h.advance(600)
    assert [(alert.code, alert.subject) for alert in rung] == [("dispatch.dead_letter", "revival:s:0")]


@pytest.mark.parametrize(
    ("seats", "epoch", "field"),
    [("seat", 0, "seats"), ([""], 0, "seats"), ([3], 0, "seats"), (["s"], -1, "epoch"), (["s"], "now", "epoch"),
     (["s"], 2**39, "epoch"), (["s"], True, "epoch"), (["s"], NAIVE, "epoch")],
)  # fmt: skip
def test_what_is_no_seat_or_epoch_is_refused(seats: Any, epoch: Any, field: str) -> None:
    """Nothing is sent, and the error names what is wrong."""
    post, _ = app()
    with pytest.raises(InvalidInput) as caught, post.begin() as tx:
        send_revivals(tx, seats, epoch=epoch)
    assert caught.value.field == field
