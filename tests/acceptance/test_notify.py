"""The notifying example, run as it is, and its operator's session."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples/notify"
README = (EXAMPLE / "README.md").read_text("utf-8")


def command(*words: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    environment = {
        **os.environ,
        "POSTROAD_DATABASE_URL": "sqlite:///notify.db",
        "POSTROAD_BUNDLED_SQLITE": "1",
    }
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.acceptance
def test_the_example_and_its_operators_session(tmp_path: Path) -> None:
    """It prints what its README shows, and each command of the session does what is said of it."""
    ran = command(sys.executable, str(EXAMPLE / "notify.py"), folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    shown = re.search(r"```\n(backup.*?)```", README, re.DOTALL)
    assert shown is not None
    assert ran.stdout.startswith(shown[1])
    said = (tmp_path / "said.txt").read_text()
    assert sorted(said.splitlines()) == [
        "--help: --not an option (attempt 1, key odd/1)",
        "ops: the backup is done (attempt 1, key backup/2026-11-30)",
    ]
    session = re.findall(r"^\$ postroad (.*)$", README, re.MULTILINE)
    answers = [command(sys.executable, "-m", "postroad", *shlex.split(line), folder=tmp_path) for line in session]
    assert [answer.returncode for answer in answers] == [0] * (len(answers) - 1) + [1], [a.stderr for a in answers]
    assert "order/8/paid" in answers[0].stdout
    assert "max_attempts" in answers[1].stdout
    assert "attempt 2" in answers[2].stdout
    tokens = [answer.stdout for answer in answers if "whsec_" in answer.stdout or "everybody knows" in answer.stdout]
    assert tokens == []
