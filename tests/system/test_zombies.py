"""Real processes that sleep past their leases while others take over: they wake, change nothing, and are seen."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from postroad.testing.simulation.workload import Step
from postroad.testing.zombies.traces import Tables, added
from tests.acceptance.killed import producer
from tests.acceptance.paused import Paused

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.filterwarnings("ignore::postroad.store.sqlite_version.SQLiteVersionWarning"),
]


NO_FENCE = """
from tests.contracts.test_zombies import any_token_will_do
any_token_will_do().start()
"""


@pytest.fixture(params=["sqlite", "postgres"])
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Paused]:
    """A program on an empty database."""
    if request.param == "postgres":
        place = request.getfixturevalue("postgres_url"), request.getfixturevalue("fresh_schema")
    else:
        place = f"sqlite:///{request.getfixturevalue('sqlite_path')}", None
    post = producer(place)
    yield Paused(place, tmp_path, post)
    post.close()


def stale_runs(tables: Tables) -> int:
    """How many runs came back after their claim was over."""
    return sum(row["end_reason"] == "stale" for row in tables["runs"])


def stale_results(tables: Tables) -> list[str]:
    """What claimants did after their claim was over."""
    return [row["reason_code"] for row in tables["transitions"] if row["reason_code"].startswith("dispatch.stale")]


def woken_beside_its_successor(stage: Paused) -> None:
    """Two workers decide on one stream, the first one asleep until its claim is the other's: nothing of it is there."""
    stage.full_order()
    with stage.asleep("die-in-handler") as zombie:
        (first,) = stage.tables()["runs"]
        with stage.awake("die-in-handler"):
            before = stage.tables()
            stage.wake(zombie, lambda tables: tables["log"] or end_of(tables, first["run_id"]) != "interrupted")
            after = stage.tables()
            assert end_of(after, first["run_id"]) == "stale"
            # The other one renews its claim meanwhile.
            assert [row["claim_token"] for row in after["queues"]] == [row["claim_token"] for row in before["queues"]]
            assert {name for name in before if before[name] != after[name]} <= {"runs", "queues"}
        stage.finish(zombie)
    history = stage.check(end=True)
    assert Counter(arrival.key for arrival in history.arrivals) == {"p1.0": 1}


def end_of(tables: Tables, run_id: str) -> str:
    """How a run ended."""
    (end,) = [row["end_reason"] for row in tables["runs"] if row["run_id"] == run_id]
    return str(end)


def test_asleep_in_a_handler(stage: Paused) -> None:
    """A worker that sleeps in a handler past its lease commits nothing while another one decides."""
    woken_beside_its_successor(stage)


def test_without_a_fence(stage: Paused) -> None:
    """Workers that do not look at the token fail the test above."""
    stage.plant(NO_FENCE)
    with pytest.raises(AssertionError, match="interrupted"):
        woken_beside_its_successor(stage)


def test_asleep_until_all_is_done(stage: Paused) -> None:
    """A worker that sleeps in a handler until another one has done everything changes nothing of it, and is seen."""
    stage.full_order()
    with stage.asleep("die-in-handler") as zombie:
        stage.recover()
        before = stage.tables()
        stage.wake(zombie, stale_runs)
        stage.finish(zombie)
    after = stage.tables()
    # But for the end of its own run, which was thought interrupted.
    assert [name for name in before if before[name] != after[name]] == ["runs"]
    assert stale_runs(after) == 1
    stage.check(end=True)
    assert "turn of load/1, attempt 1: stale" in stage.log()
    assert "stale" in [run["end"] for run in stage.ask("stream", "show", "load/1")["runs"]]
    assert stage.ask("status")["runs_ended"] == {"stale": 1}


@pytest.mark.parametrize(
    ("plan", "status", "stale"),
    [(["ok", "giveup"], "dead_letter", "transport_ok"), (["lost", "ok"], "delivered", "transport_failed")],
    ids=["late success", "late failure"],
)
def test_asleep_in_a_send(stage: Paused, plan: list[str], status: str, stale: str) -> None:
    """What a sleeping dispatcher had sent is sent again, for a reason; its late result is history."""
    stage.order(Step("send", "p1.0", "sim.sms", plan=plan))
    with stage.asleep("die-in-send") as zombie:
        stage.recover()
        before = stage.tables()
        stage.wake(zombie, stale_results)
        stage.finish(zombie)
    after = stage.tables()
    assert stale_results(after) == [f"dispatch.stale.{stale}"]
    assert after["outbox"] == before["outbox"]
    assert after["timers"] == before["timers"]
    come = added(before, {**after, "streams": before["streams"]})
    # Its stream hears of a success, and its filter answers that by itself.
    assert come.keys() == ({"transitions", "log", "runs"} if stale == "transport_ok" else {"transitions"})
    history = stage.check(end=True)
    # The second attempt of the late success gives up before anything arrives.
    assert len(history.arrivals) == (1 if plan[1] == "giveup" else 2)

    assert "an attempt ended after its claim was over" in stage.log()
    shown = stage.ask("dispatch", "show", "p1.0")
    assert shown["status"] == status
    told = [change["summary"] for change in shown["history"]]
    assert any("the lease of attempt 1 was lost" in summary for summary in told)
    assert "attempt 1" in told[-1]
    assert "after its claim was over" in told[-1]
    assert stage.ask("status")["stale_settles_lately"] == 1
