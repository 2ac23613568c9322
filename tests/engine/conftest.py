"""Harnesses over both databases."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from postroad import Postroad
from postroad.testing import Harness

Open = Callable[..., Harness]


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Where a harness keeps its tables: the keyword arguments `database` and `schema`."""
    if request.param == "sqlite":
        return {"database": f"sqlite:///{request.getfixturevalue('migrated_path')}"}
    return {
        "database": request.getfixturevalue("postgres_url"),
        "schema": request.getfixturevalue("migrated_schema"),
    }


@pytest.fixture
def harness(place: dict[str, Any]) -> Iterator[Open]:
    """A factory of entered harnesses: `h = harness(post)`."""
    with ExitStack() as stack:

        def enter(post: Postroad, **more: Any) -> Harness:
            return stack.enter_context(Harness(post, **place, **more))

        yield enter
