"""The chief's room, played as `make chief` does: real processes, one of which is killed."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples/chief"
ENTRY = re.compile(r"^ +(\d+)  (\S+) +(\S+) +(.*)$", re.MULTILINE)
RANG = "build 81 has failed\nthe key of the hall is missing\n"


@pytest.mark.acceptance
@pytest.mark.timeout(150)
def test_a_busy_room_gets_everything_once_and_in_order(tmp_path: Path) -> None:
    """What came during a turn stands behind its answer, once each; the pager rang once for what could not wait."""
    environment = {**os.environ, "POSTROAD_DATABASE_URL": "sqlite:///chief.db"}
    ran = subprocess.run(
        [sys.executable, str(EXAMPLE / "chief.py")],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "at two doors: answered [202]" in ran.stdout, ran.stdout
    assert "the worker is killed" in ran.stdout
    assert "once more: answered [200]" in ran.stdout
    assert (tmp_path / "rings.txt").read_text() == RANG
    entries = ENTRY.findall(ran.stdout.partition("in the room:")[2])
    assert [int(seq) for seq, *_ in entries] == list(range(1, len(entries) + 1))
    kinds = Counter(kind for _, kind, _, _ in entries)
    assert kinds["answer"] == 1
    reports = [key for _, kind, key, _ in entries if kind == "postroad.report"]
    assert len(reports) == len(set(reports))
    assert {"build:81", "follow-up:hall"} <= set(reports)
    assert any(key.startswith("backup:") for key in reports)
    keys = [key for _, _, key, _ in entries]
    answered = next(n for n, (_, kind, _, _) in enumerate(entries) if kind == "answer")
    assert answered < keys.index("build:81") < keys.index("follow-up:hall")
