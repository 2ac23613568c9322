"""All measurements, in order: those that leave a database small come first."""

from collections.abc import Callable, Collection, Iterator, Sequence

from benchmarks import (
    claims,
    conversations,
    fairness,
    hosts,
    idle,
    latency,
    machine,
    memory,
    places,
    retention,
    rounds,
    steady,
    work,
)
from benchmarks.figures import Figure, Plan, Progress
from benchmarks.places import Kind, Place

Measure = Callable[[Kind, Place, Place, Plan, Progress], Iterator[Figure]]

PROCESSES: dict[str, Measure] = {
    module.NAME: module.measure
    for module in (latency, fairness, conversations, hosts, retention, idle, steady, claims, memory)
}
NAMES = (*dict.fromkeys(what.name for what in work.WORKS), *PROCESSES)


class Suite:
    """The measurements that were asked for. `postgres` is the server's version once one was measured."""

    def __init__(self, names: Collection[str], plan: Plan, progress: Progress) -> None:
        self._names = names
        self._plan = plan
        self._progress = progress
        self.postgres: str | None = None

    def run(self, kinds: Sequence[Kind]) -> Iterator[Figure]:
        """Measure on these databases, one figure after the other."""
        for kind in kinds if self._names else ():
            self._progress(f"{kind}: preparing")
            with places.places(kind) as (ours, limit):
                if kind == "postgres":
                    self.postgres = machine.server_version(ours)
                yield from self._rates(kind, ours, limit)
                for name, measure in PROCESSES.items():
                    if name in self._names:
                        self._progress(f"{kind}: {name}")
                        yield from measure(kind, ours, limit, self._plan, self._progress)

    def _rates(self, kind: Kind, ours: Place, limit: Place) -> Iterator[Figure]:
        for what in work.WORKS:
            if what.name in self._names:
                self._progress(f"{kind}: {what.name}, {what.streams} at once")
                yield rounds.measure(what, self._plan, kind, ours, limit)
