"""What the type checkers say about programs that use Postroad."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WRONG = HERE / "wrong.py"
CORRECT = [HERE / "correct.py", ROOT / "examples/shop/shop.py", ROOT / "examples/freight/agent_in_90_lines.py"]
Check = Callable[..., list[tuple[int, str]]]


def run(*command: str) -> str:
    """A checker's output; it must have come to a verdict."""
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


def mypy(*paths: Path) -> list[tuple[int, str]]:
    """(line, what) of every error and note of mypy --strict."""
    said = re.findall(r"^.*?:(\d+): ((?:error|note): .*)$", run("mypy", "--strict", *map(str, paths)), re.MULTILINE)
    return [(int(line), what) for line, what in said]


def pyright(*paths: Path) -> list[tuple[int, str]]:
    """(line, what) of every error and note of pyright."""
    found = json.loads(run("pyright", "--outputjson", "--pythonpath", sys.executable, *map(str, paths)))
    return [
        (one["range"]["start"]["line"] + 1, f"{one['severity']}: {one['message']}")
        for one in found["generalDiagnostics"]
    ]


def marked(path: Path) -> list[int]:
    """The lines that are meant to be mistakes."""
    return [n for n, line in enumerate(path.read_text().splitlines(), 1) if re.search(r"# E\d", line)]


@pytest.mark.parametrize("check", [mypy, pyright])
def test_mistakes_are_errors(check: Check) -> None:
    """Every marked mistake is an error, nothing else is, and what is inferred is precise."""
    said = check(WRONG)
    assert [line for line, what in said if what.startswith("error")] == marked(WRONG)
    revealed = [what for _, what in said if not what.startswith("error")]
    assert len(revealed) == 2
    assert all(re.search(r'(Revealed type is|Type of .* is) "(builtins\.)?int"$', what) for what in revealed)


@pytest.mark.parametrize("check", [mypy, pyright])
def test_correct_programs_have_no_errors(check: Check) -> None:
    """Programs that use the public surface as it is meant type-check strictly."""
    assert check(*CORRECT) == []
