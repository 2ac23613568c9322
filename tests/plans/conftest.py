"""The database that most plan tests look at."""

from collections.abc import Iterator

import pytest

from postroad.store.database import Database
from tests.plans.finished import fill
from tests.plans.places import STATISTICS, filled


@pytest.fixture(params=STATISTICS, ids="-".join, scope="session")
def database(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """Much that is finished, and a planner that was told that nothing is there, or the truth."""
    with filled(request, tmp_path_factory, request.param, fill) as made:
        yield made
