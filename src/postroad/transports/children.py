"""Child processes: started without a shell in a session of their own, drained, bounded, and ended as a group.

The pipes are connected by us and not by asyncio's own subprocesses, whose `wait` may hang for as long as a grandchild
holds one of them (CPython issue 119710).
"""

import asyncio
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

HEAD_BYTES = 4 * 1024
TAIL_BYTES = 16 * 1024
# How long pipes that a grandchild holds are read after the child's end.
LINGER_SECONDS = 0.2
_POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child ended (below 0: by that signal), and the beginning and end of what it has said."""

    code: int
    stdout: bytes
    stderr: bytes


async def run(arguments: Sequence[str], *, stdin: bytes, env: Mapping[str, str], cwd: str) -> Ended:
    """Run a program, and leave nothing of its process group behind, also if this is cancelled.

    A grandchild in a session of its own escapes. What the child says beyond a few KiB is read and dropped.

    Raises:
        OSError, ValueError: The program could not be started.
    """
    process = subprocess.Popen(  # noqa: ASYNC220  # a vfork, and its errors are raised here
        arguments,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=env,
        cwd=cwd,
        umask=0o077,
        start_new_session=True,
    )
    loop = asyncio.get_running_loop()
    pipes = (process.stdout, process.stderr, process.stdin)
    said, complained, told = _Kept(), _Kept(), _Pipe()
    transports: list[Any] = []
    try:
        transports.append((await loop.connect_read_pipe(lambda: said, process.stdout))[0])
        transports.append((await loop.connect_read_pipe(lambda: complained, process.stderr))[0])
        writing, _ = await loop.connect_write_pipe(lambda: told, process.stdin)
        transports.append(writing)
        writing.write(stdin)
        writing.close()  # once all is written, or nobody reads any more
        code = await _exit_of(process)
        await asyncio.wait({said.over, complained.over}, timeout=LINGER_SECONDS)
        return Ended(code, said.text(), complained.text())
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        for transport, pipe in zip(transports, (said, complained, told), strict=False):
            if not pipe.over.done():
                transport.abort() if pipe is told else transport.close()
        for file in pipes[len(transports) :]:
            cast(Any, file).close()
        await _exit_of(process)


async def _exit_of(process: "subprocess.Popen[bytes]") -> int:
    """Wait for a child's end, without a thread: through a descriptor of it where the system has such."""
    code = process.poll()
    if code is not None:
        return code
    try:
        descriptor = os.pidfd_open(process.pid)
    except (AttributeError, OSError):
        while process.poll() is None:  # noqa: ASYNC110  # there is nothing to wait on
            await asyncio.sleep(_POLL_SECONDS)
        return process.returncode
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    return process.wait()


class _Pipe(asyncio.Protocol):
    """Knows when its pipe is closed."""

    def __init__(self) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.over.done():
            self.over.set_result(None)


class _Kept(_Pipe):
    """Reads to the end and keeps the beginning and the end of it."""

    def __init__(self) -> None:
        super().__init__()
        self._head = bytearray()
        self._tail = bytearray()
        self._dropped = False

    def data_received(self, data: bytes) -> None:
        room = HEAD_BYTES - len(self._head)
        self._head += data[:room]
        self._tail += data[room:][-TAIL_BYTES:] if room < len(data) else b""
        if len(self._tail) > TAIL_BYTES:
            self._dropped = True
            del self._tail[:-TAIL_BYTES]

    def text(self) -> bytes:
        return bytes(self._head) + (b"\n...\n" if self._dropped else b"") + bytes(self._tail)
