"""Postroad in several versions side by side: a wheel of each, installed into an environment of its own.

Version N is an earlier commit's tree, or this one where there is no history to take it from. Version N + 1 is this
tree with one more step on its ladder. What they depend on comes from the environment that runs the tests.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

from postroad.store import migrations

ROOT = Path(__file__).parent.parent.parent
EARLIER = "fccaf56"
NEXT = migrations.latest + 1
BUILT_FROM = ("src", "pyproject.toml", "README.md", "LICENSE")
LADDER = "src/postroad/store/migrations"
SECONDS = 60.0
MORE = """
ALTER TABLE {p}outbox ADD COLUMN note TEXT;
CREATE INDEX postroad_outbox_note ON {p}outbox (note) WHERE note IS NOT NULL;
CREATE TABLE {p}notes (
    id TEXT NOT NULL PRIMARY KEY,
    text TEXT NOT NULL
);
"""


class Code:
    """One version, installed in `folder`; `name` is how its processes know who they are."""

    def __init__(self, name: str, tree: Path, folder: Path) -> None:
        self.name = name
        self._python = folder / "venv" / "bin" / "python"
        venv.create(folder / "venv", with_pip=False)
        _pip("wheel", "--no-deps", *_isolation(), "--wheel-dir", str(folder), str(tree))
        [wheel] = folder.glob("*.whl")
        _pip("--python", str(self._python), "install", "--no-deps", "--no-index", str(wheel))
        packages = next((folder / "venv" / "lib").glob("python*/site-packages"))
        # Beside its own packages: of two with one name its own come first.
        (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def call(self, *arguments: str, at: "Place") -> subprocess.CompletedProcess[str]:
        """Run `python ARGUMENTS…` to its end."""
        return subprocess.run(
            [str(self._python), *arguments], cwd=at.folder, env=self.environment(at), capture_output=True, text=True,
            timeout=SECONDS,
        )  # fmt: skip

    def postroad(self, command: str, *arguments: str, at: "Place") -> subprocess.CompletedProcess[str]:
        """Run a command of its command line to its end."""
        return self.call("-m", "postroad", command, *arguments, *at.options, at=at)

    @contextmanager
    def running(self, at: "Place") -> Iterator["subprocess.Popen[bytes]"]:
        """Run the app's loops while the block lasts; they end as an operator ends them, without a fault."""
        command = [str(self._python), "-m", "postroad", "run", "app:post", "--poll", "0.1", *at.options]
        with (at.folder / f"{self.name}.log").open("ab") as log:
            process = subprocess.Popen(command, cwd=at.folder, env=self.environment(at), stdout=log, stderr=log)
        try:
            yield process
            process.terminate()
            assert process.wait(SECONDS) == 0, at.said()
        finally:
            process.kill()
            process.wait()

    def environment(self, at: "Place") -> dict[str, str]:
        """What its processes are told: who they are, where the database is, which SQLite they use."""
        own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        bundled = os.environ.get("POSTROAD_TEST_SQLITE", "bundled") == "bundled"
        return {**own, "CODE": self.name, "POSTROAD_BUNDLED_SQLITE": str(int(bundled)), **at.environment}


class Place:
    """A database, and a folder with the program that all versions run on it."""

    def __init__(self, folder: Path, url: str, schema: str | None) -> None:
        self.folder = folder
        self.url = url
        self.schema = schema
        self.options = ["--database", url, *(["--schema", schema] if schema else [])]
        self.environment = {"POSTROAD_DATABASE_URL": url, **({"POSTROAD_SCHEMA": schema} if schema else {})}

    def said(self) -> str:
        """What the processes have written."""
        return "\n".join(f"{log.name}: {log.read_text()[-2_000:]}" for log in self.folder.glob("*.log"))


def copy_of_this_tree(folder: Path) -> Path:
    """What a wheel is built from, as it stands now."""
    for name in BUILT_FROM:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    return folder


def earlier_tree(folder: Path) -> Path:
    """The tree of an earlier commit with the same ladder; this one where there is no such commit."""
    archived = subprocess.run(
        ["git", "archive", "--format=tar", EARLIER, *BUILT_FROM], cwd=ROOT, capture_output=True, timeout=SECONDS
    )
    if archived.returncode:
        return copy_of_this_tree(folder)
    with tarfile.open(fileobj=BytesIO(archived.stdout)) as tar:
        tar.extractall(folder, filter="data")
    if _steps(folder) == _steps(ROOT):
        return folder
    # Before the first release the first step may still change; no database has both.
    shutil.rmtree(folder)
    folder.mkdir()
    return copy_of_this_tree(folder)


def next_tree(folder: Path, *, oldest_code: int) -> Path:
    """This tree with one more step, on which code may run that was written for `oldest_code` or later."""
    ladder = copy_of_this_tree(folder) / LADDER
    for dialect in ("sqlite", "postgresql"):
        (ladder / f"{NEXT:04}_notes.{dialect}.sql").write_text(MORE)
    with (ladder / "steps.py").open("a") as steps:
        steps.write(f'STEPS = (*STEPS, Step(version={NEXT}, name="notes", oldest_code={oldest_code}))\n')
    return folder


def _steps(tree: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in (tree / LADDER).glob("*.sql")}


def _isolation() -> list[str]:
    """Build with the build backend of this environment where it has one; else with one that pip fetches."""
    return ["--no-build-isolation"] if importlib.util.find_spec("hatchling") else []


def _pip(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments],
        capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
