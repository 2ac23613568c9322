"""What rates promise: limits of a kind and of its hosts are kept, and what waits for one host holds up no other.

It cannot catch a plan that walks what a limit holds back; the plan tests look at that.
"""

import msgspec
import pytest

from postroad.model.clock import SECOND, FakeClock
from postroad.model.rows import HostRoom
from postroad.store import dispatch_claims, rates
from postroad.testing.contracts.dispatches import POLICY, Run, claim, enqueue, hold
from postroad.testing.contracts.gates import keys, to, wait


class RateContract:
    """Limits per kind and per host."""

    def test_a_kind_keeps_its_rate(self, run: Run, clock: FakeClock) -> None:
        """At ten a second one may start each tenth of a second, whoever claims; the claim says when."""
        policy = msgspec.structs.replace(POLICY, rate=10.0)
        enqueue(run, *[to(n, None) for n in range(1, 50)])
        started = 0
        for _ in range(20):
            found = run(dispatch_claims.claim, policy, names=["mail"], token=f"t{started}", limit=9)
            started += len(found.claims)
            assert len(found.claims) == 1
            assert found.again_at == clock.wall() + SECOND // 10
            clock.advance(0.1)
        assert started == 20

    def test_a_high_rate_starts_several_at_once(self, run: Run, clock: FakeClock) -> None:
        """Of what was not used a tenth of a second is saved, no more; a whole second never has more than that above."""
        policy = msgspec.structs.replace(POLICY, rate=100.0)
        enqueue(run, *[to(n, None) for n in range(1, 400)])
        clock.advance(60)
        began, started = clock.wall(), 0
        while clock.wall() < began + SECOND:
            found = run(dispatch_claims.claim, policy, names=["mail"], token=f"t{started}", limit=50)
            assert 0 < len(found.claims) <= 10
            started += len(found.claims)
            assert found.again_at > clock.wall()
            wait(clock, found.again_at - clock.wall())
        assert 90 <= started <= 110

    def test_a_host_keeps_its_rate(self, run: Run, clock: FakeClock) -> None:
        """Each host has the rate to itself."""
        policy = msgspec.structs.replace(POLICY, rate_per_host=1.0)
        enqueue(run, *[to(n, host) for n, host in enumerate(["a.example"] * 3 + ["b.example"] * 3, 1)])
        for expected in (["key/1", "key/4"], ["key/2", "key/5"], ["key/3", "key/6"]):
            assert sorted(keys(claim(run, policy=policy, token=expected[0]))) == expected
            assert claim(run, policy=policy, token="early") == []
            clock.advance(1)
        assert run(rates.forget) == 0
        clock.advance(100)
        assert run(rates.forget) == 2

    @pytest.mark.parametrize("limit", ["rate", "rate_per_host"])
    def test_what_is_not_sent_uses_up_no_rate(self, run: Run, clock: FakeClock, limit: str) -> None:
        """What is ended instead of being sent leaves its place to the next one at once."""
        policy = msgspec.structs.replace(POLICY, **{limit: 1.0})
        enqueue(run, to(1, "a.example", expires_at=clock.wall()), to(2, "a.example"), to(3, "a.example"))
        found = run(dispatch_claims.claim, policy, names=["mail"], token="t1", limit=9)
        assert ([row.status for row in found.ended], found.claims) == (["expired"], [])
        assert keys(claim(run, policy=policy, token="t2")) == ["key/2"]
        assert claim(run, policy=policy, token="t3") == []
        clock.advance(1)
        assert keys(claim(run, policy=policy, token="t4")) == ["key/3"]

    def test_a_busy_host_leaves_room_to_others(self, run: Run) -> None:
        """Of a host no more is claimed than there is room for; the others get the rest, the oldest first of each."""
        hosts = ["a.example"] * 9 + ["b.example"] * 2
        enqueue(run, *[to(n, host) for n, host in enumerate(hosts, 1)])
        found = claim(run, limit=8, room=HostRoom(3, {"a.example": 1}))
        assert sorted(keys(found)) == ["key/1", "key/10", "key/11", "key/2"]

    def test_many_hosts_are_served_in_turn(self, run: Run) -> None:
        """With more hosts than are looked at in one pass all are served, and the claim says that there is more."""
        enqueue(run, *[to(n, f"h{n % 40}.example") for n in range(1, 81)])
        seen: list[str] = []
        for turn in range(20):
            found = run(dispatch_claims.claim, POLICY, names=["mail"], token=f"t{turn}", limit=10, room=HostRoom(5, {}))
            seen += keys(found.claims)
            if not found.claims:
                break
        assert sorted(seen) == sorted(f"key/{n}" for n in range(1, 81))

    def test_a_host_is_given_back_with_its_claim(self, run: Run) -> None:
        """A claim that nothing came of can be claimed again at once where no rate says otherwise."""
        enqueue(run, to(1, "a.example"))
        (held,) = claim(run)
        run(dispatch_claims.release, [hold(held)])
        assert keys(claim(run, token="t2")) == ["key/1"]
