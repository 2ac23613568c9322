"""A catch-up that dies at the n-th thing it does to the disk, in a process that was forked for it.

`python -m tests.system.mirror_deaths URL SCHEMA TEMPLATE FOLDER STRIDE` tries every n, or every stride-th, each
in a copy of the template, until one catch-up lives to its end. After each death the next one, which lives, must bring
the files up to the log. It prints how often it died.
"""

import importlib
import os
import shutil
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

STREAMS = ("chat/1", "chat/2", "chat/3")
LENGTH, BACK = 14, 6  # entries of each, and how many of them the database has kept
ASIDE = [LENGTH - BACK, LENGTH - BACK, 0]
FILE_BYTES = 1_024
DEEDS = {"write", "replace", "truncate", "ftruncate", "unlink", "makedirs", "fsync", "rmdir"}


class Deadly:
    """The `os` that files are written through: its n-th deed is the last, done not at all, by half, or whole."""

    def __init__(self, last: int) -> None:
        self._left = last

    def __getattr__(self, name: str) -> Any:
        found = getattr(os, name)
        return self._counted(name, found) if name in DEEDS else found

    def _counted(self, name: str, deed: Any) -> Any:
        def do(*given: Any, **more: Any) -> Any:
            self._pass()
            if name == "write":
                descriptor, data = given
                half = deed(descriptor, data[: len(data) // 2]) if self._left == 1 else 0
                self._pass()
                return half + deed(descriptor, data[half:])
            done = deed(*given, **more)
            self._pass()
            return done

        return do

    def _pass(self) -> None:
        self._left -= 1
        if not self._left:
            os.kill(os.getpid(), signal.SIGKILL)


def forked(work: Any) -> int:
    """How a process ended that did this work."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            sys.stderr.write(f"{error!r}\n")
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(url: str, schema: str, template: Path, folder: Path, stride: int) -> int:
    """How often a catch-up died before one lived to its end."""
    importlib.import_module("postroad.bundled_sqlite")
    from postroad.agent.mirror import Mirror
    from postroad.agent.mirror import files as mirror_files
    from postroad.store import log
    from postroad.store.database import Database
    from postroad.store.executor import Inline
    from tests.system.mirror_soundness import aside_of, lines_of, prefixes, whole

    def catch_up(last: int | None) -> None:
        database = Database(url, schema=schema or None, executor=Inline())
        mirror = Mirror(place, "chat", file_bytes_max=FILE_BYTES)
        if last is None:
            prefixes(lines_of(mirror, STREAMS[-1]), database.read(log.read, STREAMS[-1]))
        else:
            setattr(mirror_files, "os", Deadly(last))  # noqa: B010  # the module's own name for it
        mirror.write(database)
        for stream in STREAMS if last is None else ():
            whole(database.read(log.read, stream), mirror)
        assert last is not None or [len(aside_of(mirror, stream)) for stream in STREAMS] == ASIDE
        database.close()  # nothing of it may be open when a process is forked

    for tried, died in enumerate(range(0, 10_000, stride)):
        place = folder / str(died)
        shutil.copytree(template, place)
        code = forked(partial(catch_up, died + 1))
        if code == 0:
            return tried
        assert code == -signal.SIGKILL, code
        catch_up(None)
        shutil.rmtree(place)
    raise AssertionError("it never lived")


if __name__ == "__main__":
    print(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5])))
