"""Harnesses and plain databases, as the engine's tests and the contracts have them."""

from tests.cases.apps import open_app, processes
from tests.contracts.conftest import clock, database, run
from tests.engine.conftest import harness, place

__all__ = ["clock", "database", "harness", "open_app", "place", "processes", "run"]
