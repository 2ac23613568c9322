"""`postroad demo`: the freight agent as real processes against services that misbehave.

Nothing heavy is imported before it is decided which SQLite this process uses.
"""

import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130


def main(*, postgres: bool = False) -> int:
    """Run the demo on an embedded SQLite file, or on an embedded Postgres.

    Returns the process's exit code: 0 only if nothing was lost, and a kill in the middle of a send, a retry
    and a duplicate that was recognised by its key really happened.
    """
    has_wheel = not postgres and use_bundled_sqlite()
    from postroad.demo import embedded
    from postroad.demo.director import Director
    from postroad.demo.processes import Processes

    prefix = "postroad-demo-"
    folder = embedded.make_folder(prefix) if postgres else Path(tempfile.mkdtemp(prefix=prefix))
    signal.signal(signal.SIGTERM, _interrupted)
    try:
        with ExitStack() as stack:
            url = f"sqlite:///{folder}/freight.db"
            if postgres:
                url = stack.enter_context(embedded.postgres(folder / "postgres"))
            processes = stack.enter_context(Processes(folder))
            with Director(folder, url, processes, bundled=has_wheel) as director:
                return director.run()
    except KeyboardInterrupt:
        print(
            f"\nInterrupted; every process was ended. What there is lies in {folder}",
            file=sys.stderr,
        )
        return INTERRUPTED


def use_bundled_sqlite() -> bool:
    """Take the bundled SQLite if its wheel is there; without it the standard library's, which may warn."""
    try:
        import postroad.bundled_sqlite  # noqa: F401
    except ImportError:
        return False
    return True


def _interrupted(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
