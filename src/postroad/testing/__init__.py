"""What users test with: `Harness` and `FakeClock`, contract suites, failpoints, the simulation."""

from postroad.model.clock import FakeClock
from postroad.testing.harness import Harness

__all__ = ["FakeClock", "Harness"]
