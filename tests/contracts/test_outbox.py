"""The outbox's contracts over both databases and every way to run a transaction."""

from postroad.testing.contracts import dispatch_claims, dispatch_views, outbox, settle


class TestEnqueue(outbox.EnqueueContract):
    """One dispatch for each key."""


class TestWithdraw(outbox.WithdrawContract):
    """Ours until it is claimed."""


class TestHistory(outbox.HistoryContract):
    """One table of edges."""


class TestClaim(dispatch_claims.ClaimContract):
    """The claim is the start."""


class TestTakeover(dispatch_claims.TakeoverContract):
    """A lease that is over."""


class TestHold(dispatch_claims.HoldContract):
    """Given back, checked, looked up."""


class TestSettle(settle.SettleContract):
    """One guarded transaction."""


class TestStale(settle.StaleContract):
    """Too late."""


class TestExpire(settle.ExpireContract):
    """Deadlines."""


class TestView(dispatch_views.ViewContract):
    """What operators see."""


class TestWhy(dispatch_views.WhyContract):
    """Why it is not moving."""
