"""The processes of a run: started, killed, stopped and continued by their ids, and never left behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from postroad.testing.chaos import down, faults
from postroad.testing.chaos.sizes import (
    CLIENT,
    DATABASE_URL,
    DOWN,
    EVERYBODY,
    GRACE_SECONDS,
    LIFE,
    POLL_SECONDS,
    SOCKET,
)

END_SECONDS = 20.0


class Crew:
    """Four processes that run the app, and one with its clients."""

    def __init__(self, folder: Path, *, url: str, socket: Path, seed: int) -> None:
        self._folder = folder
        self._seed = seed
        self._environment = {
            **os.environ, DATABASE_URL: url, SOCKET: str(socket), DOWN: str(folder / down.NAME),
        }  # fmt: skip
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._lives: dict[str, int] = dict.fromkeys(EVERYBODY, 0)
        self.begun: dict[str, int] = {}  # when the present lives began, in microseconds since 1970

    def life(self, name: str) -> str:
        """The name of a process's present life, or of its last one."""
        return f"{name}-{self._lives[name]}"

    def running(self) -> list[str]:
        """The names of those that run."""
        return [name for name, process in self._running.items() if process.poll() is None]

    def start(self, name: str, more: Mapping[str, str] | None = None) -> None:
        """Start a process, in a new life."""
        self._lives[name] += 1
        self.begun[name] = faults.now()
        with (self._folder / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                [sys.executable, "-m", *self._command(name)],
                env={**self._environment, LIFE: self.life(name), **(more or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # A session of its own: an interrupt typed at the director reaches the director alone.
                start_new_session=True,
            )

    def kill(self, name: str) -> bool:
        """End a process as a crash would; False: it did not run."""
        process = self._running.get(name)
        if process is None or process.poll() is not None:
            return False
        process.kill()
        process.wait()
        return True

    def signal(self, name: str, life: str, number: signal.Signals) -> bool:
        """Send a signal to a process in the given life; False: that is over."""
        process = self._running.get(name)
        if process is None or process.poll() is not None or self.life(name) != life:
            return False
        process.send_signal(number)
        return True

    def exit_code(self, name: str) -> int | None:
        """With what a process has ended; None: it has not."""
        return self._running[name].poll()

    def terminate(self, names: Sequence[str]) -> None:
        """Ask processes to end."""
        for name in names:
            self._running[name].terminate()

    def said(self, name: str) -> str:
        """The end of what a process has written."""
        return (self._folder / f"{name}.log").read_text(errors="replace")[-1_500:]

    def close(self) -> None:
        """End whatever still runs."""
        for name in self._running:
            self.kill(name)

    def _command(self, name: str) -> list[str]:
        if name == CLIENT:
            return ["postroad.testing.chaos.client", str(self._seed)]
        program = "postroad.testing.chaos.program:post"
        return ["postroad", "run", program, "--poll", str(POLL_SECONDS), "--grace", str(GRACE_SECONDS)]
