"""The chaos itself: a short run passes and says what happened; a Postroad that is broken on purpose fails it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from postroad.testing.chaos.verdict import DATABASES, DISPATCHES_PER_MINUTE, KILLS_PER_MINUTE

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(240)]
SOURCE = Path(__file__).parent.parent.parent / "src"
DURATION = 8.0
SEED = 1
# What delivers a message forgets to write that into its history.
BREAKAGE = '''

_complete = record


def record(conn: Connection, transitions: Sequence[NewTransition], *, now: int) -> None:
    """Write rows of history, but for those of success."""
    _complete(conn, [each for each in transitions if each.reason_code != Reason.TRANSPORT_OK], now=now)
'''


def run(source: Path) -> "subprocess.CompletedProcess[str]":
    """Run the command on the code at `source`, on SQLite."""
    command = ["--duration", str(DURATION), "--seed", str(SEED), "--database", "sqlite", "--json"]
    return subprocess.run(
        [sys.executable, "-m", "postroad.testing.chaos", *command], env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip


def test_a_short_run_passes() -> None:
    """A run of a few seconds has enough kills and dispatches, breaks nothing, and says so as JSON."""
    done = run(SOURCE)
    assert done.returncode == 0, done.stdout + done.stderr
    said: dict[str, Any] = msgspec.json.decode(done.stdout)
    [one] = said["runs"]
    part = DURATION / 60 / DATABASES
    assert said["passed"]
    assert one["violations"] == []
    assert one["counts"]["kills"] >= KILLS_PER_MINUTE * part
    assert one["counts"]["dispatches"] >= DISPATCHES_PER_MINUTE * part


def test_a_broken_postroad_is_noticed(tmp_path: Path) -> None:
    """On code that forgets a part of its history the command fails, names the invariant and tells a row's story."""
    shutil.copytree(SOURCE, tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "src/postroad/store/transitions.py").open("a") as module:
        module.write(BREAKAGE)
    done = run(tmp_path / "src")
    assert done.returncode == 1, done.stdout + done.stderr
    said: dict[str, Any] = msgspec.json.decode(done.stdout)
    assert not said["passed"]
    [one] = said["runs"]
    assert [wrong for wrong in one["violations"] if wrong.startswith("O3 legal") and "its history says" in wrong]
    assert "-> delivering, dispatch.delivering.attempt" in one["stories"][0]
    shutil.rmtree(Path(one["folder"]).parent)
