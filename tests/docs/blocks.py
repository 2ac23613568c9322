"""The code blocks of a page: which are run, and how.

A page's blocks run in a folder of the page's own, in order of what they need:

    ```python name.py   saved under that name
    ```python           one program together, run after the page's commands
    ```console          commands after `$ `, each followed by what it prints; `...` stands for anything

Other languages are shown, not run.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# The wheel's SQLite, so that no page's output depends on the one that Python came with.
_RUN = (
    "import sys, runpy, postroad.bundled_sqlite; sys.argv = sys.argv[1:]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    language: str
    name: str
    text: str
    line: int


@dataclass(frozen=True, slots=True)
class Command:
    """A line of a console block and what it must print; nothing expected: any output will do."""

    line: str
    expected: str


def pages() -> list[Path]:
    """Every page whose blocks are run."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """A page's blocks in order."""
    text = page.read_text("utf-8")
    return [Block(m[1], m[2] or "", m[3], text.count("\n", 0, m.start()) + 2) for m in _BLOCK.finditer(text)]


def commands(block: Block) -> list[Command]:
    """The commands of a console block."""
    found = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block.text, re.MULTILINE)
    return [Command(line, expected) for line, expected in found]


def program(page: Path) -> str:
    """The unnamed python blocks of a page as one program, each at its own line."""
    lines: list[str] = []
    for block in blocks(page):
        if block.language == "python" and not block.name:
            lines += [""] * (block.line - 1 - len(lines)) + block.text.splitlines()
    return "\n".join(lines) + "\n" if lines else ""


def save(page: Path, folder: Path) -> None:
    """Write the named blocks of a page into a folder."""
    for block in blocks(page):
        if block.name:
            (folder / block.name).write_text(block.text, "utf-8")


def run(arguments: list[str], folder: Path, page: Path) -> str:
    """What a command prints; it must succeed."""
    environment = {name: value for name, value in os.environ.items() if "DATABASE_URL" not in name}
    done = subprocess.run(
        arguments, cwd=folder, capture_output=True, text=True, timeout=60, check=False,
        env={**environment, "POSTROAD_BUNDLED_SQLITE": "1", "COLUMNS": "160"},
    )  # fmt: skip
    assert done.returncode == 0, f"{page}: {shlex.join(arguments)[-200:]}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_python(path: str, arguments: list[str], folder: Path, page: Path) -> str:
    """What a program in the folder prints."""
    return run([sys.executable, "-c", _RUN, path, *arguments], folder, page)


def run_until_ended(arguments: list[str], folder: Path) -> str:
    """What `postroad run` says from its start to its end by SIGTERM, which must be in order."""
    with subprocess.Popen(
        [sys.executable, "-m", "postroad.surfaces.cli", *arguments], cwd=folder, text=True, stderr=subprocess.PIPE,
        env={**os.environ, "POSTROAD_BUNDLED_SQLITE": "1"},
    ) as process:  # fmt: skip
        assert process.stderr is not None
        begun = process.stderr.readline()
        process.terminate()
        said = begun + process.stderr.read()
    assert process.returncode == 0, said
    return said


def run_command(command: Command, folder: Path, page: Path) -> None:
    """Run a command of a page, or, for one that installs or builds, see that there is such a thing."""
    name, *arguments = shlex.split(command.line)
    match name:
        case "python":
            printed = run_python(arguments[0], arguments[1:], folder, page)
        case "postroad" if arguments[0] == "run" and "--once" not in arguments:
            printed = run_until_ended(arguments, folder)
        case "postroad":
            printed = run([sys.executable, "-m", "postroad.surfaces.cli", *arguments], folder, page)
        case "make":
            targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert arguments[0] in targets, command.line
            return
        case "pip":
            check_requirement(arguments[-1])
            return
        case _:
            raise AssertionError(f"{page}: nobody knows how to run {command.line!r}")
    assert not command.expected or re.fullmatch(pattern(command.expected), printed), (
        f"{page}: {command.line}\nexpected:\n{command.expected}\nprinted:\n{printed}"
    )


def check_requirement(requirement: str) -> None:
    """See that what is installed is this project, with an extra that it has."""
    found = re.fullmatch(r"postroad(?:\[(\w+)\])?", requirement)
    assert found is not None, requirement
    if found[1]:
        assert re.search(rf"^{found[1]} = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


def pattern(expected: str) -> str:
    """What the output must look like: blanks at the ends of lines don't count, `...` is anything."""
    lines = [r".*?".join(map(re.escape, re.split(r"\.\.\.", line.rstrip()))) for line in expected.strip().splitlines()]
    return r"(?s)\s*" + r"[ ]*\n".join(lines) + r"\s*"


def links(page: Path) -> Iterator[tuple[str, str]]:
    """(text, target) of every link of a page to a file of this repository."""
    for text, target in re.findall(r"\[([^\]]+)\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text("utf-8")):
        if "://" not in target:
            yield text, target
