"""What users test with: `Harness` and `FakeClock`, contract suites, failpoints, the simulation."""

from typing import TYPE_CHECKING, Any

from postroad.model.clock import FakeClock

if TYPE_CHECKING:
    from postroad.testing.harness import Harness

__all__ = ["FakeClock", "Harness"]


def __getattr__(name: str) -> Any:
    # Lazy: the contract suites need no engine.
    if name != "Harness":
        raise AttributeError(f"module 'postroad.testing' has no attribute {name!r}")
    from postroad.testing.harness import Harness

    return Harness
