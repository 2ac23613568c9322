"""Real processes that fall asleep in the middle of their work: the killed ones' program, which stops itself instead."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from postroad import Postroad
from postroad.testing.zombies.traces import Tables, Zombies
from tests.acceptance.killed import APP, DEADLINE, Place, Stage, wait_for

_DIES = "os.kill(os.getpid(), signal.SIGKILL)"
_SLEEPS = """
def fall_asleep():
    if os.path.exists("stay-awake"):
        while os.path.exists("stay-awake"):
            time.sleep(0.02)
        return
    # Behind all transactions that are under way: nobody could take over from one who sleeps with SQLite's write lock.
    post.database.transact(lambda conn, *, now: None)
    os.kill(os.getpid(), signal.SIGSTOP)
"""
Process = subprocess.Popen[bytes]


class Paused(Stage):
    """A stage whose program, asked to die in a handler or a send, falls asleep there instead and can be woken."""

    def __init__(self, place: Place, folder: Path, post: Postroad) -> None:
        super().__init__(place, folder, post)
        assert APP.count(_DIES) == 1
        (folder / "app.py").write_text(APP.replace(_DIES, "fall_asleep()") + _SLEEPS)

    def plant(self, fault: str) -> None:
        """Have the program end with these lines, which break what is tested."""
        with (self._folder / "app.py").open("a") as app:
            app.write(fault)

    @contextmanager
    def asleep(self, place: str) -> Iterator[Process]:
        """A process that has stopped itself, at `die-in-handler` or `die-in-send`."""
        (self._folder / place).touch()
        with self._running("") as process:
            wait_for(lambda: _has_stopped(process), self.log)
            yield process

    @contextmanager
    def awake(self, place: str) -> Iterator[Process]:
        """A process that waits there, and renews its claims, until the block is left; it then ends in order."""
        flag, asked = self._folder / "stay-awake", self._folder / place
        flag.touch()
        asked.touch()
        with self._running("") as process:
            wait_for(lambda: not asked.exists(), self.log)
            yield process
            flag.unlink()
            self.finish(process)

    def wake(self, zombie: Process, until: Callable[[Tables], object]) -> None:
        """Let a process go on, and wait until the tables show it."""
        zombie.send_signal(signal.SIGCONT)
        wait_for(lambda: until(self.tables()), self.log)

    def finish(self, process: Process) -> None:
        """Wait until nothing is left to do, and end a process as an operator would."""
        wait_for(self._is_quiet, self.log)
        process.terminate()
        assert process.wait(DEADLINE) == 0, self.log()

    def tables(self) -> Tables:
        """Every row there is."""
        return self.post.database.read(Zombies.everything)

    def log(self) -> str:
        """What the processes have told their operators."""
        return self._told()

    def ask(self, *arguments: str) -> Any:
        """The answer of the command line."""
        schema = ["--schema", self._schema] if self._schema else []
        command = [sys.executable, "-m", "postroad", *arguments, "--json", "--database", self._url, *schema]
        asked = subprocess.run(
            command, env=self._environment(""), cwd=self._folder, capture_output=True, timeout=DEADLINE, check=False
        )
        assert asked.returncode == 0, asked.stdout.decode()
        return msgspec.json.decode(asked.stdout)["data"]


def _has_stopped(process: Process) -> bool:
    return os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
