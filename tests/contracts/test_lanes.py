"""Ordered lanes over both databases and every way to run a transaction."""

from postroad.testing.contracts import lanes


class TestLanes(lanes.LaneContract):
    """One at a time, in order."""


class TestLaneRaces(lanes.LaneRaceContract):
    """Whoever meets in a lane."""
