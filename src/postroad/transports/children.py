"""Child processes: started without a shell in a session of their own, drained, bounded, and ended as a group.

The pipes and the end are watched by us and not by asyncio's own subprocesses, whose `wait` hangs for as long as a
grandchild holds one of the pipes (CPython issue 119710).
"""

import asyncio
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

CHUNK_BYTES = 64 * 1024
HEAD_BYTES = 4 * 1024
TAIL_BYTES = 16 * 1024
# How long pipes that a grandchild holds are read after the child's end.
LINGER_SECONDS = 0.2
_POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a child ended.

    Attributes:
        code: Its exit code; below 0 the signal that killed it; None if nobody can tell any more, because something
            else in this process waits for all children or ignores their ends.
        stdout: The beginning and the end of what it said.
        stderr: The same of its complaints.
        unread: It has not read all of its stdin.
    """

    code: int | None
    stdout: bytes
    stderr: bytes
    unread: bool


async def run(arguments: Sequence[bytes], *, stdin: bytes, env: Mapping[str, str], cwd: str) -> Ended:
    """Run a program, and leave nothing of its process group behind, also if this is cancelled.

    A grandchild in a session of its own escapes. What the child says beyond a few KiB is read and dropped.

    Raises:
        OSError: The program could not be started.
    """
    told = _Written(stdin)
    # Leaving the block waits without the loop: only a second cancellation, while the killed child is awaited, comes
    # to that.
    with _started(arguments, told, env, cwd) as process:
        pipes = said, complained, _ = _Read(process.stdout), _Read(process.stderr), told
        try:
            await _end_of(process)
            await asyncio.wait({said.over, complained.over}, timeout=LINGER_SECONDS)
        finally:
            # Before it is reaped: until then its number, which is the group's, can be no other's.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            for each in pipes:
                each.close()
            await _end_of(process)
            code = _reap(process)
        return Ended(code=code, stdout=said.kept(), stderr=complained.kept(), unread=told.left > 0)


def _started(
    arguments: Sequence[bytes], told: "_Written", env: Mapping[str, str], cwd: str
) -> "subprocess.Popen[bytes]":
    """The child: a vfork that ends with the exec, whose errors are raised here."""
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(
            arguments, stdin=told.other, stdout=pipe, stderr=pipe, env=env, cwd=cwd, umask=0o077, start_new_session=True
        )
    except BaseException:
        told.close()
        raise
    finally:
        told.other.close()


async def _end_of(process: "subprocess.Popen[bytes]") -> None:
    """Wait until a child has ended, without a thread: through a descriptor of it where the system has such."""
    if _has_ended(process):
        return
    try:
        descriptor = os.pidfd_open(process.pid)
    except (AttributeError, OSError):
        while not _has_ended(process):  # noqa: ASYNC110  # there is nothing to wait on
            await asyncio.sleep(_POLL_SECONDS)
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _has_ended(process: "subprocess.Popen[bytes]") -> bool:
    """Whether a child has ended; it is not reaped by this."""
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # and was reaped by somebody
        return True
    except AttributeError:  # macOS before Python 3.13
        return process.poll() is not None


def _reap(process: "subprocess.Popen[bytes]") -> int | None:
    """The exit code of a child that has ended, or None if somebody else was told it: `Popen` takes that for a 0."""
    with suppress(AttributeError):  # macOS before Python 3.13
        try:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            return None
    return process.wait()


class _Pipe:
    """Our end of a pipe, and `over`, which is set once it is closed."""

    def __init__(self, file: IO[bytes] | None) -> None:
        assert file is not None
        os.set_blocking(file.fileno(), False)
        self.loop = asyncio.get_running_loop()
        self.file = file
        self.over: asyncio.Future[Any] = self.loop.create_future()

    def close(self) -> None:
        if not self.over.done():
            self.loop.remove_reader(self.file)
            self.loop.remove_writer(self.file)
            self.file.close()
            self.over.set_result(None)


class _Read(_Pipe):
    """Is read to its end; the beginning and the end of it are kept."""

    def __init__(self, file: IO[bytes] | None) -> None:
        super().__init__(file)
        self._head = bytearray()
        self._tail = bytearray()
        self._dropped = False
        self.loop.add_reader(self.file, self._read)

    def _read(self) -> None:
        try:
            data = os.read(self.file.fileno(), CHUNK_BYTES)
        except BlockingIOError:
            return
        if data:
            self._keep(data)
        else:
            self.close()

    def _keep(self, data: bytes) -> None:
        room = HEAD_BYTES - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > TAIL_BYTES:
            self._dropped = True
            del self._tail[:-TAIL_BYTES]

    def kept(self) -> bytes:
        """What is kept, with a mark where something was dropped."""
        return bytes(self._head) + (b"\n...\n" if self._dropped else b"") + bytes(self._tail)


class _Written(_Pipe):
    """Is written to as it takes it, then closed; `left` says how many bytes nobody took.

    What fits into the pipe is in it before there is a child: whether a short text counts as taken is no race.
    """

    def __init__(self, data: bytes) -> None:
        other, ours = os.pipe()
        self.other = os.fdopen(other, "rb", buffering=0)  # the child's end
        super().__init__(os.fdopen(ours, "wb", buffering=0))
        self._data = memoryview(data)
        self._write()
        if not self.over.done():
            self.loop.add_writer(self.file, self._write)

    @property
    def left(self) -> int:
        return len(self._data)

    def _write(self) -> None:
        try:
            self._data = self._data[os.write(self.file.fileno(), self._data[:CHUNK_BYTES]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # nobody reads any more; what that means, the exit code says
            self.close()
        if not self._data:
            self.close()
