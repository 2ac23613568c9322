"""Apps with real loops, and real processes, for the cases in which time or death is the point."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from postroad import Postroad
from postroad.store import moments

WAIT_SECONDS = 60.0
OpenApp = Callable[[], Postroad]


def until(condition: Callable[[], Any], what: str = "the condition") -> Any:
    """Look until the condition holds."""
    end = time.monotonic() + WAIT_SECONDS
    while not (found := condition()):
        assert time.monotonic() < end, f"never happened: {what}"
        time.sleep(0.01)
    return found


def idle(post: Postroad) -> bool:
    """Whether nothing waits any more."""
    return post.database.read(moments.waiting) == 0


@pytest.fixture
def open_app(place: dict[str, Any]) -> Iterator[OpenApp]:
    """A factory of apps on one database, as several processes would have them."""
    opened: list[Postroad] = []

    def factory() -> Postroad:
        opened.append(Postroad(place["database"], schema=place.get("schema"), migrate=True))
        return opened[-1]

    yield factory
    for post in opened:
        post.close()


class Processes:
    """`postroad run` processes of an app whose source is given; its `note` writes lines of JSON to a journal."""

    HEAD = """
import asyncio, json, os, time
from postroad import Postroad, Retry

def note(**what):
    descriptor = os.open("journal", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, json.dumps(what).encode() + b"\\n")
    os.close(descriptor)

post = Postroad()
"""

    def __init__(self, place: dict[str, Any], folder: Path) -> None:
        self._place = place
        self._folder = folder
        self._started: list[subprocess.Popen[bytes]] = []

    def write(self, source: str) -> None:
        """What the processes run."""
        (self._folder / "app.py").write_text(self.HEAD + source)

    def run(self, *options: str, database: str | None = None, **environ: str) -> "subprocess.Popen[bytes]":
        """Start one."""
        schema = [] if database or "schema" not in self._place else ["--schema", self._place["schema"]]
        command = [sys.executable, "-m", "postroad", "run", "app:post", "--poll", "0.05"]
        log = (self._folder / f"log{len(self._started)}").open("wb")
        with log:
            process = subprocess.Popen(
                [*command, "--database", database or self._place["database"], *schema, *options],
                cwd=self._folder, stdout=log, stderr=log,
                env={**os.environ, "POSTROAD_BUNDLED_SQLITE": "1", **environ},
            )  # fmt: skip
        self._started.append(process)
        return process

    def journal(self) -> list[dict[str, Any]]:
        """What the processes noted so far."""
        path = self._folder / "journal"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def said(self, number: int = 0) -> str:
        """What one of them wrote to its log."""
        return (self._folder / f"log{number}").read_text()

    def close(self) -> None:
        """End those that still run."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.fixture
def processes(place: dict[str, Any], tmp_path: Path) -> Iterator[Processes]:
    """Processes on the test's database."""
    made = Processes(place, tmp_path)
    yield made
    made.close()
