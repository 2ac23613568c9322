"""The table of transactions that race, and what each of them is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from tests.races.scene import Scene

Fn = Callable[[Connection, Scene, str], Any]


@dataclass(frozen=True, kw_only=True)
class Transaction:
    """A transaction over the scene: `fn(conn, scene, who)`, where `who` tells two of the same kind apart."""

    name: str
    at: frozenset[str]
    fn: Fn
    skips: bool = False

    def meets(self, other: "Transaction") -> bool:
        """Whether the two have a row in common."""
        return bool(self.at & other.at)


WORKS: dict[str, Transaction] = {}


NOTHING = Transaction(name="", at=frozenset(), fn=lambda *_: None)


def work(at: str, *, skips: bool = False) -> Callable[[Fn], Fn]:
    """Put a transaction into the table. `skips`: what others have locked is left to them."""

    def add(fn: Fn) -> Fn:
        name = fn.__name__
        WORKS[name] = Transaction(name=name, at=frozenset(at.split()), fn=fn, skips=skips)
        return fn

    return add
