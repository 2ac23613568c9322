"""Waiting until a file is written to: on Linux the kernel tells of it (inotify). It is a hint: who waits looks as well.

Two functions of the C library, and nothing is read of what they tell: any word means that there is something to see.
"""

import os
import select
import sys
from contextlib import suppress

_MODIFY = 0x2  # IN_MODIFY of <sys/inotify.h>
_READ_BYTES = 65_536


class FileWatch:
    """What the kernel tells of one file. `also` is a descriptor that ends a wait as well, once it can be read.

    Raises:
        OSError: The kernel does not watch this file, for this user, or in this place.
    """

    def __init__(self, path: str, also: int) -> None:
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = int(libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        if libc.inotify_add_watch(self._descriptor, os.fsencode(path), _MODIFY) < 0:
            error = ctypes.get_errno()
            self.close()
            raise OSError(error, "inotify_add_watch", path)
        self._poller = select.poll()
        for descriptor in (self._descriptor, also):
            self._poller.register(descriptor, select.POLLIN)

    def forget(self) -> None:
        """Forget what was told so far."""
        with suppress(BlockingIOError):  # nothing was
            os.read(self._descriptor, _READ_BYTES)

    def wait(self, seconds: float) -> bool:
        """Whether the file was written to since `forget` or the last wait, waiting for that at most so long."""
        ready = self._poller.poll(seconds * 1000)
        told = any(descriptor == self._descriptor for descriptor, _ in ready)
        if told:
            self.forget()
        return told

    def close(self) -> None:
        """Watch no longer."""
        os.close(self._descriptor)


def watched(path: str, also: int) -> FileWatch | None:
    """A watch of a file; None: there is none here."""
    if sys.platform != "linux":
        return None
    try:
        return FileWatch(path, also)
    except (OSError, AttributeError, ImportError):  # a kernel, a C library or an interpreter that was built without it
        return None
