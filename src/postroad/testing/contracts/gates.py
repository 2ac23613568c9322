"""What gates promise: what is down is left alone but for probes, and what is not goes on.

It cannot catch a plan that walks what a gate holds back; the plan tests look at that.
"""

from typing import Any

import msgspec
import pytest
from sqlalchemy import Connection

from postroad.model import gates as model
from postroad.model.clock import SECOND, FakeClock
from postroad.model.retry import Retry
from postroad.model.rows import DispatchClaim, Hold, NewDispatch
from postroad.store import dispatch_claims, dispatch_why, gates, settle
from postroad.store.audit import Operator
from postroad.store.database import Database
from postroad.testing.contracts.dispatches import (
    LEASE,
    POLICY,
    Run,
    Waiting,
    alerts,
    another,
    claim,
    dispatch,
    enqueue,
    history,
    hold,
    in_threads,
    outbox_rows,
    settlement,
)

BY = Operator(actor="ann", reason="it is back")
ONCE = msgspec.structs.replace(POLICY, retry=Retry(attempts=1))
PATIENT = msgspec.structs.replace(POLICY, patience=3_600 * SECOND)


def to(number: int, host: str | None, **changes: Any) -> NewDispatch:
    """A dispatch to a host."""
    return dispatch(number, host=host, destination=f"https://{host}/{number}" if host else "ann", **changes)


def down(run: Run, held: DispatchClaim, *, gate: str | None = None, error: str = "refused", **more: Any) -> None:
    """Settle an attempt that could not reach its destination."""
    given = {"policy": PATIENT, "host": held.host, "probe": held.probe, "fraction": 0.0, **more}
    run(settle.settle, [settlement(held, "unreachable", error=error, gate=held.host or "" if gate is None else gate,
                                   **given)])  # fmt: skip


def ended(run: Run, held: DispatchClaim, result: Any = "ok") -> None:
    run(settle.settle, [settlement(held, result, policy=PATIENT, host=held.host, probe=held.probe)])


def keys(claims: list[DispatchClaim]) -> list[str]:
    return [each.key for each in claims]


def closed(run: Run) -> list[tuple[str, str, int]]:
    """(kind, host, failures) of the closed gates."""
    return [(row.kind, row.host, row.failures) for row in run(gates.list_)]


def wait(clock: FakeClock, length: int) -> None:
    clock.advance(length / SECOND)


class GateContract:
    """What is down costs no attempts."""

    def test_an_unreachable_destination_costs_no_attempt(self, run: Run) -> None:
        """The dispatch is pending as if it had not been tried, says why, and its host's gate is closed."""
        enqueue(run, to(1, "a.example"))
        (held,) = claim(run)
        down(run, held)
        (row,) = run(outbox_rows)
        assert (row.status, row.attempt, row.last_error, row.claim_token) == ("pending", 0, "refused", None)
        assert run(history)[-1] == ("delivering", "pending", "dispatch.pending.held")
        assert closed(run) == [("mail", "a.example", 1)]
        assert run(alerts) == [("gate.closed", "mail a.example")]
        assert "held until" in run(dispatch_why.why, row.id)

    def test_a_closed_host_holds_up_no_other(self, run: Run) -> None:
        """Only what goes to the host that is down waits; other hosts, and what has no host, goes on."""
        enqueue(run, to(1, "a.example"), to(2, "a.example"), to(3, "b.example"), to(4, None))
        (held,) = claim(run, limit=1)
        down(run, held)
        assert sorted(keys(claim(run))) == ["key/3", "key/4"]
        assert claim(run, token="t2") == []

    def test_a_closed_kind_holds_up_all_of_it_and_no_other(self, run: Run) -> None:
        """Where the kind as a whole is down, nothing of it goes to any host."""
        enqueue(run, to(1, "a.example"), to(2, "b.example"), to(3, None), dispatch(4, kind="sms"))
        (held,) = claim(run, limit=1)
        down(run, held, gate=model.WHOLE_KIND)
        assert closed(run) == [("mail", "", 1)]
        assert claim(run) == []
        sms = msgspec.structs.replace(POLICY, kind="sms")
        assert keys(claim(run, policy=sms, names=["sms"])) == ["key/4"]

    @pytest.mark.parametrize("host", ["a.example", None])
    def test_one_probe_at_a_time(self, run: Run, clock: FakeClock, host: str | None) -> None:
        """Once the time has come one dispatch is tried; until its lease is over nobody else tries."""
        enqueue(run, *[to(n, host) for n in range(1, 6)])
        (held,) = claim(run, limit=1)
        down(run, held)
        wait(clock, model.FIRST)
        (probe,) = claim(run)
        assert probe.probe
        assert claim(run, token="t2") == []
        wait(clock, LEASE - 1)
        assert claim(run, token="t3") == []
        wait(clock, 1)
        assert len(claim(run, token="t4")) == 1

    @pytest.mark.parametrize("result", ["ok", "failed", "permanent", "unknown"])
    def test_a_probe_that_arrives_opens_the_gate(self, run: Run, clock: FakeClock, result: str) -> None:
        """Whatever the destination said: it is there, and all that waited goes."""
        enqueue(run, *[to(n, "a.example") for n in range(1, 6)])
        (held,) = claim(run, limit=1)
        down(run, held)
        wait(clock, model.FIRST)
        (probe,) = claim(run)
        ended(run, probe, result)
        assert closed(run) == []
        assert len(claim(run, token="t2")) == 4

    def test_probes_become_rarer(self, run: Run, clock: FakeClock) -> None:
        """Each probe in vain keeps the gate closed for twice as long, a minute at most; people are told once."""
        enqueue(run, *[to(n, "a.example") for n in range(1, 4)])
        (held,) = claim(run, limit=1)
        down(run, held)
        for failures in range(1, 10):
            (gate,) = run(gates.list_)
            length = gate.until - clock.wall()
            assert length == min(SECOND << (failures - 1), 60 * SECOND) // 2
            wait(clock, length - 1)
            assert claim(run, token=f"early{failures}") == []
            wait(clock, 1)
            (probe,) = claim(run, token=f"probe{failures}")
            down(run, probe, error=f"still {failures}")
        assert closed(run) == [("mail", "a.example", 10)]
        assert run(alerts) == [("gate.closed", "mail a.example")]

    def test_the_destination_says_when_to_come_again(self, run: Run, clock: FakeClock) -> None:
        """What an attempt was told to wait for is waited for."""
        enqueue(run, to(1, "a.example"))
        (held,) = claim(run)
        down(run, held, floor=300 * SECOND)
        (gate,) = run(gates.list_)
        assert gate.until == clock.wall() + 300 * SECOND

    def test_what_was_under_way_counts_once(self, run: Run, clock: FakeClock) -> None:
        """Of ten attempts that find the host down together the gate is closed once; none of them is a probe's word."""
        enqueue(run, *[to(n, "a.example") for n in range(1, 11)])
        held = claim(run, limit=10)
        for late in held[:5]:
            down(run, late)
        wait(clock, model.FIRST)
        (probe,) = claim(run, token="t2")
        for late in held[5:]:
            down(run, late)
        assert closed(run) == [("mail", "a.example", 1)]
        assert run(alerts) == [("gate.closed", "mail a.example")]
        ended(run, probe)
        assert closed(run) == []

    def test_a_late_success_opens_nothing(self, run: Run) -> None:
        """What was sent before the gate was closed says nothing about now."""
        enqueue(run, to(1, "a.example"), to(2, "a.example"))
        first, second = claim(run)
        down(run, first)
        ended(run, second)
        assert closed(run) == [("mail", "a.example", 1)]

    def test_a_probe_that_was_never_sent_opens_nothing(self, run: Run, clock: FakeClock) -> None:
        """It fails as an attempt does, and says nothing about the host: the next one may try it at once."""
        enqueue(run, to(1, "a.example"), to(2, "a.example"))
        first, _ = claim(run)
        down(run, first)
        wait(clock, model.hold(1, 0.0))
        (probe,) = claim(run, token="probe")
        result = settlement(
            probe, "failed", error="cannot be read", policy=PATIENT, host=probe.host, probe=probe.probe, unsent=True
        )
        run(settle.settle, [result])
        assert probe.probe
        assert closed(run) == [("mail", "a.example", 1)]
        assert [row.status for row in run(outbox_rows) if row.id == probe.id] == ["pending"]
        enqueue(run, to(3, "a.example"))
        (again,) = claim(run, token="again")
        assert (again.probe, again.key) == (True, "key/3")

    def test_a_probe_that_was_cut_short_is_followed_by_another(self, run: Run, clock: FakeClock) -> None:
        """A process that ends while it tries leaves that to others, at once."""
        enqueue(run, to(1, "a.example"))
        (held,) = claim(run)
        down(run, held)
        wait(clock, model.FIRST)
        (probe,) = claim(run)
        ended(run, probe, "cut_short")
        assert closed(run) == [("mail", "a.example", 1)]
        assert len(claim(run, token="t2")) == 1

    def test_a_probe_that_is_given_back_is_followed_by_another(self, run: Run, clock: FakeClock) -> None:
        """Of what never began nobody waits for the lease: its gate may be tried at once, and says no word more."""
        enqueue(run, to(1, "a.example"), to(2, "a.example"))
        (held,) = claim(run, limit=1)
        down(run, held)
        wait(clock, model.FIRST)
        (probe,) = claim(run)
        assert run(dispatch_claims.release, [hold(probe)]) == [probe.id]
        assert closed(run) == [("mail", "a.example", 1)]
        assert [row.probing for row in run(gates.list_)] == [False]
        (again,) = claim(run, token="t2")
        assert (again.probe, again.attempt) == (True, 1)
        assert claim(run, token="t3") == []
        ended(run, again)
        assert closed(run) == []

    def test_a_probe_under_a_former_name_is_given_back(self, run: Run, clock: FakeClock) -> None:
        """The kind's name of today is its gate's, whatever it was called when the dispatch was written."""
        names = ["mail", "post"]
        enqueue(run, to(1, None, kind="post"))
        (held,) = claim(run, names=names)
        down(run, held)
        wait(clock, model.FIRST)
        (probe,) = claim(run, names=names)
        run(dispatch_claims.release, [hold(probe)], kind="mail")
        assert len(claim(run, names=names, token="t2")) == 1

    def test_giving_back_frees_no_other_gate(self, run: Run, clock: FakeClock) -> None:
        """Neither that of another kind or host, probed in the same pass, nor one whose probe is another claim's."""
        sms = msgspec.structs.replace(PATIENT, kind="sms")
        enqueue(run, to(1, "a.example"), to(2, "b.example"), dispatch(3, kind="sms"))
        for policy in (PATIENT, sms):
            for held in claim(run, policy=policy, names=[policy.kind]):
                down(run, held, policy=policy)
        wait(clock, model.FIRST)
        first, second = claim(run)
        assert [each.probe for each in (first, second, *claim(run, policy=sms, names=["sms"]))] == [True] * 3
        run(dispatch_claims.release, [hold(first)])
        assert {(row.kind, row.host): row.probing for row in run(gates.list_)} == {
            ("mail", "a.example"): False, ("mail", "b.example"): True, ("sms", ""): True,
        }  # fmt: skip
        assert run(dispatch_claims.release, [Hold(second.id, "t9")]) == []
        assert keys(claim(run, token="t2")) == ["key/1"]

    def test_a_probe_that_has_expired_tries_nothing(self, run: Run, clock: FakeClock) -> None:
        """A dispatch that may be sent no more takes no gate: the next one is the probe."""
        enqueue(run, to(1, "a.example"), to(2, "a.example", expires_at=clock.wall() + SECOND), to(3, "a.example"))
        (held,) = claim(run, limit=1)
        down(run, held, error="x")
        wait(clock, model.FIRST)
        found = run(dispatch_claims.claim, PATIENT, names=["mail"], token="t1", limit=9)
        assert ([row.status for row in found.ended], found.claims) == (["expired"], [])
        assert len(claim(run, token="t2")) == 1

    def test_patience_has_an_end(self, run: Run, clock: FakeClock) -> None:
        """What could not reach its destination for as long as its attempts would take counts them from then on."""
        enqueue(run, to(1, "a.example"))
        (held,) = claim(run)
        down(run, held)
        wait(clock, PATIENT.patience + 1)
        for attempt in (1, 2, 3):
            (probe,) = claim(run, token=f"t{attempt + 1}")
            assert probe.attempt == attempt
            down(run, probe)
            wait(clock, 120 * SECOND)
        (row,) = run(outbox_rows)
        assert (row.status, row.attempt, row.last_error) == ("dead_letter", 3, "refused")

    def test_a_host_that_nothing_goes_to_any_more_is_forgotten(self, run: Run, clock: FakeClock) -> None:
        """Its last dispatch is dead and nothing would ever try it: it slows down no claim of its kind for good."""
        enqueue(run, to(1, "typo.example"))
        (held,) = claim(run, policy=ONCE)
        down(run, held, policy=ONCE)
        enqueue(run, to(2, "b.example"), to(3, "b.example", due_at=clock.wall() + 9 * SECOND))
        assert keys(claim(run, token="t2")) == ["key/2"]
        assert closed(run) == [("mail", "typo.example", 1)]  # its time has not come
        clock.advance(9)
        assert keys(claim(run, token="t3")) == ["key/3"]
        assert closed(run) == []

    def test_a_host_that_backs_off_is_not_forgotten(self, run: Run, clock: FakeClock) -> None:
        """Something is to be sent to it later: its gate stays closed until that is tried."""
        enqueue(run, to(1, "a.example"), to(2, "a.example", due_at=clock.wall() + 60 * SECOND), to(3, "b.example"))
        (held,) = claim(run, policy=ONCE, limit=1)
        down(run, held, policy=ONCE)
        clock.advance(9)
        assert keys(claim(run, token="t2")) == ["key/3"]
        assert closed(run) == [("mail", "a.example", 1)]

    def test_a_person_opens_a_gate(self, run: Run) -> None:
        """Opened by hand it is open at once, audited; one that is not closed says so, and a new failure closes it."""
        enqueue(run, to(1, "a.example"))
        (held,) = claim(run)
        down(run, held)
        assert run(gates.open_, "mail", "a.example", by=BY)
        assert not run(gates.open_, "mail", "a.example", by=BY)
        assert closed(run) == []
        (again,) = claim(run, token="t2")
        assert (again.probe, again.attempt) == (False, 1)
        down(run, again)
        assert closed(run) == [("mail", "a.example", 1)]

    def test_a_stale_probe_changes_nothing(self, run: Run, clock: FakeClock) -> None:
        """Whose lease was over and whose gate another probe has says nothing about it."""
        enqueue(run, to(1, "a.example"), to(2, "a.example"))
        (held,) = claim(run, limit=1)
        down(run, held)
        wait(clock, model.FIRST)
        (slow,) = claim(run)
        wait(clock, LEASE)
        (fast,) = claim(run, token="t2")
        down(run, slow)
        assert closed(run) == [("mail", "a.example", 1)]
        ended(run, fast)
        assert closed(run) == []

    def test_a_claim_whose_answer_was_lost_is_a_probe_still(self, run: Run, clock: FakeClock) -> None:
        """Looked up by its token it opens the gate as it would have."""
        enqueue(run, to(1, "a.example"), to(2, "b.example"))
        first, second = claim(run)
        down(run, first)
        ended(run, second)
        wait(clock, model.FIRST)
        assert len(claim(run, token="t9")) == 1
        (probe,) = run(dispatch_claims.lookup, "t9")
        ended(run, probe)
        assert closed(run) == []

    def test_former_names_share_a_gate(self, run: Run) -> None:
        """A kind that was renamed is one kind to its gates."""
        enqueue(run, to(1, "a.example", kind="post"), to(2, "a.example"))
        (held,) = claim(run, limit=1, names=["mail", "post"])
        down(run, held)
        assert claim(run, names=["mail", "post"], token="t2") == []


class GateRaceContract:
    """Two that meet at a gate."""

    def test_two_dispatchers_one_probe(self, run: Run, clock: FakeClock, database: Database) -> None:
        """Who comes while another one's claim of the probe is not committed yet tries nothing."""
        enqueue(run, to(1, "a.example"), to(2, "a.example"))
        (held,) = claim(run, limit=1)
        down(run, held)
        wait(clock, model.FIRST)
        other = another(database, clock)
        found: list[Any] = []

        def also() -> Any:
            return other.transact(dispatch_claims.claim, PATIENT, names=["mail"], token="t2", limit=9).claims

        def first(conn: Connection, *, now: int) -> None:
            claims = dispatch_claims.claim(conn, PATIENT, names=["mail"], token="t1", limit=9, now=now)
            found.append(claims.claims)
            if not database.is_sqlite:
                found.extend(in_threads(also))

        run(first)
        if database.is_sqlite:  # there is one writer at a time
            found.append(also())
        other.close()
        assert [len(claims) for claims in found] == [1, 0]

    def test_two_settles_close_one_gate(self, run: Run, clock: FakeClock, database: Database) -> None:
        """Whoever comes second waits, finds it closed, and tells nobody again."""
        enqueue(run, to(1, "a.example"), to(2, "a.example"))
        first, second = claim(run)
        other = another(database, clock)
        given = {"policy": PATIENT, "host": "a.example", "gate": "a.example", "error": "refused"}
        waiting: list[Waiting] = []

        def settles(conn: Connection, *, now: int) -> None:
            settle.settle(conn, [settlement(first, "unreachable", **given)], now=now)
            late = [settlement(second, "unreachable", **given)]
            waiting.append(Waiting(other, lambda: other.transact(settle.settle, late)))
            waiting[0].blocked()

        run(settles)
        assert waiting[0].result()[0].status == "pending"
        other.close()
        assert closed(run) == [("mail", "a.example", 1)]
        assert run(alerts) == [("gate.closed", "mail a.example")]
