"""Where settings come from, and what is never shown."""

from pathlib import Path

import pytest

from postroad.engine.config import BadSetting, Setting, database_url, masked, settings

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
    assert {name: (one.value, one.source) for name, one in found.items()} == {
        "database_url": (None, "default"),
        "schema": (None, "default"),
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
