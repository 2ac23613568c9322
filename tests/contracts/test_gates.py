"""Gates and rates over both databases and every way to run a transaction."""

from postroad.testing.contracts import gates, rates


class TestGates(gates.GateContract):
    """What is down costs no attempts."""


class TestGateRaces(gates.GateRaceContract):
    """Two that meet at a gate."""


class TestRates(rates.RateContract):
    """Limits per kind and per host."""
