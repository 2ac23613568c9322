"""How bugs are planted: as patches of the running code, for tests alone."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import msgspec

Planting = Callable[[], AbstractContextManager[object]]


class Mutant(msgspec.Struct, frozen=True, kw_only=True):
    """A bug that can be planted: what it is, in the words of the guarantees and in ours."""

    name: str
    guarantee: str
    says: str
    plant: Planting


def into(mutants: dict[str, Mutant]) -> Callable[[str], Callable[[Planting], Planting]]:
    """What decorates bugs, each with the guarantee that it breaks: they are added to `mutants` by name."""

    def planted(guarantee: str) -> Callable[[Planting], Planting]:
        def declare(plant: Planting) -> Planting:
            name = getattr(plant, "__name__", "")
            mutants[name] = Mutant(name=name, guarantee=guarantee, says=(plant.__doc__ or "").strip(), plant=plant)
            return plant

        return declare

    return planted
