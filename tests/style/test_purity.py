"""Time and entropy are arguments: the lower floors read no clock, draw no randomness and don't sleep."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.style.sources import SRC, modules, name_of, parse

FLOORS = [SRC / "model", SRC / "store", SRC / "engine"]

# The single places where the real clock and the real entropy live.
ALLOWED = {
    "model/clock.py": "the system's clock, behind the Clock that is passed in",
    "model/entropy.py": "the system's entropy, behind the source that is passed in",
}

# Waiting on a signal (threading.Event, Condition, asyncio.wait_for) is not here: it is how the engine waits.
# random.Random is a type to pass in; without a seed it is entropy (see `unseeded`).
FORBIDDEN = re.compile(
    r"""
      time\.(time|monotonic|perf_counter|process_time|thread_time)(_ns)?
    | time\.(sleep|localtime|gmtime|ctime)
    | datetime\.datetime\.(now|utcnow|today)
    | datetime\.date\.today
    | uuid\.(uuid1|uuid4|uuid6|uuid7|uuid8|getnode)
    | random\.(?!Random$)\w+
    | secrets\.\w+
    | os\.(urandom|getrandom)
    | asyncio\.sleep
    | (anyio|trio)\.sleep\w*
    """,
    re.VERBOSE,
)


def local_names(tree: ast.AST) -> dict[str, str]:
    """What each imported name stands for: `from time import monotonic as m` gives m: time.monotonic."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.partition(".")[0]
                names[alias.asname or root] = alias.name if alias.asname else root
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def dotted(node: ast.AST, names: dict[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value, names)
        return owner and f"{owner}.{node.attr}"
    return None


def unseeded(node: ast.AST, names: dict[str, str]) -> bool:
    return isinstance(node, ast.Call) and not node.args and dotted(node.func, names) == "random.Random"


def impurities(tree: ast.AST) -> Iterator[tuple[int, str]]:
    names = local_names(tree)
    for node in ast.walk(tree):
        used = dotted(node, names)
        if used is not None and FORBIDDEN.fullmatch(used):
            yield node.lineno, used
        elif unseeded(node, names):
            yield node.lineno, "random.Random() without a seed"


def test_no_clock_no_entropy_no_sleep() -> None:
    """Nothing in model, store and engine uses a wall clock, entropy or sleep, but for the allowed files."""
    found = [
        f"src/postroad/{name_of(path)}:{line}: {used}"
        for path in modules(*FLOORS)
        if name_of(path) not in ALLOWED
        for line, used in impurities(parse(path))
    ]
    assert not found, "pass in a clock, a source of entropy or a way to wait:\n" + "\n".join(found)


@pytest.mark.parametrize("name", ALLOWED)
def test_an_allowed_file_needs_its_allowance(name: str) -> None:
    """A file that no longer touches a clock or entropy leaves the list."""
    path = SRC / name
    assert not path.exists() or any(impurities(parse(path))), f"{name} is pure: take it off ALLOWED"


@pytest.mark.parametrize(
    "source",
    [
        "import time\ntime.time()",
        "from time import monotonic_ns as tick\ntick()",
        "from datetime import datetime, UTC\ndatetime.now(UTC)",
        "import datetime as dt\ndt.datetime.now(dt.UTC)",
        "import time\ndef wait(*, clock=time.time): ...",
        "from uuid import uuid4\nuuid4().hex",
        "import random\nrandom.uniform(0, 1)",
        "import random\nrandom.Random()",
        "from secrets import token_hex\ntoken_hex()",
        "import os\nos.urandom(8)",
        "import asyncio\nasync def f(): await asyncio.sleep(1)",
    ],
)
def test_the_walk_finds(source: str) -> None:
    """Each way to reach a clock, entropy or sleep is found, aliases and defaults too."""
    assert list(impurities(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "import random\ndef jitter(rng: random.Random) -> float: return rng.random()",
        "import random\nrandom.Random(7)",
        "import threading\nthreading.Event().wait(1)",
        "from datetime import datetime, UTC\ndatetime.fromtimestamp(0, UTC)",
        "from uuid import UUID, uuid5\nuuid5(UUID(int=0), 'a')",
        "def now(time): return time.time",
    ],
)
def test_the_walk_leaves_alone(source: str) -> None:
    """Waiting on a signal, seeded sources, and names that only look alike are left alone."""
    assert not list(impurities(ast.parse(source)))


def test_every_floor_is_looked_at() -> None:
    """A floor that moved is noticed: each folder that is walked exists, or the package is still empty."""
    missing = [folder.name for folder in FLOORS if not folder.is_dir()]
    assert len(modules(SRC)) < 10 or not missing, f"no such floor: {missing}"


def test_paths_are_named_from_the_package() -> None:
    """ALLOWED's keys have the form that `name_of` gives."""
    assert name_of(SRC / Path("model/clock.py")) in ALLOWED
