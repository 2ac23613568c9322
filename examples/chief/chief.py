"""Half a minute in the room: a long turn, and everybody who has something to say meanwhile. One process is killed."""

import app  # noqa: I001  # before all others: it settles which SQLite this process uses

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from postroad import Entry
from postroad.agent.doors import Ring, ring_then_report

HERE = Path(__file__).parent
WORKER = (sys.executable, "-m", "postroad", "run", "app:post", "--grace", "2")
PATIENCE_SECONDS = 60.0
BEGAN = time.monotonic()


def say(text: str) -> None:
    """Tell whoever looks on."""
    print(f"{time.monotonic() - BEGAN:5.1f} s  {text}", flush=True)


@contextmanager
def process(*command: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A process of its own, for as long as the block lasts."""
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    started = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
    try:
        yield started
    finally:
        started.terminate()
        started.wait()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


async def knock(ports: list[int], times: int) -> list[int]:
    """Somebody who gives up and comes again, at two doors; what each call was answered."""
    notice = {"key": "build:81", "text": "build 81 has failed"}

    async with httpx.AsyncClient(timeout=30) as client:

        async def once(port: int) -> int:
            return (await client.post(f"http://127.0.0.1:{port}/notify", json=notice)).status_code

        return await asyncio.gather(*(once(ports[n % len(ports)]) for n in range(times)))


async def opened(ports: list[int]) -> None:
    """Wait until the doors are open."""
    for port in ports:
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                break


def landed() -> list[Entry]:
    """What stands in the room."""
    return list(app.post.read(app.ROOM))


async def until_it_has_landed(*keys: str) -> None:
    """Wait until reports with these keys, and the answer to the order, stand in the room."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not ({entry.kind for entry in landed()} >= {app.ANSWER.name} and {e.key for e in landed()} >= set(keys)):
        if time.monotonic() > end:
            raise SystemExit(f"{keys} never landed")
        await asyncio.sleep(0.2)


async def story(ports: list[int]) -> None:
    await opened(ports)
    with process(*WORKER) as first:
        async with app.post.begin() as tx:
            tx.publish(app.ROOM, app.ORDER, {"text": "book the hall"}, key="order/1")
        say("the room has an order, and is busy with it")
        await asyncio.sleep(2)
        answers = await knock(ports, 20)
        say(f"twenty notices of one failed build, at two doors: answered {sorted(set(answers))}")
        ring = Ring(kind=app.PAGE, body={"text": "the key of the hall is missing"})
        told = await ring_then_report(app.post, app.ROOM, ring.body, key="follow-up:hall", ring=ring)
        say(f"a follow-up that is blocked: the pager first; in the room {'already' if told.entry else 'later'}")
        first.kill()
        say("the worker is killed in the middle of its turn")
    with process(*WORKER):
        say("another one begins")
        await until_it_has_landed("build:81", "follow-up:hall")
        answers = await knock(ports, 1)
        say(f"the build's notice once more: answered {answers}")


def main() -> None:
    ports = [free_port(), free_port()]
    door = (sys.executable, str(HERE / "door.py"))
    with process(*door, str(ports[0])), process(*door, str(ports[1])):
        asyncio.run(story(ports))
    print("\nin the room:")
    for entry in landed():
        data = entry.data if isinstance(entry.data, dict) else {}
        text = data.get("text") or (data.get("data") or {}).get("text", "")
        print(f"  {entry.seq:2}  {entry.kind:20} {entry.key[:34]:34} {text}")
    print("\nthe pager rang:")
    for line in app.RINGS.read_text().splitlines():
        print(f"  {line}")
    app.post.close()


if __name__ == "__main__":
    main()
