"""What a linter of the import graph can't say; the layers are import-linter's, in pyproject.toml."""

import ast
import sys
from collections.abc import Iterator

import pytest

from tests.style.sources import SRC, imported_by, imports, modules, name_of, parse

DATABASES = {"sqlalchemy", "psycopg", "sqlite3", "pysqlite3", "aiosqlite"}
SURFACES = {"typer", "rich", "click", "starlette", "fastapi", "uvicorn", "jinja2"}
LIBRARIES_KEPT_OUT = {
    "transports": DATABASES | SURFACES,
    "store": SURFACES | {"httpx"},
    "engine": SURFACES,
    "agent": SURFACES,
}


def top_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that run at import: not those in functions or under TYPE_CHECKING."""
    waiting = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting.extend(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
            waiting.extend(child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt))


def test_the_model_needs_only_msgspec() -> None:
    """The model uses the standard library and msgspec, no other library."""
    allowed = sys.stdlib_module_names | {"msgspec", "postroad"}
    found = [
        f"{name_of(path)}:{node.lineno}: {name}"
        for path in modules(SRC / "model")
        for node, name in imports(parse(path))
        if name.partition(".")[0] not in allowed
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("floor", LIBRARIES_KEPT_OUT)
def test_a_floor_is_kept_free_of_libraries(floor: str) -> None:
    """Transports know no database, and nothing below the surfaces knows a terminal or a web framework."""
    found = [
        f"{name_of(path)}:{node.lineno}: {name}"
        for path in modules(SRC / floor)
        for node, name in imports(parse(path))
        if name.partition(".")[0] in LIBRARIES_KEPT_OUT[floor]
    ]
    assert not found, "\n".join(found)


def test_testing_is_imported_lazily() -> None:
    """Outside postroad.testing nothing imports it at import time: only inside the functions that need it."""
    found = [
        f"{name_of(path)}:{node.lineno}: {name}"
        for path in modules(SRC)
        if not path.is_relative_to(SRC / "testing")
        for statement in top_level(parse(path))
        for node, name in imported_by(statement)
        if f"{name}.".startswith("postroad.testing.")
    ]
    assert not found, "\n".join(found)


def test_floors_do_not_import_the_package_s_own_surface() -> None:
    """The floors below the surfaces import from where a thing lives, never from `postroad` itself."""
    floors = [SRC / name for name in ("model", "store", "transports", "engine", "agent")]
    folders = {path.stem for path in SRC.iterdir()}
    found = [
        f"{name_of(path)}:{node.lineno}: {name}"
        for path in modules(*floors)
        for node, name in imports(parse(path))
        if name == "postroad" or (name.startswith("postroad.") and name.split(".")[1] not in folders)
    ]
    assert not found, "\n".join(found)
