"""The project's own Python files, parsed once."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
SRC = ROOT / "src" / "postroad"
TESTS = ROOT / "tests"


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def modules(*folders: Path) -> list[Path]:
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(SRC if path.is_relative_to(SRC) else ROOT).as_posix()


def imported_by(node: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    """The full name of each thing that this one statement imports; nothing when it is no import."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield node, alias.name
    elif isinstance(node, ast.ImportFrom) and node.module is not None:
        for alias in node.names:
            yield node, f"{node.module}.{alias.name}"


def imports(tree: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    """The same for every statement of a tree, those in functions too."""
    for node in ast.walk(tree):
        yield from imported_by(node)
