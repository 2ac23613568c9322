"""`postroad doctor` and `postroad config`, on both databases: as processes, and most often in this process."""

import hashlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine, text

from postroad import Kind, Postroad, Retry
from postroad.model.clock import SECOND
from postroad.sqlite import configure
from postroad.store import dialects
from postroad.surfaces import database_checks, doctor
from postroad.surfaces.checks import Check
from tests.acceptance import shell

pytestmark = pytest.mark.acceptance

CANARY = "c4n4ry-of-more-than-thirty-two-characters"
FAX: Kind[Any] = Kind("fax", Any)
APP = """
from postroad import Kind, Postroad, Retry

post = Postroad()


@post.sender("mail", retry=Retry.QUICK, dedup_window=3600)
def mail(d):
    raise AssertionError("the doctor sends nothing")


post.elsewhere("fax")
"""


@dataclass(frozen=True)
class Place:
    """A database with our tables, and the folder of an app."""

    url: str
    schema: str | None
    folder: Path
    apart: bool = False
    """Whether each command is a process of its own."""

    def call(self, *arguments: str, **environ: str) -> shell.Done:
        """Run a command."""
        given = {"POSTROAD_DATABASE_URL": self.url, **({"POSTROAD_SCHEMA": self.schema} if self.schema else {})}
        ours = {name: value for name, value in os.environ.items() if not name.startswith("POSTROAD_")}
        run = shell.apart if self.apart else shell.here
        return run(*arguments, folder=self.folder, environ={**ours, **given, **environ})

    def checks(self, *arguments: str, code: int = 0, **environ: str) -> list[dict[str, str]]:
        """What the doctor answers to a program."""
        done = self.call("doctor", "app:post", *arguments, "--json", **environ)
        assert done.returncode == code, (done.stdout, done.stderr)
        data = json.loads(done.stdout)["data"]
        assert data["healthy"] is (code == 0)
        return list(data["checks"])

    def app(self) -> Postroad:
        """An app that only sends."""
        post = Postroad(self.url, schema=self.schema)
        post.elsewhere("mail", "fax", "lost", "new in a lane")
        return post

    def change(self, post: Postroad, sql: str) -> None:
        """Change rows behind the product's back."""
        prefix = f'"{self.schema}".postroad_' if self.schema else "postroad_"
        post.database.transact(lambda conn, now: conn.execute(text(sql.replace("{p}", prefix)), {"now": now}))


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A migrated database and a healthy app."""
    (tmp_path / "app.py").write_text(APP)
    if request.param == "sqlite":
        made = Place(f"sqlite:///{tmp_path / 'app.db'}", None, tmp_path)
    else:
        made = Place(request.getfixturevalue("postgres_url"), request.getfixturevalue("fresh_schema"), tmp_path)
    assert made.call("migrate").returncode == 0
    for file in tmp_path.glob("app.db*"):
        file.chmod(0o600)
    return made


def worst(checks: list[dict[str, str]], name: str) -> tuple[str, str]:
    """The worst level of what was found under a name, and everything that was."""
    levels = ["ok", "note", "warning", "error"]
    about = [check for check in checks if check["name"] == name]
    level = max((check["level"] for check in about), key=levels.index, default="")
    return level, " ".join(f"{check['found']}: {check['cure']}" for check in about)


def test_a_healthy_app(place: Place) -> None:
    """Where all is well every line is ok, the exit code is 0, and people get one line a check."""
    place = replace(place, apart=True)
    checks = place.checks()
    assert {check["level"] for check in checks} == {"ok"}, checks
    common = {"settings", "lease", "horizon", "secret_key", "database", "schema", "queued"}
    of_its_own = {"server", "clock"} if place.schema else {"sqlite", "durability", "files"}
    assert {check["name"] for check in checks} == common | of_its_own
    done = place.call("doctor", "app:post")
    assert done.returncode == 0
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [["ok", check["name"]] for check in checks]


def test_work_that_nobody_does(place: Place) -> None:
    """Kinds that no handler takes, lanes' new members too, acks without a key, and work overdue are all told."""
    post = place.app()
    with post.begin() as tx:
        for kind in ("mail", "fax", "lost", "lost"):
            tx.send(kind, {})
        tx.send("new in a lane", {}, lane="l")
    place.change(post, f"UPDATE {{p}}outbox SET due_at = :now - {90 * SECOND}, created_at = :now - {90 * SECOND}")
    place.change(post, "UPDATE {p}outbox SET ack_required = 1 WHERE kind = 'mail'")
    post.close()
    checks = place.checks(code=1)
    levels = {check["found"].split(":")[0]: check["level"] for check in checks if check["name"] == "queued"}
    assert levels == {"fax": "note", "lost": "error", "new in a lane": "error"}
    [lost] = [check for check in checks if check["found"].startswith("lost: 2 unfinished, the oldest for 1 min 3")]
    assert "no handler here takes them" in lost["found"]
    assert worst(checks, "dispatcher")[0] == "warning"
    level, said = worst(checks, "secret_key")
    assert (level, "1 dispatches ask for an acknowledgement" in said) == ("error", True)
    assert worst(place.checks(code=1, POSTROAD_SECRET_KEY="k" * 32), "secret_key")[0] == "ok"


def test_a_live_dispatcher_is_not_called_dead(place: Place) -> None:
    """A dispatch that waits long is no sign of death while attempts begin."""
    post = Postroad(place.url, schema=place.schema)
    post.sender("mail", retry=Retry(attempts=2, first=3600))(lambda d: None if d.key == "good" else 1 / 0)
    with post.begin() as tx:
        tx.send("mail", {}, key="good")
    post.drain()
    with post.begin() as tx:
        tx.send("mail", {}, key="late")
    place.change(post, f"UPDATE {{p}}outbox SET due_at = :now - {90 * SECOND} WHERE key = 'late'")
    assert worst(place.checks(), "dispatcher")[0] == ""
    place.change(post, f"UPDATE {{p}}transitions SET at = at - {90 * SECOND}")
    assert worst(place.checks(), "dispatcher")[0] == "warning"
    post.close()


def test_timers_that_nobody_fires(place: Place) -> None:
    """A timer that is long overdue means that no pump runs."""
    post = place.app()
    with post.begin() as tx:
        tx.set_timer("t", after=3600, stream="a/1")
    place.change(post, f"UPDATE {{p}}timers SET fire_at = :now - {90 * SECOND}")
    post.close()
    assert worst(place.checks(), "pump")[0] == "warning"


def test_a_schema_that_does_not_fit(place: Place) -> None:
    """Tables that are missing or too new are an error, and nothing is migrated."""
    post = place.app()
    place.change(post, "UPDATE {p}migrations SET oldest_code = 99, version = 99")
    post.close()
    assert "upgrade postroad" in worst(place.checks(code=1), "schema")[1]
    url = f"sqlite:///{place.folder / 'empty.db'}" if place.schema is None else place.url
    (place.folder / "empty.db").touch()
    environ = {"POSTROAD_DATABASE_URL": url, **({"POSTROAD_SCHEMA": "nobody_s"} if place.schema else {})}
    level, said = worst(place.checks(code=1, **environ), "schema")
    assert (level, "run `postroad migrate`" in said) == ("error", True)
    assert place.call("migrate", "verify", **environ).returncode == 1


def test_nothing_is_changed_and_no_secret_shown(place: Place) -> None:
    """The doctor and `config` write nothing, and show no part of a password or a key, in no form."""

    def state() -> object:
        if place.schema is None:
            return hashlib.sha256((place.folder / "app.db").read_bytes()).hexdigest()
        engine = create_engine(place.url)
        with engine.connect() as conn:
            rows = conn.execute(text(f'SELECT count(*) FROM "{place.schema}".postroad_migrations')).scalar_one()
            namespace = {"name": place.schema}
            tables = conn.execute(
                text("SELECT count(*) FROM pg_class WHERE relnamespace = CAST(:name AS regnamespace)"), namespace
            ).scalar_one()
        engine.dispose()
        return rows, tables

    before = state()
    secrets = {"POSTROAD_SECRET_KEY": CANARY, "POSTROAD_SECRET_KEYS_FORMER": json.dumps([CANARY, CANARY[::-1]])}
    away = {"POSTROAD_DATABASE_URL": f"postgresql://me:{CANARY}@127.0.0.1:1/none?sslpassword={CANARY}"}
    unreachable = secrets | away
    for environ in (secrets, unreachable, secrets | {"POSTROAD_SECRET_KEYS_FORMER": CANARY}):
        for command in (["config"], ["config", "app:post"], ["doctor", "app:post"]):
            for as_json in ([], ["--json"]):
                # What cannot be reached is tried by processes, so that their last words are heard too.
                asked = replace(place, apart=environ is unreachable and not as_json)
                done = asked.call(*command, *as_json, **environ)
                assert "Traceback" not in done.stderr
                assert not any(
                    part in done.stdout + done.stderr for part in ("c4n4ry", "characters-", CANARY[::-1][:9])
                )
    assert state() == before


def test_config_shows_every_place(place: Place) -> None:
    """Each setting comes with the place that decided it; of an app, what its code says comes first."""
    (place.folder / "postroad.toml").write_text("poll = 1\n[retention]\nacked = '2 weeks'\n")
    (place.folder / "coded.py").write_text("from postroad import Postroad\npost = Postroad('sqlite:///coded.db')\n")

    def shown(*arguments: str, **environ: str) -> dict[str, tuple[Any, str]]:
        answer = json.loads(place.call("config", *arguments, "--json", **environ).stdout)
        return {one["name"]: (one["value"], one["source"]) for one in answer["data"]}

    settings = shown()
    assert settings["database_url"][1] == "POSTROAD_DATABASE_URL"
    assert settings["poll"] == (1.0, "postroad.toml")
    assert settings["retention.acked"] == ("14d", "postroad.toml")
    assert settings["grace"] == (25.0, "default")
    assert settings["secret_key"] == (None, "default")
    assert shown("coded:post", POSTROAD_SCHEMA="")["database_url"] == ("sqlite:///coded.db", "code")
    done = place.call("config")
    assert "retention.acked           14d" in done.stdout
    (place.folder / "postroad.toml").write_text("[retention]\nakced = '2 weeks'\n")
    done = place.call("config")
    assert (done.returncode, "did you mean retention.acked?" in done.stderr) == (2, True)


def examined(post: Postroad) -> list[Check]:
    return list(doctor.examined(post, database=None, schema=None))


def levels(checks: list[Check], name: str) -> list[str]:
    return [check.level for check in checks if check.name == name]


@pytest.fixture
def engine_app(sqlite_path: Path) -> Iterator[Callable[[str], Postroad]]:
    """An app with an engine of its own, on whose connections a pragma of the application's is set."""
    made = []

    def make(pragma: str) -> Postroad:
        from sqlalchemy import event

        engine = configure(create_engine(f"sqlite:///{sqlite_path}"))
        event.listen(engine, "connect", lambda conn, _: conn.execute(pragma))
        made.append(engine)
        return Postroad(engine)

    yield make
    for engine in made:
        engine.dispose()


@pytest.mark.parametrize(
    ("pragma", "level"),
    [
        ("PRAGMA synchronous = FULL", "ok"), ("PRAGMA synchronous = EXTRA", "ok"),
        ("PRAGMA synchronous = NORMAL", "error"), ("PRAGMA synchronous = OFF", "error"),
        ("PRAGMA journal_mode = DELETE", "error"),
    ],
)  # fmt: skip
def test_an_engine_that_gives_up_durability(
    engine_app: Callable[[str], Postroad], sqlite_path: Path, pragma: str, level: str
) -> None:
    """The app's own engine is looked at as the app will use it: WAL, and commits that wait for the disk."""
    migrated(f"sqlite:///{sqlite_path}", None)  # and closed: whoever has it open keeps the journal's mode
    assert levels(examined(engine_app(pragma)), "durability") == [level]


def test_a_file_that_is_not_in_wal_yet(sqlite_path: Path) -> None:
    """A file in another journal's mode is noted: an app that opens it by its URL changes that."""
    migrated(f"sqlite:///{sqlite_path}", None)
    with closing(sqlite3.connect(sqlite_path)) as conn:
        conn.execute("PRAGMA journal_mode = DELETE")
    assert levels(examined(Postroad(f"sqlite:///{sqlite_path}")), "durability") == ["note"]


def test_a_file_that_everybody_may_read(sqlite_path: Path) -> None:
    """A database, or its WAL, that others may open is a warning that says which command ends it."""
    post = Postroad(f"sqlite:///{sqlite_path}")
    post.check_schema()
    sqlite_path.chmod(0o644)
    [check] = [check for check in examined(post) if check.name == "files"]
    assert (check.level, check.cure.startswith("chmod o-rwx /")) == ("warning", True)
    for file in sqlite_path.parent.glob("test.db*"):
        file.chmod(0o640)
    assert levels(examined(post), "files") == ["ok"]
    post.close()


def test_sqlite_has_no_schema(sqlite_path: Path) -> None:
    """A schema beside a SQLite file would be refused when the app connects."""
    migrated(f"sqlite:///{sqlite_path}", None)
    assert "error" in levels(examined(Postroad(f"sqlite:///{sqlite_path}", schema="s")), "schema")


def test_a_server_that_may_lose_commits(postgres_url: str, fresh_schema: str) -> None:
    """synchronous_commit=off is an error, for what was committed can be lost."""
    migrated(postgres_url, fresh_schema)
    post = Postroad(f"{postgres_url}{'&' if '?' in postgres_url else '?'}options=-csynchronous_commit%3Doff",
                    schema=fresh_schema)  # fmt: skip
    assert levels(examined(post), "server") == ["error"]


@pytest.mark.parametrize(("seconds", "level"), [(0, "ok"), (3, "warning"), (-3, "warning")])
def test_clocks_that_differ(
    postgres_url: str, fresh_schema: str, seconds: int, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock of this machine that is more than a second from the server's is a warning, either way."""
    migrated(postgres_url, fresh_schema)
    real: Callable[[Connection], int | None] = dialects.database_micros
    monkeypatch.setattr(database_checks.dialects, "database_micros", lambda conn: (real(conn) or 0) + seconds * SECOND)
    assert levels(examined(Postroad(postgres_url, schema=fresh_schema)), "clock") == [level]


def migrated(url: str, schema: str | None) -> None:
    post = Postroad(url, schema=schema, migrate=True)
    post.check_schema()
    post.close()
