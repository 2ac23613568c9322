"""Idle: how much of a core a running application uses when there is nothing to do."""

import time
from collections.abc import Iterator

from benchmarks import application
from benchmarks.children import child
from benchmarks.figures import Figure, Plan, Progress, rounded
from benchmarks.places import Kind, Place

NAME = "idle"
SETTLE_SECONDS = 1


def measure(kind: Kind, ours: Place, limit: Place, plan: Plan, progress: Progress) -> Iterator[Figure]:
    """Percent of a core, of a process that runs worker, dispatcher and pump; a database server's is not counted."""
    ours.clear()
    with child(application.run, ours) as app:
        time.sleep(SETTLE_SECONDS)
        began, before = time.monotonic(), float(app.ask())
        time.sleep(plan.idle_seconds)
        used, passed = float(app.ask()) - before, time.monotonic() - began
    yield Figure(work=NAME, database=kind, case="all loops", unit="% of a core", ours=rounded(used / passed * 100))
