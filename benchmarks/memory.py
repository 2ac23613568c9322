"""Memory: what a dispatcher's process holds at its peak while it works at a large backlog, and at a small one."""

import asyncio
import resource
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

from benchmarks import seeds
from benchmarks.children import child
from benchmarks.figures import Figure, Plan, Progress, rounded
from benchmarks.ours import MAIL, carry_out
from benchmarks.places import Kind, Place
from postroad import Postroad

NAME = "memory"
MEGABYTE = 1_000_000


def measure(kind: Kind, ours: Place, limit: Place, plan: Plan, progress: Progress) -> Iterator[Figure]:
    """Megabytes at many pending dispatches, against few."""
    found = []
    for count in (plan.few, plan.many):
        progress(f"{kind}: memory, {count:,} pending")
        ours.clear()
        seeds.pending(ours, count)
        with child(_dispatch, ours) as dispatcher:
            time.sleep(plan.memory_seconds)
            found.append(rounded(float(dispatcher.ask())))
    small, large = found
    case = f"dispatcher, {plan.many:,} pending against {plan.few:,}"
    yield Figure(work=NAME, database=kind, case=case, unit="MB", ours=large, against=small)


def _dispatch(url: str, schema: str | None, pipe: Pipe) -> None:
    """A dispatcher that answers with the most memory it has held, in megabytes."""
    post = Postroad(url, schema=schema)
    post.sender(MAIL)(carry_out)
    try:
        asyncio.run(_run(post, pipe))
    finally:
        post.close()


async def _run(post: Postroad, pipe: Pipe) -> None:
    stop = asyncio.Event()
    running = asyncio.ensure_future(post.runtime(only=("sends",)).run(stop))
    pipe.send("ready")
    await asyncio.to_thread(pipe.recv)
    stop.set()
    await running
    pipe.send(_peak_bytes() / MEGABYTE)


def _peak_bytes() -> int:
    """The most memory that this process has held.

    On Linux not as `getrusage` says it: that would be its parent's, if it held more when it started us.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (peak,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(peak) * 1024
