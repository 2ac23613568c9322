"""The worker: a process of its own that runs the turns, begun again whenever it has ended."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

PAUSE_SECONDS = 2.0  # long enough to be seen
# `postroad run` is what you would give to systemd or Kubernetes; --grace: how long it may finish what is under way.
COMMAND = (sys.executable, "-m", "postroad", "run", "app:post", "--grace", "2")


class Worker:
    """Keeps one worker process running. If this process is killed, that one goes on, and does no harm: several may."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """The worker's process id; None while there is none."""
        return None if self._process is None else self._process.pid

    def kill(self) -> None:
        """SIGKILL: it can finish nothing and tell nobody."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep it running while the block lasts."""
        keeping = asyncio.create_task(self._keep())
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.wait({keeping})

    async def _keep(self) -> None:
        while True:
            await self._run()
            await asyncio.sleep(PAUSE_SECONDS)

    async def _run(self) -> None:
        paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        # In a session of its own: Ctrl-C is for the server, which then ends the worker in its own time.
        self._process = process = await asyncio.create_subprocess_exec(
            *COMMAND, env=environment, start_new_session=True
        )
        try:
            await process.wait()
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()
            self._process = None
