"""The processes of a run: started, killed, stopped and continued by their ids, and never left behind."""

import os
import signal
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from postroad.testing.chaos import down, faults, lives
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
OPTIONS = ("--poll", str(POLL_SECONDS), "--grace", str(GRACE_SECONDS))


class Crew:
    """Four processes that run the app, and one with its clients."""

    def __init__(self, folder: Path, *, url: str, socket: Path, seed: int) -> None:
        self._folder = folder
        self._seed = seed
        self._environment = {DATABASE_URL: url, SOCKET: str(socket), DOWN: str(folder / down.NAME)}
        self._running: dict[str, ForkServerProcess] = {}
        self._lives: dict[str, int] = dict.fromkeys(EVERYBODY, 0)
        self.begun: dict[str, int] = {}  # when the present lives began, in microseconds since 1970

    def life(self, name: str) -> str:
        """The name of a process's present life, or of its last one."""
        return f"{name}-{self._lives[name]}"

    def running(self) -> list[str]:
        """The names of those that run."""
        return [name for name, process in self._running.items() if process.is_alive()]

    def start(self, name: str, more: Mapping[str, str] | None = None) -> None:
        """Start a process, in a new life."""
        self._lives[name] += 1
        self.begun[name] = faults.now()
        seed = self._seed if name == CLIENT else None
        environment = {**self._environment, LIFE: self.life(name), **(more or {})}
        self._running[name] = lives.born(seed, OPTIONS, environment, self._folder / f"{name}.log")

    def kill(self, name: str) -> bool:
        """End a process as a crash would; False: it did not run."""
        process = self._running.get(name)
        if process is None or not process.is_alive():
            return False
        process.kill()
        process.join()
        return True

    def signal(self, name: str, life: str, number: signal.Signals) -> bool:
        """Send a signal to a process in the given life; False: that is over."""
        process = self._running.get(name)
        if process is None or process.pid is None or not process.is_alive() or self.life(name) != life:
            return False
        os.kill(process.pid, number)
        return True

    def exit_code(self, name: str) -> int | None:
        """With what a process has ended; None: it has not."""
        return self._running[name].exitcode

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
