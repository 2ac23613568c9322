"""What an operator's terminal and process list never show, and what text from outside never does there."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from postroad import Dispatch, GiveUp, Kind, Postroad, Retry
from postroad.surfaces import cli

ANY: Kind[Any] = Kind("any", Any)
SECRET = "p@ss%w0rd-c4nary"
QUOTED = "p%40ss%25w0rd-c4nary"
VECTORS = [
    "<img src=x onerror=alert(1)>", "</script><script>alert(1)</script>", "javascript:alert(1)", "{{7*7}}${7*7}",
    "<svg onload=alert(1)>", "[red]not markup[/red]", "\x1b]0;title\x07", "a\rb", "\u2028next", "\u202etxt.exe",
]  # fmt: skip
COMMANDS = [
    ("status",), ("migrate", "verify"), ("stream", "show", "a/b"), ("dispatch", "ls"), ("dispatch", "show", "k"),
    ("dispatch", "why", "k"), ("dispatch", "retry", "k"), ("dispatch", "replay", "k"),
    ("dispatch", "resolve", "k", "--sent"), ("dispatch", "withdraw", "k"), ("dispatch", "purge", "k"),
]  # fmt: skip


def call(*arguments: str, folder: Path, **environ: str) -> "subprocess.CompletedProcess[str]":
    """A command as a process, without any database configured but by `environ`."""
    clean = {name: value for name, value in os.environ.items() if "DATABASE_URL" not in name}
    return subprocess.run(
        [sys.executable, "-m", "postroad", *arguments], capture_output=True, check=False, timeout=60, text=True,
        cwd=folder, env={**clean, "POSTROAD_BUNDLED_SQLITE": "1", **environ},
    )  # fmt: skip


@pytest.mark.parametrize("vector", VECTORS)
def test_text_from_outside_is_inert(vector: str, place: dict[str, Any]) -> None:
    """Streams, destinations, keys, payloads and errors are shown as text, character by character, and act nowhere."""
    post = Postroad(**place, migrate=True)

    @post.sender(ANY, retry=Retry(attempts=1))
    def fail(d: Dispatch[Any]) -> None:
        raise GiveUp(vector)

    post.alert_sink(lambda alert: None)
    with post.begin() as tx:
        tx.send(ANY, {vector: vector}, to=vector, key=f"k/{vector}", origin={vector: vector})
    post.drain()
    post.close()
    options = ["--database", place["database"], *(["--schema", place["schema"]] if "schema" in place else [])]
    for command in (("ls",), ("show", f"k/{vector}"), ("why", f"k/{vector}"), ("retry", "--kind", "any", "--dry-run")):
        done = CliRunner().invoke(cli.app, ["dispatch", *command, *options])
        assert done.exit_code == 0, done.output
        assert not set(done.stdout) & set("\x1b\x07\r\u2028\u202e"), command
        if vector.isprintable():
            assert vector in done.stdout, command
    shown = CliRunner().invoke(cli.app, ["dispatch", "show", f"k/{vector}", "--json", *options])
    answer = json.loads(shown.stdout)["data"]
    assert (answer["to"], json.loads(answer["body"])) == (vector, {vector: vector})
    assert vector in answer["last_error"]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_password_is_shown_nowhere(command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A URL's password is in no output of any command, whether the server is away or the URL is wrong."""
    away = f"postgresql://me:{QUOTED}@/shop?host={tmp_path}"
    for url in (away, f"postgresql://me:{QUOTED}@/shop?sslkey={QUOTED}&a=b"):
        monkeypatch.setenv("POSTROAD_DATABASE_URL", url)
        for more in ((), ("--json",)):
            done = CliRunner().invoke(cli.app, [*command, *more])
            assert done.exit_code in (1, 2)
            assert SECRET not in done.output
            assert QUOTED not in done.output
            assert "Traceback" not in done.output
            if url == away:
                assert f"me:***@/shop?host={tmp_path}" in done.output


@pytest.mark.parametrize("command", [("status",), ("dispatch", "ls"), ("dispatch", "retry", "k")], ids=" ".join)
def test_a_password_on_the_command_line_is_warned_of(command: tuple[str, ...], tmp_path: Path) -> None:
    """A password in an argument is told to be seen by others, with the way that is not; elsewhere nothing is said."""
    url = f"postgresql://me:{QUOTED}@/shop?host={tmp_path}"
    warned = call(*command, "--database", url, folder=tmp_path)
    assert "POSTROAD_DATABASE_URL or postroad.toml" in warned.stderr
    assert warned.stdout == ""
    assert "postroad.toml" not in call(*command, folder=tmp_path, POSTROAD_DATABASE_URL=url).stderr
    without = f"postgresql://me@/shop?host={tmp_path}"
    assert "postroad.toml" not in call(*command, "--database", without, folder=tmp_path).stderr


def test_a_running_process_is_warned_of_too(postgres_url: str, fresh_schema: str, tmp_path: Path) -> None:
    """`run` with a password among its arguments says so once, in its log."""
    (tmp_path / "app.py").write_text("from postroad import Postroad\npost = Postroad(migrate=True)\n")
    url = postgres_url.replace("postgres@", f"postgres:{QUOTED}@")
    assert QUOTED in url
    done = call("run", "app:post", "--once", "--database", url, "--schema", fresh_schema, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("POSTROAD_DATABASE_URL or postroad.toml") == 1
    assert QUOTED not in done.stderr


def options(command: Any, path: str = "") -> dict[str, list[str]]:
    """Every command with its options and arguments."""
    if not hasattr(command, "commands"):
        return {path: [name for parameter in command.params for name in (*parameter.opts, parameter.name)]}
    found: dict[str, list[str]] = {}
    for name, inner in command.commands.items():
        found |= options(inner, f"{path} {name}".strip())
    return found


def test_no_option_takes_a_secret() -> None:
    """No command has an option for a password, a key of the server or a signing secret."""
    found = options(get_command(cli.app))
    assert {"dispatch retry", "run", "status"} <= set(found)
    for command, names in found.items():
        wrong = [name for name in names if any(word in name for word in ("secret", "password", "passwd", "dsn"))]
        assert wrong == [], command
