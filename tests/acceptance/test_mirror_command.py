"""`postroad stream mirror`: a stream's log as files, with every loop down, on both databases."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from postroad import Kind
from tests.acceptance import shell
from tests.cases.apps import OpenApp, open_app
from tests.engine.conftest import place

__all__ = ["open_app", "place"]
pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.filterwarnings("ignore::postroad.store.sqlite_version.SQLiteVersionWarning"),
]
NOTE = Kind("note", dict[str, str])


def test_a_stream_is_written_to_a_file(open_app: OpenApp, place: dict[str, Any], tmp_path: Path) -> None:
    """Its log is there as lines; again there is nothing to do; no such stream and a bad folder are said in one line."""
    post = open_app()
    post.recorded("chat")
    with post.begin() as tx:
        for n in range(3):
            tx.publish("chat/1", NOTE, {}, key=f"n{n}")
    post.drain()
    given = {"POSTROAD_DATABASE_URL": place["database"], "POSTROAD_SCHEMA": place.get("schema") or ""}
    environ = {**os.environ, **{name: value for name, value in given.items() if value}}

    def call(*arguments: str) -> shell.Done:
        return shell.here("stream", "mirror", *arguments, folder=tmp_path, environ=environ)

    first = json.loads(call("chat/1", "--to", "m", "--json").stdout)["data"]
    assert {**first, "path": Path(first["path"]).name} == {
        "stream": "chat/1", "path": "1.jsonl", "lines": 3, "aside": 0,
    }  # fmt: skip
    assert [json.loads(line)["id"] for line in Path(first["path"]).read_text().splitlines()] == ["n0", "n1", "n2"]
    assert "0 lines written" in call("chat/1", "--to", "m").stdout
    assert (missing := call("chat/2", "--to", "m")).returncode == 1
    assert "No stream" in missing.stderr
    (tmp_path / "file").touch()
    assert (bad := call("chat/1", "--to", "file")).returncode != 0
    assert "could not be written to" in bad.stderr
    assert "Traceback" not in bad.stderr
