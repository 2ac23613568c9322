"""What operators see of dispatches, and the sentence that says why one is not moving."""

from collections.abc import Callable
from typing import Any

import pytest

from postroad.model.clock import SECOND, FakeClock, moment
from postroad.model.dispatches import DispatchFilter
from postroad.store import dispatch_views, dispatch_why, outbox, settle
from postroad.store.statements import Statement, as_json
from postroad.testing.contracts.dispatches import Run, claim, dispatch, enqueue, settlement

_INTO_A_LANE = Statement("UPDATE {p}outbox SET due_at = NULL, lane = 'l'")
_MEMBERS = Statement("""
INSERT INTO {p}lane_members (lane, dispatch, kind, due_at) SELECT 'l', value, 'mail', 0 FROM {list:ids}
""")
_GATE = Statement("""
INSERT INTO {p}gates (kind, host, until, closed_at, failures, reason, updated_at)
VALUES ('mail', :host, :until, 0, 1, :reason, 0)
""")
_AT_HOST = Statement("UPDATE {p}outbox SET host = 'a.example'")
_SENT = Statement("""
INSERT INTO {p}transitions (entity, from_status, to_status, reason_code, summary, source, actor, evidence, metadata, at)
SELECT id, 'delivering', 'pending', 'dispatch.delivered.transport_ok', '', '', '', '[]', '{}', 0 FROM {p}outbox
""")
_LAST_ATTEMPT = Statement("UPDATE {p}outbox SET attempt = 3")
_VERSION = Statement("UPDATE {p}outbox SET version = 3")


class ViewContract:
    """Reads for people."""

    def test_one_dispatch_is_shown_with_its_history(self, run: Run, clock: FakeClock) -> None:
        """A dispatch is found by id or by key and carries its history, oldest first."""
        enqueue(run, dispatch(1, stream="s/1", expires_at=clock.wall() + 60 * SECOND))
        began = clock.now
        run(settle.settle, [settlement(claim(run)[0], "failed", error="busy")])
        row = run(dispatch_views.get, "key/1")
        assert row == run(dispatch_views.get, f"{1:032x}")
        assert (row.key, row.stream, row.kind, row.to) == ("key/1", "s/1", "mail", "ann@example.org")
        assert (row.status, row.reason) == ("pending", "dispatch.pending.retry_backoff")
        assert (row.attempt, row.max_attempts, row.last_error) == (1, 3, "busy")
        assert (row.created_at, row.due_at, row.expires_at) == (began, *[moment(clock.wall() + 60 * SECOND)] * 2)
        assert [change["to_status"] for change in row.history] == ["pending", "delivering", "pending"]
        assert row.history[0]["at"] == began
        assert run(dispatch_views.get, "no such") is None

    def test_an_id_wins_over_a_key(self, run: Run) -> None:
        """If one dispatch's key is another one's id, the id is meant."""
        enqueue(run, dispatch(1, key=f"{2:032x}"), dispatch(2))
        assert run(dispatch_views.get, f"{2:032x}").key == "key/2"

    def test_what_came_too_late_is_no_reason(self, run: Run) -> None:
        """A dispatch's reason is that of its last change, not of a late result."""
        enqueue(run, dispatch(1))
        held = claim(run)[0]
        run(settle.settle, [settlement(held, "permanent"), settlement(held)])
        assert run(dispatch_views.get, "key/1").reason == "dispatch.dead_letter.permanent"

    def test_the_newest_come_first(self, run: Run, clock: FakeClock) -> None:
        """A list is newest first, bounded, and filtered by status, kind and destination."""
        for number in range(4):
            enqueue(run, dispatch(number, kind="sms" if number % 2 else "mail", destination=f"to/{number}"))
            clock.advance(1)
        claim(run, limit=1)

        def keys(**filters: Any) -> list[str]:
            return [row.key for row in run(dispatch_views.list_, DispatchFilter(**filters))]

        assert keys() == ["key/3", "key/2", "key/1", "key/0"]
        assert [row.key for row in run(dispatch_views.list_, limit=2)] == ["key/3", "key/2"]
        assert keys(kind="mail") == ["key/2", "key/0"]
        assert keys(status="delivering") == keys(to="to/0") == ["key/0"]
        assert keys(status="pending", kind="sms", to="to/3") == ["key/3"]


class WhyContract:
    """Why is it not moving?"""

    @pytest.fixture
    def why(self, run: Run) -> Callable[[], str]:
        """The sentence on dispatch 1."""
        return lambda: run(dispatch_why.why, "key/1")

    def test_what_is_not_there(self, why: Callable[[], str]) -> None:
        """A dispatch that does not exist is said not to."""
        assert why() == "There is no dispatch key/1."

    def test_what_is_pending(self, run: Run, clock: FakeClock, why: Callable[[], str]) -> None:
        """A pending dispatch waits for its time, for a dispatcher, for its lane or for its end."""
        enqueue(run, dispatch(1, due_at=clock.wall() + 3 * SECOND, expires_at=clock.wall() + 9 * SECOND))
        assert why() == "It waits for its time until 2026-01-01T00:00:03+00:00, due in 3 s."
        clock.advance(5)
        assert why() == "Due for 2 s, but no dispatcher has taken kind mail since."
        run(_INTO_A_LANE)
        assert why() == "It waits in its lane 'l' for the one before it."
        clock.advance(5)
        assert why() == ("Its deadline passed at 2026-01-01T00:00:09+00:00; the next pump or dispatcher ends it.")

    def test_what_backs_off(self, run: Run, clock: FakeClock, why: Callable[[], str]) -> None:
        """A dispatch that failed says until when it backs off, and its last error if it has one."""
        enqueue(run, dispatch(1))
        run(settle.settle, [settlement(claim(run)[0], "failed", error="busy")])
        when = "until 2026-01-01T00:01:00+00:00, due in 60 s"
        assert why() == f"Backing off {when}, after attempt 1 of 3: busy."
        clock.advance(60)
        run(settle.settle, [settlement(claim(run, token="t2")[0], "failed", floor=60 * SECOND, fraction=0.5)])
        assert why().endswith("after attempt 2 of 3.")

    def test_what_is_under_way(self, run: Run, clock: FakeClock, why: Callable[[], str]) -> None:
        """A claimed dispatch is under a lease, or its lease was lost."""
        enqueue(run, dispatch(1))
        claim(run)
        assert why() == "Delivering: attempt 1 of 3 runs under a lease until 2026-01-01T00:00:15+00:00."
        clock.advance(15)
        assert why() == (
            "The lease of attempt 1 of 3 was over at 2026-01-01T00:00:15+00:00; the next dispatcher of mail takes it."
        )

    def test_what_is_over(self, run: Run, clock: FakeClock, why: Callable[[], str]) -> None:
        """A finished dispatch says how it ended, a dead or expired one why."""
        enqueue(run, dispatch(1), dispatch(2), dispatch(3))
        one, two = claim(run, limit=2)
        run(settle.settle, [settlement(one), settlement(two, "permanent", error="no")])
        run(outbox.withdraw, ["key/3"], actor="ann")
        at = "2026-01-01T00:00:00+00:00"
        assert why() == f"Finished: delivered at {at}."
        assert run(dispatch_why.why, "key/2") == f"Dead by dispatch.dead_letter.permanent since {at}: no."
        assert run(dispatch_why.why, "key/3") == f"Expired by dispatch.expired.withdrawn at {at}."

    def test_what_waits_in_its_lane(self, run: Run, why: Callable[[], str]) -> None:
        """A dispatch in a lane says which one is before it, how many there are, and how the first one stands."""
        enqueue(run, dispatch(1), dispatch(2), dispatch(3))
        run(_INTO_A_LANE)
        ids = [f"{n:032x}" for n in (3, 2, 1)]
        for id in ids:
            run(_MEMBERS, ids=as_json([id]))
        first = f"key/3 ({ids[0]}), pending"
        assert why() == f"It waits in its lane 'l' behind 2 others, the first of them {first}."
        assert run(dispatch_why.why, "key/2") == f"It waits in its lane 'l' for the one before it: {first}."

    def test_what_waits_for_its_acknowledgement(self, run: Run, clock: FakeClock, why: Callable[[], str]) -> None:
        """A dispatch that was sent and asks for an ack says until when it is waited for, and what then."""
        enqueue(run, dispatch(1))
        run(settle.settle, [settlement(claim(run)[0], "failed")])
        run(_SENT)
        until = "its acknowledgement is waited for until 2026-01-01T00:01:00+00:00"
        assert why() == f"Sent by attempt 1 of 3; {until}, then it is sent again."
        run(_LAST_ATTEMPT)
        assert why().endswith("then it is given up.")

    def test_what_a_gate_holds(self, run: Run, clock: FakeClock, why: Callable[[], str]) -> None:
        """While its kind or its host is held a due dispatch says until when and why."""
        enqueue(run, dispatch(1))
        run(_AT_HOST)
        until = clock.wall() + 60 * SECOND
        run(_GATE, host="a.example", until=until, reason="connection refused")
        run(_GATE, host="b.example", until=until + 1, reason="another")
        at = "2026-01-01T00:01:00+00:00"
        held = f"are held until one of them is tried at {at}"
        assert why() == f"All sends to host a.example of kind mail {held}: connection refused."
        run(_GATE, host="", until=until + 1, reason="")
        assert why() == f"All sends of kind mail {held}."
        clock.advance(61)
        assert why().startswith("Due for")

    def test_what_an_app_takes(self, run: Run, clock: FakeClock) -> None:
        """As far as an app is given, a due dispatch says whether it takes the kind, and in which version."""
        enqueue(run, dispatch(1, due_at=clock.wall()))
        clock.advance(2)

        def why(**versions: int) -> str:
            said: str = run(dispatch_why.why, "key/1", takes=dispatch_why.Takes(versions))
            return said.removeprefix("Due for 2 s, but no dispatcher has taken kind mail since: ")

        assert why(sms=1) == "this app carries out no dispatches of it."
        assert why(mail=1) == "is a dispatcher of this app running?"
        run(_VERSION)
        assert why(mail=1) == "it was written as version 3, this app knows it up to 1."
        assert run(dispatch_why.why, "key/1") == (
            "Due for 2 s, but no dispatcher has taken kind mail, version 3, since."
        )  # fmt: skip

    def test_what_is_parked(self, run: Run, why: Callable[[], str]) -> None:
        """What may have arrived says how to resolve it; once it is known to have arrived it says that instead."""
        enqueue(run, dispatch(1))
        held = claim(run)[0]
        run(settle.settle, [settlement(held, "unknown", error="broke\nTraceback")])
        at = "2026-01-01T00:00:00+00:00"
        assert why() == (
            f"Parked since {at}, since it may have arrived: broke: "
            "look at its destination, then resolve it with --sent, --resend or --discard."
        )
        run(settle.settle, [settlement(held)])
        assert why() == (
            f"Dead by dispatch.dead_letter.unknown_outcome since {at}: broke"
            f"; an attempt whose claim was over has sent it, as was heard at {at}."
        )
