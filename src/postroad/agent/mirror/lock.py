"""One process writes a folder of a mirror at a time: the kernel's lock on a file in it, which ends with the process."""

import fcntl
import os
import socket
from pathlib import Path

NAME = ".lock"
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_HOLDER_BYTES_MAX = 300


class FolderLock:
    """The lock of one folder. Not for several threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / NAME
        self._descriptor: int | None = None

    def take(self) -> bool:
        """Make the folder if there is none, and take its lock unless somebody has it.

        Raises:
            OSError: The folder cannot be made or written to.
        """
        self.release()
        os.makedirs(self._folder.parent, mode=0o700, exist_ok=True)
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        descriptor = os.open(self._path, _FLAGS, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        except BlockingIOError:
            os.close(descriptor)
            return False
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        return self.held()

    def held(self) -> bool:
        """Whether the lock is ours, and the folder still the one that was locked."""
        if self._descriptor is None:
            return False
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(self._descriptor))

    def holder(self) -> str:
        """Who has it, as far as the file says."""
        try:
            with self._path.open("rb") as file:
                said = file.read(_HOLDER_BYTES_MAX).decode("utf-8", "replace").strip()
        except OSError:
            said = ""
        return said or "another process"

    def release(self) -> None:
        """Let go of it, if it is ours."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
