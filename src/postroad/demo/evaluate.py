"""`postroad eval FILES`: plays scenarios, each on an empty database of its own."""

import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path

from sqlalchemy import text

from postroad import Postroad, PostroadError
from postroad.agent import evals, scenarios
from postroad.agent.evals import Bench, Report
from postroad.demo import embedded
from postroad.store import dialects


def main(files: Sequence[Path], *, postgres: bool = False) -> int:
    """Play the scenarios on SQLite, or on an embedded Postgres, and print what came of each.

    Returns the process's exit code: 0 only if all of them passed.
    """
    failed = 0
    with ExitStack() as stack:
        fresh = stack.enter_context(on_postgres() if postgres else on_sqlite())
        for file in files:
            try:
                report = evaluate(file, fresh)
            except PostroadError as error:
                print(f"FAIL  {file}\n      {error}")
                failed += 1
            else:
                print(report)
                failed += not report.passed
    print(f"{len(files) - failed} of {len(files)} scenarios passed")
    return 1 if failed else 0


def evaluate(file: Path, fresh: Callable[[], str]) -> Report:
    """Play one scenario on a database that `fresh` makes.

    Raises:
        BadScenario: The file is not a scenario.
    """
    scenario = scenarios.load(file)
    url = fresh()
    opened = 0

    @contextmanager
    def bench(app: Postroad, at: datetime) -> Iterator[Bench]:
        nonlocal opened
        from postroad.testing import Harness

        app.alert_sink(lambda _: None)  # the scenario reads them from the database
        with Harness(app, database=url, start=at, seed=opened) as harness:
            opened += 1
            yield harness

    return evals.play(scenario, bench)


@contextmanager
def on_sqlite() -> Iterator[Callable[[], str]]:
    """Makes empty SQLite files that are removed at the end."""
    with tempfile.TemporaryDirectory(prefix="postroad-eval-") as folder:
        made = 0

        def fresh() -> str:
            nonlocal made
            made += 1
            return f"sqlite:///{folder}/{made}.db"

        yield fresh


@contextmanager
def on_postgres(url: str | None = None) -> Iterator[Callable[[], str]]:
    """Makes empty databases on a Postgres: the given one, or an embedded one that is removed at the end."""
    with ExitStack() as stack:
        server = url or stack.enter_context(embedded.passing_postgres())
        engine = dialects.open_engine(server)
        stack.callback(engine.dispose)
        made: list[str] = []

        def run(statement: str) -> None:
            with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
                conn.execute(text(statement))

        def drop() -> None:
            for name in made:
                run(f"DROP DATABASE IF EXISTS {name}")

        def fresh() -> str:
            made.append(f"postroad_eval_{secrets.token_hex(6)}")
            run(f"CREATE DATABASE {made[-1]}")
            return engine.url.set(database=made[-1]).render_as_string(hide_password=False)

        if url is not None:
            stack.callback(drop)
        yield fresh
