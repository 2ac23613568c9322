"""The reports' contract over both databases, and every way to run a transaction."""

from postroad.testing.contracts.reporting import EndContract, ReportRaces, SourceContract, TellContract
from postroad.testing.contracts.reports import EntryContract, KeyContract, SetContract


class TestSets(SetContract):
    """In the ways of the fixture `run`."""


class TestEntries(EntryContract):
    """In the ways of the fixture `run`."""


class TestKeys(KeyContract):
    """In the ways of the fixture `run`."""


class TestSources(SourceContract):
    """In the ways of the fixture `run`."""


class TestTells(TellContract):
    """In the ways of the fixture `run`."""


class TestEnds(EndContract):
    """In the ways of the fixture `run`."""


class TestReportRaces(ReportRaces):
    """With several connections."""
