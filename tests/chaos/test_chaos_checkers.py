"""Each checker of the chaos fails on a bad history, and a run in which too little happened is no pass."""

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from postroad.model.lifecycle import Reason
from postroad.testing.chaos import checks, faults
from postroad.testing.chaos.evidence import Evidence
from postroad.testing.chaos.faults import Fault
from postroad.testing.chaos.sink import Told
from postroad.testing.chaos.sizes import LEASE_SECONDS, OPTIONS
from postroad.testing.chaos.verdict import Verdict, lacking, stories
from postroad.testing.simulation.history import History
from postroad.testing.simulation.ledger import Answer, Ledger
from postroad.testing.simulation.outages import KINDS
from postroad.testing.simulation.seeds import play
from postroad.testing.simulation.sink import Arrival

SECOND = 1_000_000
LOST = "attempt 2 of 8; the lease of attempt 1 was lost"


def step(at: int, before: str | None, after: str, reason: Reason, attempt: int = 0, summary: str = "") -> Any:
    """A row of a dispatch's history."""
    return SimpleNamespace(
        entity="d", at=at * SECOND, from_status=before, to_status=after, reason_code=reason, summary=summary,
        metadata=f'{{"attempt":{attempt}}}',
    )  # fmt: skip


def arrival(attempt: int, process: str) -> Arrival:
    """A message at its destination."""
    return Arrival(at=0, process=process, id="d", key="k", kind="sim.sms", to="k", attempt=attempt, body="{}")


@pytest.fixture
def evidence() -> Evidence:
    """A dispatch whose first claimant was killed after its send, and one that was withdrawn; an accepted event."""
    ledger = Ledger()
    ledger.end(ledger.begin(verb="publish", stream="load/1", key="e", data="{}"), Answer.OK)
    withdrawn = [step(1, None, "pending", Reason.ENQUEUED), step(2, "pending", "expired", Reason.WITHDRAWN)]
    for each in withdrawn:
        each.entity = "w"
    history = History(
        options=OPTIONS, now=0, ledger=ledger, end=True,
        log=[SimpleNamespace(stream="load/1", entry_id="e", seq=1)],
        outbox=[
            SimpleNamespace(id="d", key="k", created_at=0, kind="sim.sms", stream="", body="{}"),
            SimpleNamespace(id="w", key="unwanted", created_at=0, kind="sim.sms", stream="", body="{}"),
        ],
        transitions=[
            step(1, None, "pending", Reason.ENQUEUED),
            step(2, "pending", "delivering", Reason.ATTEMPT, 1),
            step(6, "delivering", "delivering", Reason.ATTEMPT, 2, LOST),
            step(7, "delivering", "delivered", Reason.TRANSPORT_OK, 2),
            *withdrawn,
        ],
        arrivals=[arrival(1, "p1-1"), arrival(2, "p2-1")],
    )  # fmt: skip
    return Evidence(
        database="sqlite", history=history,
        faults=[Fault(kind="kill", lives=["p1-1"], begun=3 * SECOND, ended=4 * SECOND)],
        told=[
            Told(life="p1-1", id="d", at=2 * SECOND, attempt=1),
            Told(life="p2-1", id="d", at=6 * SECOND, attempt=2),
            Told(life="p2-1", id="d", reason=Reason.TRANSPORT_OK),
        ],
        withdrawn={"unwanted"},
    )  # fmt: skip


def broken(evidence: Evidence) -> set[str]:
    """The codes of our own checks that find something."""
    return {name.partition(" ")[0] for name, check in checks.OURS.items() if list(check(evidence))}


def kill_another(e: Evidence) -> None:
    e.faults[0].lives = ["p3-1"]


def kill_earlier(e: Evidence) -> None:
    e.faults[0].begun, e.faults[0].ended = 0, SECOND


def kill_another_later(e: Evidence) -> None:
    kill_another(e)
    kill_later(e, 0.1)


def kill_unknown_later(e: Evidence) -> None:
    del e.told[0]
    kill_later(e, 0.1)


def kill_later(e: Evidence, after: float) -> None:
    """So long after the claim was lost."""
    e.faults[0].begun = e.faults[0].ended = round((6 + after) * SECOND)


def settle_as(e: Evidence, **about: str) -> None:
    e.told[2] = msgspec.structs.replace(e.told[2], **about)


def deliver_after_withdrawal(e: Evidence) -> None:
    e.history.transitions[-1].reason_code = Reason.TRANSPORT_OK


BAD: dict[str, tuple[str, Callable[[Evidence], None]]] = {
    "an accepted event is gone": ("G1", lambda e: e.history.log.clear()),
    "an event landed twice": ("G1", lambda e: e.history.log.append(e.history.log[0])),
    "a dispatch is gone, its history is not": ("G1", lambda e: e.history.outbox.pop()),
    "a dispatch began twice": ("G1", lambda e: e.history.transitions.append(e.history.transitions[0])),
    "a live claim was taken over": ("O4", lambda e: setattr(e.history.transitions[2], "at", 5 * SECOND)),
    "another one's claim was settled": ("O5", lambda e: settle_as(e, life="p1-1")),
    "it is settled as the history does not know it": ("O5", lambda e: settle_as(e, reason=Reason.PERMANENT)),
    "no fault at all": ("O9", lambda e: e.faults.clear()),
    "the fault was another process's": ("O9", kill_another),
    "the fault was over before the claim": ("O9", kill_earlier),
    "another process was killed after the claim was lost": ("O9", kill_another_later),
    "nobody knows whose claim it was, and a process was killed after it was lost": ("O9", kill_unknown_later),
    "the claimant had its time to say that it was too slow": ("O9", lambda e: kill_later(e, LEASE_SECONDS + 1)),
    "a withdrawn dispatch was sent": ("W1", deliver_after_withdrawal),
    "a withdrawn dispatch is unknown": ("W1", lambda e: e.withdrawn.add("never seen")),
    "a loop fails in a way that no fault explains": ("X1", lambda e: e.trouble.append("p1-1: ValueError: oh")),
}


@pytest.mark.parametrize("spoke", [False, True])
def test_a_claimant_that_was_killed_before_it_could_speak_is_explained(evidence: Evidence, spoke: bool) -> None:
    """It was too slow, and its result was under way to the database; one that has said so was too slow, no more."""
    kill_later(evidence, 0.1)
    if spoke:
        late = step(6, "delivering", "delivering", Reason.STALE_UNSENT, 1)
        evidence.history.transitions.insert(3, late)
    assert broken(evidence) == set()
    assert checks.duplicates(evidence) == {"overrun" if spoke else "kill": 1}


def test_the_good_history_is_good(evidence: Evidence) -> None:
    """The neighbour of all the bad histories breaks nothing, and its duplicate is explained by the kill."""
    assert broken(evidence) == set()
    assert checks.duplicates(evidence) == {"kill": 1}


def test_an_attempt_that_was_held_is_not_the_one_that_was_lost(evidence: Evidence) -> None:
    """Who held attempt 1, and lived on, says nothing of why the next attempt 1 was lost with its claimant."""
    held = [
        step(1, "pending", "delivering", Reason.ATTEMPT, 1),
        step(1, "delivering", "pending", Reason.HELD, 1),
    ]
    evidence.history.transitions[1:1] = held
    evidence.told.insert(0, Told(life="p3-1", id="d", at=SECOND, attempt=1))
    assert broken(evidence) == set()
    assert checks.duplicates(evidence) == {"kill": 1}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_history_is_seen(evidence: Evidence, name: str) -> None:
    """A good history with one thing changed breaks the invariant that this is about."""
    code, change = BAD[name]
    change(evidence)
    assert code in broken(evidence)


def test_every_checker_has_a_bad_history() -> None:
    """No checker is trusted that was never seen to fail."""
    assert {name.partition(" ")[0] for name in checks.OURS} == {code for code, _ in BAD.values()}


@pytest.fixture(scope="module")
def simulated() -> History:
    """The end of a seed of the simulation."""
    history = play(34).history
    assert history is not None
    return history


def test_the_simulation_s_invariants_are_checked_too(simulated: History) -> None:
    """A message that was never committed is seen although none of our own checks is about it."""
    stray = msgspec.structs.replace(simulated.arrivals[0], id="never committed")
    history = msgspec.structs.replace(simulated, arrivals=[*simulated.arrivals, stray])
    found = checks.verdict(Evidence(database="sqlite", history=history, faults=[]))
    assert [wrong for wrong in found if wrong.startswith("O2")]


@pytest.mark.parametrize(("database", "seen"), [("sqlite", True), ("postgres", False)])
def test_places_order_events_on_sqlite_only(simulated: History, database: str, seen: bool) -> None:
    """Where a place is taken before the commit, two events may land against the order of their places."""
    rows = sorted(simulated.landed, key=lambda row: row.position, reverse=True)
    one, other = next((a, b) for a in rows for b in rows if a.stream == b.stream and a.seq < b.seq)
    swapped = [SimpleNamespace(**{**row._mapping, "position": 10**6}) if row is one else row for row in rows]
    history = msgspec.structs.replace(simulated, landed=sorted(swapped, key=lambda row: (row.stream, row.seq)))
    found = checks.verdict(Evidence(database=database, history=history, faults=[]))
    assert bool([wrong for wrong in found if wrong.startswith("I3")]) == seen, other


@pytest.mark.parametrize(("database", "codes"), [("sqlite", set()), ("postgres", {"O9"})])
def test_a_stop_may_hold_up_everybody(evidence: Evidence, database: str, codes: set[str]) -> None:
    """A process that is stopped may hold SQLite's write lock: there it explains the losses of the others too."""
    evidence.database = database
    evidence.faults[0] = Fault(kind="stop", lives=["p3-1"], begun=3 * SECOND, ended=9 * SECOND)
    assert broken(evidence) == codes


def test_an_overrun_explains_itself(evidence: Evidence) -> None:
    """A claimant whom nothing hit, and who says afterwards that its attempt ended too late, is explained by that."""
    evidence.faults.clear()
    late = step(8, "delivered", "delivered", Reason.STALE_OK, 1)
    evidence.history.transitions.insert(3, late)
    assert broken(evidence) == set()
    assert checks.duplicates(evidence) == {"overrun": 1}


def test_a_retry_explains_the_next_attempt(evidence: Evidence) -> None:
    """An attempt after a recorded failure is explained without any fault."""
    evidence.faults.clear()
    evidence.history.transitions[2:3] = [
        step(3, "delivering", "pending", Reason.RETRY_BACKOFF, 1),
        step(6, "pending", "delivering", Reason.ATTEMPT, 2, "attempt 2 of 8"),
    ]
    assert broken(evidence) == set()
    assert checks.duplicates(evidence) == {"retried": 1}


def verdict(**counts: int) -> Verdict:
    """A run on one database in which nothing was wrong."""
    return Verdict(
        database="sqlite", seed=1, seconds=60, heal_seconds=5, counts=Counter(counts), violations=[], stories=[],
        folder="",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kills", "dispatches", "held", "seconds", "names"),
    [
        (15, 1_000, 10, 60, []),
        (14, 1_000, 10, 60, ["kills"]),
        (15, 999, 10, 60, ["dispatches"]),
        (15, 1_000, 9, 60, ["held"]),
        (0, 0, 0, 60, ["kills", "dispatches", "held"]),
        (30, 2_000, 20, 120, []),
        (29, 2_000, 20, 120, ["kills"]),
        (0, 9_000, 1, 0.001, ["kills"]),
    ],
)
def test_a_run_without_kills_is_no_pass(
    kills: int, dispatches: int, held: int, seconds: float, names: list[str]
) -> None:
    """On two databases a minute has 30 kills, 2,000 dispatches and 20 held sends, on one half of them, never none."""
    run = verdict(kills=kills, dispatches=dispatches, held=held)
    found = lacking([run], seconds)
    assert [said.split(",")[0].split()[1] for said in found] == names
    assert len(lacking([run] * 2, seconds)) == len(names)


def test_the_story_of_a_broken_row_is_told(evidence: Evidence) -> None:
    """A violation that names a dispatch brings its history, its arrivals and the faults in between, in order."""
    story, *_ = stories(evidence, ["O9 every loss has a cause: attempt 1 of d lost its claim"])
    lines = story.splitlines()
    assert lines[0].startswith("sim.sms k (d)")
    assert [line.split("  ")[-1].split(",")[0] for line in lines[1:]] == [
        "arrives from p1-1", "arrives from p2-1", "None -> pending", "pending -> delivering",
        "fault: kill of p1-1 ", "delivering -> delivering", "delivering -> delivered",
    ]  # fmt: skip


def test_a_seed_draws_its_faults() -> None:
    """The same seed draws the same faults, each kind among them, within the time; another seed draws others."""
    drawn = faults.plan(7, "postgres", 60)
    assert drawn == faults.plan(7, "postgres", 60)
    assert drawn != faults.plan(8, "postgres", 60)
    assert {one.kind for one in faults.plan(7, "postgres", 3)} == {"kill", "stop", "database", "group"}
    assert [one.at for one in drawn] == sorted(one.at for one in drawn)
    assert drawn[-1].at < 60


def test_a_seed_draws_what_goes_down() -> None:
    """The same seed draws the same outages, in any run at least one, and in a longer one hosts and kinds."""
    drawn = faults.outages(7, "postgres", 60)
    assert drawn == faults.outages(7, "postgres", 60)
    assert len(faults.outages(7, "postgres", 1)) == 1
    assert {one.victim in KINDS for one in drawn} == {True, False}
    assert all(one.at < 60 and one.length <= 4 for one in drawn)
