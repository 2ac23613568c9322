"""The suite's own Postgres: real, shared, and gone afterwards."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import create_engine, text

from tests import postgres_server


def test_it_answers_through_sqlalchemy(postgres_url: str) -> None:
    """The URL is one for SQLAlchemy with psycopg, of a server with room for many connections."""
    engine = create_engine(postgres_url)
    with engine.connect() as conn:
        assert conn.dialect.driver == "psycopg"
        assert int(conn.execute(text("show max_connections")).scalar_one()) >= 200
    engine.dispose()


def test_a_fresh_schema_is_nobody_s(postgres_url: str, fresh_schema: str) -> None:
    """The name of a fresh schema is free, and can be created and filled."""
    with psycopg.connect(postgres_url.replace("+psycopg", "", 1)) as conn:
        conn.execute(f"create schema {fresh_schema}")
        conn.execute(f"create table {fresh_schema}.t (n int)")


@pytest.fixture
def folder() -> Iterator[Path]:
    folder = postgres_server.make_folder()
    yield folder
    postgres_server.stop(folder)


def test_the_keeper_outlives_nobody(folder: Path) -> None:
    """When the run's controller dies without a word, the server stops and its folder goes."""
    waiting = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(waiting) as controller:
        url = postgres_server.url_of(folder, controller=controller.pid)
        assert postgres_server.url_of(folder, controller=controller.pid) == url
        keeper = int((folder / "keeper").read_text())
        server = int((folder / "data" / "postmaster.pid").read_text().splitlines()[0])
        assert postgres_server.alive(keeper)
        assert postgres_server.alive(server)
        controller.kill()
    assert gone(folder, keeper, server, seconds=30)


def gone(folder: Path, *pids: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while folder.exists() or any(map(postgres_server.alive, pids)):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
