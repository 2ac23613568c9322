"""The demo's processes: started, told to stop, killed on purpose, and never left behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

STOP_SECONDS = 8


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Have SIGINT and SIGTERM wait until the block is left. Only in the main thread."""
    waiting: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for each in handlers:
        signal.signal(each, lambda number, _frame: waiting.append(number))
    try:
        yield
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
        if waiting:
            signal.raise_signal(waiting[0])


class Processes:
    """Whatever was started in the block is ended when the block is left, each by its own id.

    Their output goes to one file each in `folder`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Processes":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with uninterrupted():
            for process in self._running.values():
                if process.poll() is None:
                    process.terminate()
            for name in list(self._running):
                self.stop(name)

    def start(self, name: str, *command: str, environment: Mapping[str, str] | None = None) -> int:
        """Start `python COMMAND…` under a name; its process id."""
        # An interrupt between a process's start and our note of it would leave it behind.
        with (self._folder / f"{name}.log").open("ab") as log, uninterrupted():
            # A session of its own: an interrupt typed at the demo reaches the demo alone, which ends these.
            self._running[name] = subprocess.Popen(
                [sys.executable, *command],
                env={**os.environ, **(environment or {})},
                stdin=subprocess.PIPE,
                stdout=log if name != "services" else subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        return self._running[name].pid

    def first_line(self, name: str) -> str:
        """The first line that a process prints; '' when it ended without one."""
        output = self._running[name].stdout
        return output.readline().decode().strip() if output is not None else ""

    def kill(self, name: str) -> int:
        """End a process as a crash would, and wait until it is gone; its id."""
        process = self._running.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait()
        _close(process)
        return process.pid

    def stop(self, name: str) -> bool:
        """Ask a process to stop and wait; False if it had to be killed. One that does not run is no error."""
        process = self._running.pop(name, None)
        if process is None:
            return True
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return False
        finally:
            _close(process)
        return True

    def ended(self) -> list[str]:
        """The names of processes that ended although nobody asked them to, with the end of what they said."""
        return [
            f"{name} ended with {process.returncode}: {self._said(name)}"
            for name, process in self._running.items()
            if process.poll() is not None
        ]

    def _said(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")[-2_000:]


def _close(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
