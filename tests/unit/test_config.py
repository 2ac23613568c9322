"""Where settings come from, and what is never shown."""

from pathlib import Path

import pytest

from postroad.engine.config import (
    KNOWN,
    BadSetting,
    Setting,
    database_url,
    masked,
    nearest,
    retention,
    secret_keys,
    settings,
)
from postroad.model import lengths
from postroad.model.clock import SECOND
from postroad.model.errors import InvalidInput
from postroad.model.retention import DAY, Retention

URL = "postgresql://app:s3cret@db.example/app"


@pytest.mark.parametrize(
    ("explicit", "environ", "file", "expected"),
    [
        ("sqlite:///given.db", {"DATABASE_URL": "sqlite:///d.db"}, "file.db", ("sqlite:///given.db", "explicit")),
        (
            None,
            {"POSTROAD_DATABASE_URL": "sqlite:///p.db", "DATABASE_URL": "sqlite:///d.db"},
            "file.db",
            ("sqlite:///p.db", "POSTROAD_DATABASE_URL"),
        ),
        (None, {"DATABASE_URL": "postgres://h/d"}, "file.db", ("postgres://h/d", "DATABASE_URL")),
        (
            None,
            {"POSTROAD_DATABASE_URL": "", "DATABASE_URL": "sqlite:///d.db"},
            None,
            ("sqlite:///d.db", "DATABASE_URL"),
        ),
        (None, {}, "file.db", ("sqlite:///file.db", "postroad.toml")),
    ],
)
def test_the_nearest_source_wins(
    tmp_path: Path, explicit: str | None, environ: dict[str, str], file: str | None, expected: tuple[str, str]
) -> None:
    """What is said goes before POSTROAD_DATABASE_URL, that before DATABASE_URL, that before the file."""
    if file:
        (tmp_path / "postroad.toml").write_text(f'database_url = "sqlite:///{file}"\n')
    assert database_url(explicit, environ=environ, cwd=tmp_path) == expected


def test_no_database_says_what_to_set(tmp_path: Path) -> None:
    """Without any source the error names what one may set."""
    with pytest.raises(BadSetting, match=r"POSTROAD_DATABASE_URL.*DATABASE_URL.*postroad\.toml"):
        database_url(environ={}, cwd=tmp_path)


def test_the_environment_and_the_folder_are_the_processs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless others are passed in, the process's environment and working directory count."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DATABASE_URL", raising=False)
    monkeypatch.setenv("POSTROAD_DATABASE_URL", "sqlite:///mine.db")
    assert database_url() == ("sqlite:///mine.db", "POSTROAD_DATABASE_URL")


def test_pyproject_is_read_where_there_is_no_file_of_ours(tmp_path: Path) -> None:
    """[tool.postroad] counts only without a postroad.toml beside it."""
    (tmp_path / "pyproject.toml").write_text('[tool.postroad]\nschema = "post"\n[tool.other]\nx = 1\n')
    assert settings(environ={}, cwd=tmp_path)["schema"] == Setting("schema", "post", "pyproject.toml")
    (tmp_path / "postroad.toml").write_text('schema = "own"\n')
    assert settings(environ={}, cwd=tmp_path)["schema"] == Setting("schema", "own", "postroad.toml")


def test_every_setting_has_a_value_and_a_source(tmp_path: Path) -> None:
    """Numbers are seconds; what nobody said has its default."""
    (tmp_path / "postroad.toml").write_text("poll = 1\n")
    found = settings({"schema": None}, environ={"POSTROAD_GRACE": "2.5"}, cwd=tmp_path)
    assert {name: (one.value, one.source) for name, one in found.items() if "." not in name} == {
        "database_url": (None, "default"),
        "schema": (None, "default"),
        "secret_key": (None, "default"),
        "secret_keys_former": ((), "default"),
        "grace": (2.5, "POSTROAD_GRACE"),
        "poll": (1.0, "postroad.toml"),
    }
    assert settings({"grace": 1.0}, environ={}, cwd=tmp_path)["grace"] == Setting("grace", 1.0, "command line")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("postroad.toml", 'databse_url = "x"', "databse_url"),
        ("pyproject.toml", "[tool.postroad]\nturns = 1", "turns"),
        ("pyproject.toml", "[tool]\npostroad = 1", "must be a table"),
        ("postroad.toml", "grace = [", "not TOML"),
        ("postroad.toml", 'grace = "long"', r"grace \(postroad.toml\) must be a number of seconds"),
        ("postroad.toml", "database_url = 1", r"database_url \(postroad.toml\) must be a text"),
        ("postroad.toml", "notify_template = []", r"did you mean dispatch.notify_template\?"),
        ("postroad.toml", "[retention]\ndelivred = 1", r"'retention.delivred' .* did you mean retention.delivered\?"),
        ("postroad.toml", "[retension]\nacked = 1", r"did you mean retention.acked\?"),
        ("postroad.toml", "[dispatch.notify_template]\na = 1", "notify_template .* must be a list of texts"),
        ("postroad.toml", "[xyzzy]", "there are database_url, schema"),
        ("postroad.toml", "dispatch = 3", r"\[dispatch\] in .* must be a table"),
        ("postroad.toml", "[dispatch]\nnotify_template = 'a b'", "must be a list of texts"),
        ("postroad.toml", "[dispatch]\nnotify_template = [1]", "must be a list of texts"),
        ("postroad.toml", "[retention]\nacked = 'long'", r"retention.acked \(postroad.toml\) must be a length of time"),
        ("postroad.toml", "[retention]\nacked = -1", "must be a length of time"),
        ("postroad.toml", "[retention]\nenabled = 'perhaps'", "must be true or false"),
    ],
)
def test_a_wrong_file_is_an_error_that_names_it(tmp_path: Path, name: str, text: str, said: str) -> None:
    """An unknown setting, a wrong type or a broken file is refused, and the error says where."""
    (tmp_path / name).write_text(text)
    with pytest.raises(BadSetting, match=said):
        settings(environ={}, cwd=tmp_path)


def test_an_unreadable_file_is_an_error(tmp_path: Path) -> None:
    """A settings file that is there and cannot be read is not passed over."""
    (tmp_path / "postroad.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(BadSetting, match="could not be read"):
        settings(environ={}, cwd=tmp_path)


def test_somebody_elses_broken_pyproject_does_not_matter(tmp_path: Path) -> None:
    """A pyproject.toml that is no TOML and doesn't speak of us is left alone."""
    (tmp_path / "pyproject.toml").write_text("[broken")
    assert settings(environ={}, cwd=tmp_path)["schema"].value is None
    (tmp_path / "pyproject.toml").write_text("[tool.postroad")
    with pytest.raises(BadSetting, match="not TOML"):
        settings(environ={}, cwd=tmp_path)


@pytest.mark.parametrize("url", ["mysql://u:s3cret@h/d", "s3cret", "postgresql:/s3cret", "redis://s3cret@h"])
def test_another_kind_of_database_is_refused(url: str, tmp_path: Path) -> None:
    """Only SQLite and Postgres are taken, and the refusal shows no password."""
    with pytest.raises(BadSetting, match="must begin with") as caught:
        database_url(url, cwd=tmp_path)
    assert "u:s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (URL, "postgresql://app:***@db.example/app"),
        ("postgresql://app:pa/ss@w:o@rd@h/d?x=1", "postgresql://app:***@h/d?x=1"),
        ("postgres:///d?host=/run&password=s3cret&x=1", "postgres:///d?host=/run&password=***&x=1"),
        ("postgres:///d?sslpassword=s3cret", "postgres:///d?sslpassword=***"),
        ("postgresql://app@h/d", "postgresql://app@h/d"),
        ("sqlite:///app.db", "sqlite:///app.db"),
        ("no url, maybe a s3cret", "***"),
    ],
)
def test_a_password_is_never_shown(url: str, shown: str) -> None:
    """A URL is shown without its password, however odd that is."""
    assert masked(url) == shown


def test_a_setting_is_shown_without_secrets() -> None:
    """What a setting shows of itself hides a password and nothing else."""
    assert Setting("database_url", URL, "DATABASE_URL").shown == "postgresql://app:***@db.example/app"
    assert Setting("grace", 25.0, "default").shown == "25.0"


SOURCES = ("code", "command line", "POSTROAD_SCHEMA", "postroad.toml", "default")


@pytest.mark.parametrize("first", range(len(SOURCES)), ids=SOURCES)
def test_the_order_of_the_places(first: int, tmp_path: Path) -> None:
    """Code goes before the command line, that before the environment, that before the file, that before defaults."""
    said = dict.fromkeys(SOURCES[first:], "x")
    if "postroad.toml" in said:
        (tmp_path / "postroad.toml").write_text('schema = "postroad.toml"\n')
    found = settings(
        {"schema": said.get("command line") and "command line"},
        code={"schema": said.get("code") and "code"},
        environ={"POSTROAD_SCHEMA": "POSTROAD_SCHEMA"} if "POSTROAD_SCHEMA" in said else {},
        cwd=tmp_path,
    )["schema"]
    assert (found.value or "default", found.source) == (SOURCES[first], SOURCES[first])


def test_settings_of_tables_in_file_and_environment(tmp_path: Path) -> None:
    """A table's settings have its name in front; in the environment lists are JSON, and flags are words."""
    (tmp_path / "pyproject.toml").write_text(
        "[tool.postroad.dispatch]\nnotify_template = ['a', '--', '{to}']\n"
        "[tool.postroad.retention]\ndelivered = '12 hours'\nacked = 90\nexpired = '2 weeks'\n"
    )
    environ = {
        "POSTROAD_RETENTION_ACKED": "3d", "POSTROAD_RETENTION_HISTORY": "false", "POSTROAD_RETENTION_TOMBSTONES": "60",
    }  # fmt: skip
    found = settings(environ=environ, cwd=tmp_path)
    assert found["dispatch.notify_template"] == Setting(
        "dispatch.notify_template", ["a", "--", "{to}"], "pyproject.toml"
    )
    assert retention(found) == Retention(
        delivered=DAY // 2, acked=3 * DAY, expired=14 * DAY, tombstones=60 * SECOND, history=False
    )
    template = {"POSTROAD_DISPATCH_NOTIFY_TEMPLATE": '["b"]', "POSTROAD_RETENTION_ENABLED": "0"}
    found = settings(environ=template, cwd=tmp_path)
    assert found["dispatch.notify_template"].value == ["b"]
    assert retention(found) is None


def test_retention_has_its_defaults(tmp_path: Path) -> None:
    """Without a word everything is kept for as long as the model says."""
    assert retention(settings(environ={}, cwd=tmp_path)) == Retention()


def test_the_first_key_signs(tmp_path: Path) -> None:
    """The server's keys are the present one and then the former ones; without a present one there are none."""
    assert secret_keys(settings(environ={"POSTROAD_SECRET_KEYS_FORMER": '["b", "c"]'}, cwd=tmp_path)) == ()
    environ = {"POSTROAD_SECRET_KEY": "a", "POSTROAD_SECRET_KEYS_FORMER": '["b", "c"]'}
    assert secret_keys(settings(environ=environ, cwd=tmp_path)) == ("a", "b", "c")


CANARY = "c4n4ry"
SECRETS = ("database_url", "secret_key", "secret_keys_former")


@pytest.mark.parametrize("name", SECRETS)
def test_no_secret_is_shown(name: str, tmp_path: Path) -> None:
    """Neither a setting's repr nor its forms for people and programs hold any part of a secret."""
    value = {"database_url": f"postgresql://u:{CANARY}@h/d", "secret_keys_former": [CANARY, CANARY]}.get(name, CANARY)
    found = settings(code={name: value}, environ={}, cwd=tmp_path)[name]
    assert found.value == value
    assert CANARY not in f"{found!r} {found} {found.shown} {found.plain}"


@pytest.mark.parametrize("name", [*SECRETS, "dispatch.notify_template"])
def test_no_secret_is_in_an_error(name: str, tmp_path: Path) -> None:
    """A secret of the wrong type is named by its place only."""
    wrong = [CANARY] if "url" in name or name == "secret_key" else CANARY
    with pytest.raises(BadSetting) as refused:
        settings({name: wrong}, environ={}, cwd=tmp_path)
    assert f"{name} (command line) must be" in str(refused.value)
    assert CANARY not in f"{refused.value} {refused.value.about} {refused.value.__cause__!r}"


def test_every_setting_has_a_nearest_name() -> None:
    """Whatever is a setting's name is the nearest to itself, with its table and without."""
    assert all(nearest(name) == name == nearest(name.rpartition(".")[2]) for name in KNOWN)
    assert nearest("xyzzy") == ""


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("90s", 90), ("90", 90), (90, 90), (1.5, 1.5), ("1.5 h", 5400), ("30 days", 30 * 86_400), ("7D", 7 * 86_400),
        (" 2 weeks ", 14 * 86_400), ("1 minute", 60), ("5min", 300), ("0", 0),
    ],
)  # fmt: skip
def test_lengths_as_people_write_them(said: str | float, seconds: float) -> None:
    """A length is a number with a unit, or seconds."""
    assert lengths.read(said, "rest") == seconds * SECOND


@pytest.mark.parametrize(
    "said", ["", "d", "-1d", "7x", "7 d 3 h", "1e3s", "nan", "9" * 12 + "w", -1, True, float("inf")]
)
def test_what_is_no_length_is_refused(said: str | float) -> None:
    """What has no unit that there is, is negative or endless is refused by the field's name."""
    with pytest.raises(InvalidInput) as refused:
        lengths.read(said, "rest")
    assert refused.value.about["field"] == "rest"


@pytest.mark.parametrize(
    ("micros", "written"),
    [(0, "0s"), (1, "0.000001s"), (90 * SECOND, "90s"), (120 * SECOND, "2m"), (36 * 3600 * SECOND, "36h"),
     (7 * DAY, "7d"), (123_456_789 * SECOND, "123456789s")],
)  # fmt: skip
def test_lengths_are_written_as_they_are_read(micros: int, written: str) -> None:
    """What is shown of a length may be written into a settings file."""
    assert lengths.written(micros) == written
    assert lengths.read(written, "rest") == micros
