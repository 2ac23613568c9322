"""The command line: what it answers to people and to programs, and what it never does."""

import ast
import errno
import io
import json
import logging
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, inspect, text
from typer.testing import CliRunner

import postroad
from postroad import GiveUp, Kind, Postroad, Retry
from postroad.engine import running as engine_running
from postroad.engine.config import BadSetting
from postroad.model import failpoints
from postroad.model.clock import SECOND
from postroad.model.errors import ConcurrencyConflict, DatabaseBusy, KeyConflict
from postroad.store import dialects, migrations, schema
from postroad.store.database import Database
from postroad.surfaces import cli, output, running
from postroad.testing.failpoints import arm_from_environment, nth

# The tests run on whatever SQLite there is; that it is warned of is tested elsewhere.
pytestmark = pytest.mark.filterwarnings("ignore::postroad.store.sqlite_version.SQLiteVersionWarning")
SRC = Path(postroad.__file__).parent
MAIL = Kind("mail", dict[str, str])
LATER = Kind("later", dict[str, str])
EVIL = "\x1b[31mred\x07\r\n\u202eevil\u2066\x9b"


@dataclass(frozen=True)
class Place:
    """A database as the command line names it."""

    url: str
    schema: str | None

    @property
    def options(self) -> list[str]:
        return ["--database", self.url, *(["--schema", self.schema] if self.schema else [])]

    def app(self) -> Postroad:
        return Postroad(self.url, schema=self.schema)


@pytest.fixture(autouse=True)
def nothing_configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting of the machine reaches a test."""
    monkeypatch.chdir(tmp_path)
    for name in ("DATABASE_URL", "POSTROAD_DATABASE_URL", "POSTROAD_SCHEMA", "POSTROAD_BUNDLED_SQLITE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def process_as_before() -> Iterator[None]:
    """What `run` changes about its process is undone."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    root = logging.getLogger()
    logs, level = list(root.handlers), running.logger.level
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    root.handlers[:] = logs
    running.logger.setLevel(level)


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest) -> Place:
    """A database that has nothing in it."""
    if request.param == "sqlite":
        return Place(f"sqlite:///{request.getfixturevalue('sqlite_path')}", None)
    return Place(request.getfixturevalue("postgres_url"), request.getfixturevalue("fresh_schema"))


@pytest.fixture
def filled(place: Place) -> Place:
    """A database with a stream, dispatches in three states, a waiting and a dead event."""
    run("migrate", *place.options)
    post = place.app()
    post.sender(MAIL, retry=Retry(attempts=1))(send)
    post.elsewhere(LATER)
    post.turn("load", attempts=1)(decide)
    post.recorded("room")
    with post.begin() as tx:
        tx.publish("room/1", "Said", {"text": EVIL}, key="e1")
        tx.send(MAIL, {"text": "good"}, to=EVIL, key="good/1")
        tx.send(MAIL, {"text": "bad"}, to="bob", key="bad/1")
        tx.send(LATER, {}, to="bob", key=f"later/{EVIL}")
    post.drain()
    bury(post.database)
    post.close()
    return place


def bury(database: Database) -> None:
    """A dead and a waiting event of a stream that nobody decides for, and a parked stream."""

    def write(conn: Any, *, now: int) -> None:
        inbox = schema.metadata.tables["postroad_inbox"]
        common = {"stream": "lost/1", "type": "lost", "version": 1, "data": '{"a":1}', "kind": "Hm"}
        for key, reason in (("e1", "failed"), ("e2", None)):
            conn.execute(inbox.insert().values(**common, event_id=key, reason=reason, received_at=now, ready_at=now))
        conn.execute(
            schema.queues.insert().values(stream="lost/1", type="lost", until=None, state="parked", attempts=3)
        )

    database.transact(
        lambda conn, now: write(conn.execution_options(schema_translate_map={None: database.schema}), now=now)
    )


def send(dispatch: postroad.Dispatch[dict[str, str]]) -> None:
    if dispatch.body["text"] == "bad":
        raise GiveUp(EVIL)


def decide(turn: postroad.Turn) -> None:
    turn.record("Decided", {})


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, arguments)


def answer(*arguments: str, exit_code: int = 0) -> Any:
    """What a command answers to a program."""
    result = run(*arguments, "--json")
    assert result.exit_code == exit_code, result.output
    document = json.loads(result.stdout)
    assert set(document) == {"ok", "contract_version", "data", "error"}
    assert document["contract_version"] == 1
    assert document["ok"] is (exit_code == 0)
    return document["data"] if document["ok"] else document["error"]


READING = [
    ("status",),
    ("dispatch", "ls"),
    ("dispatch", "show", "k"),
    ("dispatch", "why", "k"),
    ("stream", "show", "room/1"),
    ("migrate", "status"),
    ("migrate", "verify"),
]


@pytest.mark.parametrize("command", READING, ids=" ".join)
def test_reading_never_creates_a_file(command: tuple[str, ...], sqlite_path: Path) -> None:
    """A SQLite file that isn't there is an error, and is not there afterwards."""
    result = run(*command, "--database", f"sqlite:///{sqlite_path}")
    assert result.exit_code == 1
    assert f"There is no file {sqlite_path}" in result.stderr
    assert not sqlite_path.exists()
    assert answer(*command, "--database", f"sqlite:///{sqlite_path}", exit_code=1)["kind"] == "unavailable"


@pytest.mark.parametrize("command", READING[:5], ids=" ".join)
def test_reading_never_migrates(command: tuple[str, ...], place: Place) -> None:
    """A database without our tables is an error that names the cure, and stays without them."""
    engine = dialects.open_engine(place.url)
    with engine.begin() as conn:
        conn.execute(text("CREATE TEMPORARY TABLE other (id integer)"))  # makes the SQLite file
    error = answer(*command, *place.options, exit_code=1)
    assert error["kind"] == "unavailable"
    assert "postroad migrate" in error["message"]
    assert inspect(engine).get_table_names(schema=place.schema) == []
    engine.dispose()


def test_a_file_that_is_not_ours_is_left_as_it_is(sqlite_path: Path) -> None:
    """Reading changes nothing in a file, not even its journal's mode."""
    with create_engine(f"sqlite:///{sqlite_path}").begin() as conn:
        conn.execute(text("CREATE TABLE other (id integer)"))
    before = sqlite_path.read_bytes()
    assert answer("status", "--database", f"sqlite:///{sqlite_path}", exit_code=1)["kind"] == "unavailable"
    assert sqlite_path.read_bytes() == before


def test_no_database_is_wrong_use() -> None:
    """Without any database the error says what to set, with exit code 2."""
    assert "POSTROAD_DATABASE_URL" in answer("status", exit_code=2)["message"]
    result = run("status")
    assert (result.exit_code, "POSTROAD_DATABASE_URL" in result.stderr) == (2, True)


def test_a_database_that_is_away_is_unavailable(tmp_path: Path) -> None:
    """A server that cannot be reached is one readable line without the password."""
    url = f"postgresql://me:s3cret@/nothing?host={tmp_path}"
    error = answer("status", "--database", url, exit_code=1)
    assert error["kind"] == "unavailable"
    assert "me:***" in error["message"]
    result = run("status", "--database", url)
    assert result.exit_code == 1
    assert "s3cret" not in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("url", ["mysql://u:s3cret@h/d", "postgresql://u:s3cret@h:port/d"])
def test_a_wrong_url_is_wrong_use(url: str) -> None:
    """A URL that names no database of ours is refused without showing its password."""
    error = answer("status", "--database", url, exit_code=2)
    assert error["kind"] == "invalid_input"
    assert "s3cret" not in json.dumps(error)


def test_migrate_brings_a_database_up_to_date(place: Place) -> None:
    """Migrating applies the steps once; status and verify then say so."""
    latest = migrations.latest
    assert "applied 0001" in run("migrate", *place.options).stdout
    assert "nothing to do" in run("migrate", *place.options).stdout
    assert answer("migrate", *place.options) == {"applied": [], "version": latest}
    assert answer("migrate", "verify", *place.options) == {"version": latest, "needed": latest}
    assert "fits" in run("migrate", "verify", *place.options).stdout
    steps = answer("migrate", "status", *place.options)
    assert [step["version"] for step in steps] == list(range(1, latest + 1))
    assert all(step["applied_at"].endswith("+00:00") for step in steps)
    assert "0001 tables" in run("migrate", "status", *place.options).stdout


def test_status_counts_what_is_unfinished(filled: Place) -> None:
    """Status shows waiting and dead events, unfinished dispatches by kind, and recent trouble."""
    found = answer("status", *filled.options)
    assert found["events_waiting"] == {"count": 1, "more": False}
    assert found["events_dead"] == {"count": 1, "more": False}
    assert found["dispatches"] == {"pending": 1, "delivering": 0}
    assert found["parked"] == ["lost/1"]
    shown = run("status", *filled.options).stdout
    for line in ("events waiting", "later", "dispatch.dead_letter.permanent", "lost/1"):
        assert line in shown


def test_a_stream_shows_its_log_its_inbox_and_its_runs(filled: Place) -> None:
    """A stream's entries, waiting and dead events, runs and claim are all there."""
    room = answer("stream", "show", "room/1", *filled.options)
    assert (room["version"], room["queue"], room["deleted_at"]) == (1, None, None)
    assert [(entry["seq"], entry["key"], entry["data"]) for entry in room["entries"]] == [(1, "e1", {"text": EVIL})]
    assert [run["end"] for run in room["runs"]] == ["committed"]
    lost = answer("stream", "show", "lost/1", *filled.options)
    assert lost["queue"] == {"state": "parked", "until": None, "attempts": 3, "heard_at": None}
    assert [event["event_id"] for event in lost["waiting"]] == ["e2"]
    assert [(event["event_id"], event["reason"]) for event in lost["dead"]] == [("e1", "failed")]
    assert "committed" in run("stream", "show", "room/1", *filled.options).stdout
    assert "parked, waiting for a person" in run("stream", "show", "lost/1", *filled.options).stdout
    assert answer("stream", "show", "room/1", "--after", "1", *filled.options)["entries"] == []


@pytest.mark.parametrize(
    ("queue", "shown"),
    [
        (None, "nobody holds it"),
        ({"state": "claimed", "until": "2026-01-05T07:00:00+00:00", "attempts": 1},
         "claimed until 2026-01-05 07:00:00Z, attempt 1"),
        ({"state": "backoff", "until": "2026-01-05T07:00:00+00:00", "attempts": 2},
         "backing off until 2026-01-05 07:00:00Z, after attempt 2"),
        ({"state": "ready", "until": "2026-01-05T07:00:00+00:00", "attempts": 0}, "ready for its next turn"),
    ],
)  # fmt: skip
def test_a_streams_claim_is_a_sentence(
    queue: dict[str, Any] | None, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who holds a stream is said in words."""
    from postroad.surfaces import reading, screens

    screens.stream(
        reading.StreamView(
            stream="load/1", version=0, deleted_at=None, queue=queue, entries=[], waiting=[], dead=[], runs=[]
        )
    )
    assert capsys.readouterr().out == f"load/1: 0 entries\n{shown}\n"


def test_dispatches_are_listed_and_filtered(filled: Place) -> None:
    """The newest dispatches, by status, kind and destination; an empty list says so."""
    keys = {row["key"]: row["status"] for row in answer("dispatch", "ls", *filled.options)}
    assert sorted(keys.values()) == ["dead_letter", "delivered", "pending"]
    assert len(answer("dispatch", "ls", "--limit", "1", *filled.options)) == 1
    [row] = answer("dispatch", "ls", "--status", "dead_letter", *filled.options)
    assert (row["key"], row["to"]) == ("bad/1", "bob")
    assert len(answer("dispatch", "ls", "--kind", "mail", "--to", "bob", *filled.options)) == 1
    assert run("dispatch", "ls", "--kind", "none", *filled.options).stdout == "(no dispatches)\n"
    assert answer("dispatch", "ls", "--kind", "none", *filled.options) == []
    assert answer("dispatch", "ls", "--status", "gone", *filled.options, exit_code=2)["kind"] == "invalid_input"


def test_a_dispatch_shows_why_it_is_not_moving(filled: Place) -> None:
    """A dispatch, by key or id, shows its history and one sentence on what it waits for."""
    found = answer("dispatch", "show", "bad/1", *filled.options)
    assert found == answer("dispatch", "show", found["id"], *filled.options)
    assert [change["to_status"] for change in found["history"]] == ["pending", "delivering", "dead_letter"]
    assert found["why"].startswith("Dead by dispatch.dead_letter.permanent")
    shown = run("dispatch", "show", "bad/1", *filled.options).stdout
    assert found["why"].split(":")[0] in shown
    assert "dispatch.dead_letter.permanent" in shown


@pytest.mark.parametrize("command", [("dispatch", "show", "nothing"), ("stream", "show", "nothing/1")], ids=" ".join)
def test_a_missing_id_is_not_found(command: tuple[str, ...], filled: Place) -> None:
    """What isn't there is exit code 1 and kind not_found."""
    error = answer(*command, *filled.options, exit_code=1)
    assert error["kind"] == "not_found"
    assert "nothing" in error["message"]
    assert "nothing" in next(iter(error["detail"].values()))


def test_nothing_from_outside_reaches_the_terminal_raw(filled: Place) -> None:
    """Control and bidirectional characters in keys, bodies and errors are shown as escapes."""
    [row] = answer("dispatch", "ls", "--status", "dead_letter", *filled.options)
    assert EVIL in row["last_error"]
    for command in (
        ("dispatch", "ls"), ("dispatch", "show", "bad/1"), ("dispatch", "show", "good/1"),
        ("dispatch", "show", f"no{EVIL}"), ("stream", "show", "room/1"), ("status",),
    ):  # fmt: skip
        shown = run(*command, *filled.options).output
        assert not set(shown) & (set(EVIL) - set("redvil[31m\n")), command
    assert "\\u202eevil" in run("dispatch", "show", "good/1", *filled.options).stdout


def test_a_terminal_gets_colours_and_a_pipe_gets_none(filled: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Colours are for terminals only, and what came from outside is escaped there too."""
    assert "\x1b" not in run("dispatch", "ls", *filled.options).stdout
    monkeypatch.setattr(output, "sys", type("Terminal", (), {"stdout": Terminal(), "stderr": sys.stderr}))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    shown = run("dispatch", "ls", *filled.options).stdout
    assert "\x1b[" in shown
    assert "\x1b[31mred" not in shown
    assert "history" in run("dispatch", "show", "good/1", *filled.options).stdout


class Terminal:
    """Stands for a terminal."""

    def isatty(self) -> bool:
        return True


def python(*arguments: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True, text=True, check=False, timeout=60, env={**os.environ, **environ},
    )  # fmt: skip


HEAVY = {"sqlalchemy", "psycopg", "sqlite3", "_sqlite3", "rich", "httpx", "asyncio", "yaml"}


def test_help_imports_nothing_heavy() -> None:
    """`postroad --help` and `--version` load neither a database library nor rich."""
    code = (
        "import sys\nfrom postroad.surfaces import cli\n"
        "try:\n    cli.main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "print(sorted(sys.modules), file=sys.stderr)"
    )
    for option in ("--help", "--version"):
        done = python("-c", code, option)
        assert done.returncode == 0, done.stderr
        loaded = set(ast.literal_eval(done.stderr.splitlines()[-1]))
        assert not loaded & HEAVY, option
        assert not {name for name in loaded if name.startswith("postroad.testing")}


def test_the_package_runs_as_a_module() -> None:
    """`python -m postroad` and `python -m postroad.surfaces.cli` are the command line."""
    for module in ("postroad", "postroad.surfaces.cli"):
        assert python("-m", module, "--version").stdout == f"postroad {postroad.__version__}\n"


def test_wrong_use_is_exit_code_2() -> None:
    """An unknown option is told on stderr, or as an answer to a program."""
    done = python("-m", "postroad", "status", "--nope")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--nope" in done.stderr
    done = python("-m", "postroad", "status", "--nope", "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["kind"] == "invalid_input"


def test_a_program_gets_the_exit_code_too(tmp_path: Path) -> None:
    """With --json a failure and a success end with their exit codes in a real process."""
    url = f"sqlite:///{tmp_path}/x.db"
    assert python("-m", "postroad", "status", "--json", "--database", url).returncode == 1
    assert python("-m", "postroad", "migrate", "--json", "--database", url).returncode == 0
    done = python("-m", "postroad", "status", "--json", POSTROAD_DATABASE_URL=url)
    assert (done.returncode, json.loads(done.stdout)["ok"]) == (0, True)


def test_a_reader_that_goes_away_is_no_crash(filled: Place) -> None:
    """When a pipe is closed the command ends without a traceback."""
    process = subprocess.Popen(
        [sys.executable, "-m", "postroad", "dispatch", "ls", *filled.options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    said = process.stderr.read()
    process.stderr.close()
    process.wait(60)
    assert "Traceback" not in said


@pytest.mark.parametrize(
    "command", [("status",), ("status", "--json"), ("dispatch", "ls"), ("dispatch", "nothing", "--json")]
)
def test_an_answer_that_cannot_be_written_is_told_in_a_line(command: tuple[str, ...], filled: Place) -> None:
    """With a full disk behind stdout a command fails, says so in one line on stderr, and shows no trace."""
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "postroad", *command, *filled.options], stdout=full, stderr=subprocess.PIPE,
            text=True, check=False, timeout=60, env={**os.environ, "POSTROAD_BUNDLED_SQLITE": "1"},
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "postroad: the answer could not be written to stdout: No space left on device\n"


@pytest.mark.parametrize("size", [10, 100_000])
@pytest.mark.parametrize(
    ("number", "told"), [(errno.ENOSPC, "No space left"), (errno.EIO, "Input/output"), (errno.EPIPE, "")]
)
def test_what_stdout_does_not_take_is_no_fault_of_the_command(
    size: int, number: int, told: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """However much is said, and whether it fails at once or at the end; who has stopped reading needs no line."""

    class Full(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, _data: object) -> int:
            raise OSError(number, os.strerror(number))

    with Path(os.devnull).open("w") as nothing:
        raw = Full()
        monkeypatch.setattr(raw, "fileno", nothing.fileno, raising=False)
        out = io.TextIOWrapper(io.BufferedWriter(raw))
        monkeypatch.setattr(sys, "stdout", out)
        with pytest.raises(SystemExit) as ended, output.heard(), output.reporting(False):
            output.say("x" * size)
        monkeypatch.setattr(raw, "write", len)  # what is left goes nowhere
        out.close()
    assert ended.value.code == 1
    said = capfd.readouterr().err.splitlines()
    assert (told in said[0], len(said)) == (True, 1) if told else said == []


def test_a_closed_stdout_is_wanted_by_nobody(filled: Place) -> None:
    """`>&-` and `2>&-`: the command does what it should, and its exit code says so."""
    asked = " ".join(shlex.quote(word) for word in (sys.executable, "-m", "postroad", "status"))
    for options, code in ((shlex.join(filled.options), 0), ("--database nothing", 2)):
        assert os.waitstatus_to_exitcode(os.system(f"{asked} {options} >&- 2>&-")) == code


@pytest.mark.parametrize("way", ["option", "command's option", "environment"])
def test_the_bundled_sqlite_comes_first(way: str, tmp_path: Path) -> None:
    """Asked for, the wheel's SQLite is in place before anything else imports one."""
    (tmp_path / "seen.py").write_text("import sys\nprint(sys.modules['sqlite3'].__name__)\nraise SystemExit\n")
    before = ["--bundled-sqlite"] if way == "option" else []
    after = ["--bundled-sqlite"] if way == "command's option" else []
    environ = {"POSTROAD_BUNDLED_SQLITE": "1"} if way == "environment" else {}
    done = python("-m", "postroad", *before, "run", *after, "seen:post", **environ)
    assert done.stdout == "pysqlite3\n", done.stderr


def test_a_bundled_sqlite_that_comes_too_late_is_refused() -> None:
    """Where sqlite3 was imported already the command says so and does nothing."""
    code = "import sqlite3\nfrom postroad.surfaces import cli\ncli.main()"
    done = python("-c", code, "--bundled-sqlite", "status")
    assert done.returncode == 1
    assert "sqlite3 was imported before" in done.stderr


def test_an_app_may_bring_the_bundled_sqlite_itself(tmp_path: Path) -> None:
    """`postroad run` loads an app before any SQLite, so that the import which the README names is early enough."""
    (tmp_path / "bundled.py").write_text(
        "import postroad.bundled_sqlite\nimport sqlite3\nfrom postroad import Postroad\n"
        "print(sqlite3.__name__, flush=True)\n"
        "post = Postroad('sqlite:///bundled.db', lifespan=lambda post: 1 / 0)\n"
    )
    done = python("-m", "postroad", "run", "bundled:post")
    assert done.stdout == "pysqlite3\n", done.stderr
    assert " runs turns, sends, timers on sqlite:///bundled.db" in done.stderr
    assert "can corrupt" not in done.stderr


def test_the_parts_are_those_of_the_engine() -> None:
    """The command knows the loops' names and the default grace before it loads any of them."""
    assert running.PARTS == engine_running.PARTS
    assert running.GRACE_SECONDS * SECOND == engine_running.GRACE


@pytest.mark.parametrize(
    ("database", "said", "code"),
    [
        ("sqlite:///garbage.db", "sqlite:///garbage.db: file is not a database", 1),
        ("sqlite:///folder", "sqlite:///folder: unable to open database file", 1),
        ("postgresql://me:s3cret@/nothing?host=/nowhere", "postgresql://me:***@/nothing?host=/nowhere: ", 1),
        ("foo", "must begin with sqlite:///, postgres:// or postgresql://", 2),
        ("postgresql://u:s3cret@h:port/d", "database_url (command line): database must be a URL such as", 2),
    ],
)
@pytest.mark.parametrize("where", ["option", "code"])
def test_a_database_that_cannot_be_used_is_one_line(
    database: str, said: str, code: int, where: str, tmp_path: Path
) -> None:
    """`postroad run` on what is no database, or not there, says so in one line, without password and traceback."""
    if where == "code" and code == 2:
        said = "This value is not accepted. database must be"
    (tmp_path / "garbage.db").write_bytes(b"no database at all, but long enough to be taken for one" * 100)
    (tmp_path / "folder").mkdir()
    written = database if where == "code" else None
    (tmp_path / "plain.py").write_text(f"from postroad import Postroad\npost = Postroad({written!r})\n")
    done = python("-m", "postroad", "--bundled-sqlite", "run", "plain:post",
                  *(("--database", database) if where == "option" else ()))  # fmt: skip
    assert done.returncode == code, done.stderr
    [line] = done.stderr.splitlines()
    assert said in line
    assert "s3cret" not in line


@pytest.mark.parametrize("name", ["POSTROAD_POLL", "POSTROAD_GRACE"])
@pytest.mark.parametrize("value", ["-1", "nan", "1e99"])
def test_a_wrong_length_is_refused_before_anything_runs(name: str, value: str, tmp_path: Path) -> None:
    """A grace or a poll interval that cannot be is refused before the app is loaded."""
    (tmp_path / "loaded.py").write_text("print('loaded')\n")
    done = python("-m", "postroad", "run", "loaded:post", **{name: value})
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    [line] = done.stderr.splitlines()
    assert name.removeprefix("POSTROAD_").lower() in line


def test_a_poll_interval_that_the_loops_refuse_is_refused_first(tmp_path: Path) -> None:
    """The bounds of the option hold for the setting as well."""
    (tmp_path / "postroad.toml").write_text("poll = 0.0")
    result = run("run", "none:post")
    assert (result.exit_code, "poll (postroad.toml) must be 0.001 to 30 seconds" in result.stderr) == (2, True)


def write_app(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An app whose database is a file that is not there yet, as the environment says."""
    (folder / f"{name}.py").write_text("from postroad import Postroad\npost = Postroad()\n")
    monkeypatch.setenv("POSTROAD_DATABASE_URL", f"sqlite:///{name}.db")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("POSTROAD_POLL", "nan", "poll (POSTROAD_POLL) must be 0.001 to 30 seconds, got nan"),
        ("POSTROAD_GRACE", "-1", "grace (POSTROAD_GRACE) must be 0 seconds or more"),
        ("POSTROAD_SECRET_KEY", "s3cret", "secret_key (POSTROAD_SECRET_KEY): "),
        ("POSTROAD_SECRET_KEYS_FORMER", '["s3cret"]', "secret_keys_former (POSTROAD_SECRET_KEYS_FORMER): "),
        ("POSTROAD_DISPATCH_NOTIFY_TEMPLATE", '["sh", "{to}"]', "dispatch.notify_template (POSTROAD_DISPATCH_NOTIFY_"),
        ("POSTROAD_SCHEMA", "s", "schema (POSTROAD_SCHEMA): SQLite has no schemas"),
    ],
)
def test_a_setting_that_run_refuses_is_refused_by_config(
    variable: str, value: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`run`, `run --once` and `config` say the same of it, with exit code 2; people see all settings all the same."""
    write_app(tmp_path, "wrong", monkeypatch)
    if variable == "POSTROAD_SECRET_KEYS_FORMER":
        monkeypatch.setenv("POSTROAD_SECRET_KEY", "k" * 32)
    monkeypatch.setenv(variable, value)
    for command in (["config"], ["config", "wrong:post"], ["run", "wrong:post"], ["run", "wrong:post", "--once"]):
        result = run(*command)
        assert (result.exit_code, said in result.stderr) == (2, True), (command, result.output)
        assert ("retention.enabled" in result.stdout) == (command[0] == "config")
        assert "s3cret" not in result.output
    error = answer("config", exit_code=2)
    assert (error["kind"], said in error["message"]) == ("invalid_input", True)
    assert "field" in error["detail"]
    assert not (tmp_path / "wrong.db").exists()


async def closes(post: Postroad, *_: object) -> None:
    """In the place of the loops."""
    post.close()


def test_an_option_goes_before_a_setting_that_would_be_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command line says better is not asked of the environment."""
    write_app(tmp_path, "better", monkeypatch)
    monkeypatch.setattr(running, "_run", closes)
    monkeypatch.setenv("POSTROAD_POLL", "nan")
    result = run("run", "better:post", "--poll", "0.1")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("command", [["config"], ["config", "--json"], ["run"], ["run", "--once"]], ids=" ".join)
def test_a_misspelt_variable_is_told(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`run`, `run --once` and `config` warn of a variable that would be passed over, on stderr, and go on."""
    write_app(tmp_path, "misspelt", monkeypatch)
    monkeypatch.setattr(running, "_run", closes)
    monkeypatch.setenv("POSTROAD_GRAC", "s3cret")
    result = run(*command, "misspelt:post")
    assert result.exit_code == 0, result.output
    [line] = [line for line in result.stderr.splitlines() if "POSTROAD_GRAC " in line]
    assert "POSTROAD_GRAC in the environment is no setting: did you mean POSTROAD_GRACE?" in line
    assert "s3cret" not in result.output
    assert "POSTROAD_GRAC" not in result.stdout


def test_a_scenario_that_is_no_text_is_told(tmp_path: Path) -> None:
    """A scenario in another encoding, or that is no YAML, is one readable line, and invalid input to programs."""
    (tmp_path / "latin.yaml").write_bytes("name: caf\u00e9".encode("latin-1"))
    (tmp_path / "bad.yaml").write_text("a: [")
    for name in ("latin.yaml", "bad.yaml"):
        result = run("eval", name)
        assert (result.exit_code, "This scenario cannot be read" in result.stdout) == (1, True), result.output
        error = answer("eval", name, exit_code=2)
        assert error["kind"] == "invalid_input"
        assert name in error["message"]


def test_what_acts_on_a_terminal_is_escaped_in_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    """C1 controls, bidirectional marks and line separators leave as escapes, and mean the same to a parser."""
    acting = "".join(map(chr, [*range(0x7F, 0xA0), *range(0x2028, 0x202F), *range(0x2066, 0x206A)]))
    output.show_json({"key": f"\u00e9{acting}\U0001f389"})
    said = capsys.readouterr().out
    assert not set(said) & set(acting)
    assert "\u00e9\\u007f" in said
    assert json.loads(said)["data"]["key"] == f"\u00e9{acting}\U0001f389"


def test_a_stream_says_why_its_events_wait(place: Place) -> None:
    """One sentence on what waiting events wait for: a worker, a time, a claim, a back-off, a person."""
    run("migrate", *place.options)
    post = place.app()
    for name in ("idle", "busy", "held", "retried", "parked", "over", "early"):
        post.turn(name)(decide)
    with post.begin() as tx:
        for stream in ("idle/1", "busy/1", "held/1", "retried/1", "parked/1", "over/1", "early/1"):
            tx.publish(stream, "Said", {}, key="e1")

    def write(conn: Any, *, now: int) -> None:
        row = {"claim_token": None, "attempts": 1}
        conn = conn.execution_options(schema_translate_map={None: post.database.schema})
        inbox = schema.metadata.tables["postroad_inbox"]
        conn.execute(inbox.update().where(inbox.c.stream == "early/1").values(ready_at=now + 60 * SECOND))
        for stream, state, until in (("busy/2", "claimed", now + 60 * SECOND), ("held/1", "claimed", now + 60 * SECOND),
                                     ("retried/1", "backoff", now + 60 * SECOND), ("parked/1", "parked", None),
                                     ("over/1", "claimed", now - 60 * SECOND)):  # fmt: skip
            token = {"claim_token": "t"} if state == "claimed" else {}
            named = {"stream": stream, "type": stream.partition("/")[0], "state": state, "until": until}
            conn.execute(schema.queues.insert().values(**{**row, **token, **named}))

    post.database.transact(write)
    post.close()
    for stream, said in (
        ("idle/1", "nobody holds the stream: is a worker for the type 'idle' running?"),
        ("busy/1", "nobody holds the stream: workers of its type hold others (1)."),
        ("held/1", "Events wait for the turn that is under way"),
        ("retried/1", "Events wait for the next attempt at"),
        ("parked/1", "a person must let it go"),
        ("over/1", "is a worker for the type 'over' running?"),
        ("early/1", "Events wait for their time"),
    ):
        assert said in answer("stream", "show", stream, *place.options)["why"], stream
        assert said in run("stream", "show", stream, *place.options).stdout
    assert answer("stream", "show", "busy/2", *place.options)["why"] == ""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (KeyConflict("k"), "conflict"),
        (ConcurrencyConflict("s"), "conflict"),
        (DatabaseBusy("locked"), "unavailable"),
        (postroad.InvalidInput("x"), "invalid_input"),
        (postroad.DispatchNotFound("x"), "not_found"),
        (RuntimeError("x"), "internal"),
    ],
)
def test_every_error_has_a_kind(error: Exception, kind: str) -> None:
    """An error is one of five kinds; what nobody foresaw is internal."""
    assert output.kind_of(error) == kind


def test_an_unforeseen_error_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    """What is a fault of ours shows where it happened, escaped, and to programs as kind internal."""
    import typer

    with pytest.raises(typer.Exit), output.reporting(False):
        raise RuntimeError(EVIL)
    said = capsys.readouterr().err
    assert "test_cli.py" in said
    assert "\x1b" not in said
    with pytest.raises(typer.Exit), output.reporting(True):
        raise RuntimeError("oh")
    assert json.loads(capsys.readouterr().out)["error"] == {
        "kind": "internal", "message": "RuntimeError: oh", "detail": {},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("micros", "shown"),
    [
        (0, "0 s"), (1_500_000, "1.5 s"), (12_000_000, "12 s"), (61_000_000, "1 min 1 s"),
        (7_260_000_000, "2 h 1 min"), (180_000_000_000, "2 d 2 h"),
    ],
)  # fmt: skip
def test_lengths_of_time_are_readable(micros: int, shown: str) -> None:
    """A length of time is shown in the unit that fits it."""
    assert output.length(micros) == shown


APPS = {
    "good": "from postroad import Postroad\npost = Postroad()\nclass Box:\n    post = post\nnumber = 1\n",
    "broken": "1/0\n",
    "needy": "import surely_not_there\n",
    "refusing": "from postroad import Postroad\npost = Postroad(schema='\"')\n",
}


@pytest.fixture
def apps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """App modules in the working directory, forgotten afterwards."""
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    for name, source in APPS.items():
        (tmp_path / f"app_{name}.py").write_text(source)
    yield
    for name in APPS:
        sys.modules.pop(f"app_{name}", None)


def test_an_app_is_found_in_the_working_directory(apps: None) -> None:
    """APP names an attribute of a module, nested ones too."""
    found = running.load("app_good:post")
    assert isinstance(found, Postroad)
    assert running.load("app_good:Box.post") is found


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("app_good", "module:attribute"),
        (":post", "module:attribute"),
        ("app_none:post", "There is no module 'app_none'"),
        ("app_good.deeper:post", "app_good"),
        ("app_good:none", "no attribute 'none'"),
        ("app_good:number", "is a int, not a Postroad"),
        ("app_broken:post", "ZeroDivisionError"),
        ("app_needy:post", "surely_not_there"),
    ],
)
def test_an_app_that_cannot_be_run_says_why(apps: None, reference: str, said: str) -> None:
    """A wrong reference or a module that fails is one clear line and exit code 2."""
    result = run("run", reference)
    assert result.exit_code == 2
    assert said in result.stderr.splitlines()[-1]


def test_an_apps_own_refusal_is_shown(apps: None) -> None:
    """What an app refuses while it is imported is said as it is."""
    result = run("run", "app_refusing:post")
    assert result.exit_code == 2
    assert "without quotes" in result.stderr


def test_only_takes_the_names_of_loops() -> None:
    """--only is a list of turns, sends and timers."""
    assert running.parts_of(None) == ("turns", "sends", "timers")
    assert running.parts_of("timers, turns") == ("turns", "timers")
    with pytest.raises(output.WrongUse, match="'sleeps'"):
        running.parts_of("sends,sleeps")


@pytest.mark.parametrize(
    ("event", "values", "said"),
    [
        ("dispatch.settled", {"id": "d1", "status": "dead_letter", "reason": "r", "stale": False},
         "dispatch d1 ended: r"),
        ("dispatch.settled", {"id": "d1", "status": "delivered", "reason": "r", "stale": False}, None),
        ("dispatch.settled", {"id": "d1", "status": "expired", "reason": "r", "stale": True},
         "dispatch d1: an attempt ended after its claim was over: r"),
        ("lease.lost", {"subject": "load/1"}, "the claim of load/1 is lost; its turn is given up"),
        ("turn.ended", {"stream": "load/1", "attempt": 2, "end": "failed", "error": "oh"},
         "turn of load/1, attempt 2: failed: oh"),
        ("turn.ended", {"stream": "load/1", "attempt": 1, "end": "committed", "error": None}, None),
        ("timers.fired", {"count": 1}, None),
    ],
)  # fmt: skip
def test_what_an_operator_wants_to_know_is_logged(
    event: str, values: dict[str, Any], said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Ends that are no success and lost claims are a line of the log; the usual is not."""
    with caplog.at_level("INFO", "postroad"):
        running.tell(event, values)
    assert [record.message for record in caplog.records] == ([said] if said else [])


def called_failpoints() -> dict[str, str]:
    """Every failpoint("…") call in the package, with its file."""
    return {
        node.args[0].value if isinstance(node.args[0], ast.Constant) else ast.unparse(node): str(path)
        for path in SRC.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "failpoint"
    }  # fmt: skip


def test_the_table_of_failpoints_is_true() -> None:
    """FAILPOINTS names exactly the failpoints that the code reaches."""
    assert called_failpoints().keys() == failpoints.FAILPOINTS.keys()


@pytest.mark.parametrize("asked", ["nothing.here", "commit.before:0", "commit.before:x", "commit.before:-1"])
def test_an_unknown_failpoint_is_refused(asked: str) -> None:
    """A misspelt failpoint or count must not pass for a test that found nothing."""
    with pytest.raises(BadSetting, match="POSTROAD_FAILPOINT"):
        arm_from_environment({"POSTROAD_FAILPOINT": asked})


def test_no_failpoint_is_armed_unless_asked_for() -> None:
    """Without the variable nothing is armed."""
    assert arm_from_environment({}) is None


def test_a_failpoint_acts_at_its_nth_time() -> None:
    """An armed failpoint acts once, when its own place is reached for the n-th time."""
    acted: list[int] = []
    reached = nth("a", 2, lambda: acted.append(1))
    for place, times in (("a", 0), ("b", 0), ("a", 1), ("a", 1)):
        reached(place)
        assert len(acted) == times


def test_an_armed_failpoint_kills_the_process() -> None:
    """The process dies by SIGKILL at the failpoint, without finishing anything."""
    code = (
        "from postroad.testing.failpoints import arm_from_environment\n"
        "from postroad.model.failpoints import failpoint\n"
        "print(arm_from_environment(), flush=True)\n"
        "failpoint('commit.before')\nprint('once', flush=True)\nfailpoint('commit.before')\nprint('never')"
    )
    done = python("-c", code, POSTROAD_FAILPOINT="commit.before:2")
    assert (done.returncode, done.stdout) == (-9, "commit.before:2\nonce\n")
