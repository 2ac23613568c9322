"""What acknowledgements promise: a true token ends its dispatch for good, and without one the sends are bounded.

It cannot catch what two transactions at a time do to each other; the races of this project's own tests do.
"""

from typing import Any

import msgspec
import pytest

from postroad.model.acks import Keyring, Presented
from postroad.model.clock import SECOND, FakeClock
from postroad.model.errors import AckNotRequested, AckRefused, BadAckToken, DispatchNotFound, PostroadError
from postroad.model.retry import Retry
from postroad.model.rows import DispatchClaim, Settled
from postroad.store import acks, audit, dispatch_claims, lanes, operators, outbox, settle
from postroad.store.operators import Due, Orders
from postroad.store.statements import Row
from postroad.testing.contracts.dispatches import (
    LEASE,
    POLICY,
    RETRY,
    Run,
    alerts,
    claim,
    dispatch,
    enqueue,
    everything,
    history,
    hold,
    last_change,
    outbox_rows,
    outcomes,
    settlement,
)

KEYS = Keyring(["the server's own secret"])
OTHERS = Keyring(["the secret of another server"])
ID = f"{1:032x}"
ANN = Orders(by=audit.Operator(actor="ann"))


def token(number: int = 1, epoch: int = 0, keys: Keyring = KEYS) -> Presented:
    """The token of a dispatch, as KEYS read it."""
    return KEYS.read(keys.token(f"{number:032x}", epoch))


def asking(number: int = 1, **more: Any) -> Any:
    """A dispatch of the stream s/1 that asks for an acknowledgement."""
    return dispatch(number, **{"stream": "s/1", "ack_required": 1, **more})


def ack(run: Run, *presented: Presented) -> Any:
    """Present tokens as a program does."""
    return run(acks.acknowledge, list(presented) or [token()], actor="ann")


def row(run: Run) -> Row:
    """The one dispatch there is."""
    (found,) = run(outbox_rows)
    return found


def attempt(run: Run, result: str = "ok", **more: Any) -> DispatchClaim:
    """Claim the dispatch, and settle what came of the attempt."""
    (held,) = claim(run, token=f"t{row(run).attempt}")
    run(settle.settle, [settlement(held, result, **more)])
    return held


def refused(run: Run, expected: type[PostroadError], *presented: Presented) -> Any:
    """The refusal of these tokens, after which everything is as it was."""
    before = run(everything)
    with pytest.raises(expected) as refusal:
        ack(run, *presented)
    assert run(everything) == before
    return refusal.value


def passed(run: Run, clock: FakeClock) -> list[Settled]:
    """What a pass of claiming ends once the dispatch is due again, and not a moment before."""
    due = row(run).due_at
    clock.advance_to(due - 1)
    assert run(dispatch_claims.claim, POLICY, names=["mail"], token="early", limit=10).ended == []
    clock.advance_to(due)
    ended: list[Settled] = run(dispatch_claims.claim, POLICY, names=["mail"], token="late", limit=10).ended
    return ended


class AckContract:
    """The consumer's word."""

    def test_it_ends_what_was_sent(self, run: Run) -> None:
        """A dispatch that was sent and waits is acked: finished, its stream told so, and with a row of history."""
        enqueue(run, asking())
        attempt(run, receipt='{"reference":"r"}')
        assert ack(run) == [ID]
        found = row(run)
        assert (found.status, found.due_at, found.last_error, found.receipt) == (
            "acked", None, None, '{"reference":"r"}',
        )  # fmt: skip
        assert run(outcomes) == [("s/1", "out:key/1:acked", "acked", None)]
        said = run(last_change)
        assert (said.from_status, said.to_status, said.reason_code) == ("pending", "acked", "dispatch.acked.consumer")
        assert (said.source, said.actor, said.summary) == ("consumer", "ann", "acknowledged after 1 attempts")

    def test_it_ends_what_waits_for_another_attempt(self, run: Run) -> None:
        """After a failed attempt that arrived all the same the ack ends it, and clears the error."""
        enqueue(run, asking())
        attempt(run, "failed", error="the answer was lost")
        ack(run)
        assert (row(run).status, row(run).last_error) == ("acked", None)

    @pytest.mark.parametrize("result", ["ok", "failed", "permanent", "unknown", "cut_short"])
    def test_it_wins_over_a_late_settle(self, run: Run, result: str) -> None:
        """What an attempt comes to after the ack is history only: no status, no error, no outcome and no alert."""
        enqueue(run, asking())
        (held,) = claim(run)
        ack(run)
        acked, told = row(run), run(outcomes)
        (settled,) = run(settle.settle, [settlement(held, result, error="too late")])
        assert (settled.status, settled.stale) == ("acked", True)
        assert row(run) == acked
        assert (run(outcomes), run(alerts)) == (told, [])
        said = run(last_change)
        assert (said.from_status, said.to_status) == ("acked", "acked")
        assert said.reason_code.startswith("dispatch.stale.")

    def test_no_send_starts_after_it(self, run: Run, clock: FakeClock) -> None:
        """An acked dispatch is not claimed, and a claim from before it is not found current."""
        enqueue(run, asking())
        (held,) = claim(run)
        ack(run)
        assert run(dispatch_claims.recheck, [hold(held)]) == []
        assert run(dispatch_claims.release, [hold(held)]) == []
        clock.advance(1_000_000)
        assert claim(run, token="t2") == []

    def test_once_more_is_the_same_success(self, run: Run, clock: FakeClock) -> None:
        """A second ack answers as the first, and writes nothing."""
        enqueue(run, asking())
        attempt(run)
        ack(run)
        before = run(everything)
        clock.advance(60)
        assert ack(run) == []
        assert ack(run, token(), token()) == []
        assert run(everything) == before

    def test_the_same_token_twice_at_once(self, run: Run) -> None:
        """Two copies of one token in one transaction are one ack."""
        enqueue(run, asking())
        assert ack(run, token(), token()) == [ID]
        assert [reason for *_, reason in run(history)].count("dispatch.acked.consumer") == 1

    @pytest.mark.parametrize("sent", [False, True])
    def test_what_asked_for_none(self, run: Run, sent: bool) -> None:
        """A dispatch that asked for no acknowledgement gets none, in whatever status."""
        enqueue(run, dispatch(1))
        if sent:
            attempt(run)
        assert refused(run, AckNotRequested).dispatch == ID

    def test_what_there_is_not(self, run: Run) -> None:
        """A true token of an unknown dispatch says that there is none."""
        assert refused(run, DispatchNotFound).dispatch == ID

    @pytest.mark.parametrize("wrong", [token(keys=OTHERS), token(epoch=1), KEYS.read(KEYS.token(ID, 0)[:-1] + "_")])
    def test_a_token_that_is_not_true(self, run: Run, wrong: Presented) -> None:
        """A token of another key or epoch, or one that was tampered with, changes nothing."""
        enqueue(run, asking())
        attempt(run)
        refused(run, BadAckToken, wrong)

    def test_a_token_of_another_dispatch(self, run: Run) -> None:
        """A token acknowledges the dispatch that it names, and no other."""
        enqueue(run, asking(), asking(2))
        assert ack(run, token(2)) == [f"{2:032x}"]
        assert [one.status for one in run(outbox_rows)] == ["pending", "acked"]

    def test_all_or_none(self, run: Run) -> None:
        """Of several tokens in one transaction, one that acknowledges nothing takes the others along."""
        enqueue(run, asking(), asking(2))
        refused(run, BadAckToken, token(), token(2, keys=OTHERS))

    def test_it_is_too_late_for_a_dead_letter(self, run: Run, clock: FakeClock) -> None:
        """A dead letter is not acknowledged: the error says why it died, and since when."""
        enqueue(run, asking())
        attempt(run, "permanent", error="no route")
        died = clock.now.isoformat(timespec="seconds")
        clock.advance(60)
        error = refused(run, AckRefused)
        assert (error.dispatch, error.status, error.reason) == (ID, "dead_letter", "dispatch.dead_letter.permanent")
        assert str(error) == (
            "This dispatch can no longer be acknowledged. "
            f"It is dead_letter by dispatch.dead_letter.permanent since {died}."
        )

    def test_it_is_too_late_for_what_is_withdrawn_or_expired(self, run: Run, clock: FakeClock) -> None:
        """What was withdrawn, or whose deadline passed, is not acknowledged."""
        enqueue(run, asking(), asking(2, expires_at=clock.wall() + SECOND))
        run(outbox.withdraw, ["key/1"], actor="ann")
        clock.advance(1)
        run(settle.expire, limit=10)
        assert refused(run, AckRefused).reason == "dispatch.expired.withdrawn"
        assert refused(run, AckRefused, token(2)).reason == "dispatch.expired.deadline"

    def test_an_operators_retry_makes_earlier_tokens_void(self, run: Run) -> None:
        """After a retry only the new epoch's token counts, and the outcome has the epoch in its id."""
        enqueue(run, asking())
        attempt(run, "permanent")
        run(operators.retry, [ID], orders=ANN, due=Due())
        refused(run, BadAckToken)
        ack(run, token(epoch=1))
        assert run(outcomes)[-1] == ("s/1", "out:key/1:1:acked", "acked", None)

    def test_the_next_one_of_its_lane_may_go(self, run: Run, clock: FakeClock) -> None:
        """A dispatch that waits for its ack holds up its lane; the ack lets the next one go at once."""
        enqueue(run, asking(lane="l"), asking(2, lane="l"))
        (first,) = _of_lanes(run)
        run(settle.settle, [settlement(first, lane="l")])
        assert _of_lanes(run) == []
        ack(run)
        assert [held.key for held in _of_lanes(run)] == ["key/2"]

    def test_a_replay_asks_again(self, run: Run) -> None:
        """A replay of what asked for an acknowledgement asks for one, under its own token."""
        enqueue(run, asking())
        ack(run)
        run(operators.replay, ID, new_id=f"{9:032x}", orders=ANN)
        assert [one.ack_required for one in run(outbox_rows)] == [1, 1]
        assert ack(run, token(9)) == [f"{9:032x}"]


class AckWaitContract:
    """What was sent, and not acknowledged yet."""

    @pytest.mark.parametrize("fraction", [0.0, 0.5])
    def test_it_is_due_again_after_the_whole_delay(self, run: Run, clock: FakeClock, fraction: float) -> None:
        """A send puts it back to pending, due again by the whole delay whatever the jitter, and tells no outcome."""
        enqueue(run, asking(), asking(2))
        jittered = msgspec.structs.replace(POLICY, retry=Retry(attempts=3, first=60))
        first, second = claim(run, policy=jittered)
        assert (first.ack_required, second.ack_required) == (True, True)
        run(settle.settle, [settlement(second, "failed", error="no route", policy=jittered, fraction=fraction)])
        run(settle.settle, [settlement(first, policy=jittered, fraction=fraction)])
        found, other = run(outbox_rows)
        assert (found.status, found.due_at, found.claim_token) == ("pending", clock.wall() + 60 * SECOND, None)
        assert other.due_at == clock.wall() + fraction * 60 * SECOND
        assert run(history, ID)[-1] == ("delivering", "pending", "dispatch.delivered.transport_ok")
        assert run(last_change).summary == "attempt 1 of 3 sent, not acknowledged yet"
        assert run(outcomes) == []

    def test_a_send_clears_the_error(self, run: Run, clock: FakeClock) -> None:
        """After a failed attempt the one that goes out clears the error."""
        enqueue(run, asking())
        attempt(run, "failed", error="no route")
        clock.advance(60)
        attempt(run)
        assert row(run).last_error is None

    def test_sends_are_bounded(self, run: Run, clock: FakeClock) -> None:
        """Each send, the last too, waits its whole delay; then it is a dead letter by ack_timeout, and never sooner."""
        enqueue(run, asking())
        waits = []
        for _ in range(RETRY.attempts):
            attempt(run)
            waits.append(row(run).due_at - clock.wall())
            if len(waits) < RETRY.attempts:
                clock.advance_to(row(run).due_at)
        assert waits == [60 * SECOND, 120 * SECOND, 240 * SECOND]
        (end,) = passed(run, clock)
        assert (end.status, end.reason) == ("dead_letter", "dispatch.dead_letter.ack_timeout")
        found = row(run)
        assert (found.status, found.attempt, found.last_error) == ("dead_letter", 3, "no acknowledgement came")
        assert run(outcomes) == [("s/1", "out:key/1:dead_letter", "dead_letter", "no acknowledgement came")]
        said = run(last_change)
        assert said.summary == "attempt 3 of 3 was the last one; it had been sent, but not acknowledged"

    def test_without_a_stream_its_end_is_an_alert(self, run: Run, clock: FakeClock) -> None:
        """A dispatch of no stream whose ack never came raises an alert."""
        enqueue(run, asking(stream="", max_attempts=1))
        attempt(run)
        assert run(alerts) == []
        passed(run, clock)
        assert run(alerts) == [("dispatch.dead_letter", "key/1")]

    def test_the_budget_bounds_it_too(self, run: Run, clock: FakeClock) -> None:
        """A resend that would start after the budget is not made: whichever bound comes first ends it."""
        hurried = msgspec.structs.replace(POLICY, retry=Retry(attempts=9, first=60, budget=100, jitter=False))
        enqueue(run, asking())
        for _ in range(2):  # the first retry is always allowed
            (held,) = claim(run, policy=hurried)
            run(settle.settle, [settlement(held, policy=hurried)])
            clock.advance_to(row(run).due_at)
        (end,) = run(dispatch_claims.claim, hurried, names=["mail"], token="late", limit=10).ended
        assert end.reason == "dispatch.dead_letter.budget"
        assert run(last_change).summary == (
            "attempt 3 would start after the budget; it had been sent, but not acknowledged"
        )

    @pytest.mark.parametrize(("sent", "said"), [(True, "; it had been sent, but not acknowledged"), (False, "")])
    def test_a_last_attempt_that_fails(self, run: Run, clock: FakeClock, sent: bool, said: str) -> None:
        """A failed last attempt ends it as any dispatch, at once; the history says whether an earlier one was sent."""
        enqueue(run, asking(max_attempts=2))
        attempt(run, "ok" if sent else "failed", error="" if sent else "no route")
        clock.advance(60)
        attempt(run, "failed", error="no route")
        assert (row(run).status, row(run).last_error) == ("dead_letter", "no route")
        change = run(last_change)
        assert (change.reason_code, change.summary) == (
            "dispatch.dead_letter.max_attempts", f"attempt 2 of 2 failed: no route{said}",
        )  # fmt: skip

    def test_a_last_attempt_whose_lease_is_lost(self, run: Run, clock: FakeClock) -> None:
        """A last attempt of which nobody heard again ends it by lease_lost, as any dispatch."""
        enqueue(run, asking(max_attempts=1))
        (held,) = claim(run)
        clock.advance(LEASE / SECOND)
        (end,) = run(dispatch_claims.claim, POLICY, names=["mail"], token="late", limit=10).ended
        assert end.reason == "dispatch.dead_letter.lease_lost"
        run(settle.settle, [settlement(held)])
        assert [status for *_, status, _ in run(outcomes)] == ["dead_letter"]  # sent, late: no delivered outcome

    def test_expiry_wins_before_a_send(self, run: Run, clock: FakeClock) -> None:
        """What waits for its ack when its deadline passes expires, and is not sent again."""
        enqueue(run, asking(expires_at=clock.wall() + 60 * SECOND))
        attempt(run)
        clock.advance(60)
        (end,) = run(dispatch_claims.claim, POLICY, names=["mail"], token="late", limit=10).ended
        assert end.reason == "dispatch.expired.deadline"
        assert run(last_change).summary == (
            "its deadline passed after 1 attempts; it had been sent, but not acknowledged"
        )

    def test_expiry_never_wins_once_a_send_has_begun(self, run: Run, clock: FakeClock) -> None:
        """While an attempt's lease runs a passed deadline ends nothing: the ack still counts."""
        enqueue(run, asking(expires_at=clock.wall() + SECOND))
        claim(run)
        clock.advance(2)
        assert run(settle.expire, limit=10) == 0
        ack(run)
        assert row(run).status == "acked"

    def test_expiry_after_a_send(self, run: Run, clock: FakeClock) -> None:
        """What was settled after its deadline had passed expires with the next pass; until then an ack counts."""
        enqueue(run, asking(expires_at=clock.wall() + SECOND), asking(2, expires_at=clock.wall() + SECOND))
        held = claim(run)
        clock.advance(2)
        run(settle.settle, [settlement(one) for one in held])
        ack(run)
        assert run(settle.expire, limit=10) == 1
        assert [one.status for one in run(outbox_rows)] == ["acked", "expired"]


def _of_lanes(run: Run) -> list[DispatchClaim]:
    """Claim after a look at lanes, as a dispatcher does."""
    run(lanes.promote, ["mail"], limit=10)
    return claim(run, token="t9")
