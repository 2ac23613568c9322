"""Settings and where they come from: code > command line > environment > `postroad.toml` > defaults.

The file is `postroad.toml` in the working directory or, without one, the table `[tool.postroad]` of the
`pyproject.toml` there. In the environment a setting is `POSTROAD_` and its name in capitals; the database's
URL may also be `DATABASE_URL`.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from postroad.model.errors import InvalidInput

DEFAULT = "default"
ENVIRONMENT: Mapping[str, tuple[str, ...]] = {
    "database_url": ("POSTROAD_DATABASE_URL", "DATABASE_URL"),
    "schema": ("POSTROAD_SCHEMA",),
    "grace": ("POSTROAD_GRACE",),
    "poll": ("POSTROAD_POLL",),
}
DEFAULTS: Mapping[str, object] = {"database_url": None, "schema": None, "grace": 25.0, "poll": 0.25}
_TYPES: Mapping[str, Any] = {"database_url": str, "schema": str, "grace": float, "poll": float}
_SCHEMES = re.compile(r"(sqlite|postgres|postgresql)(\+\w+)?://")
_SECRET = re.compile(r"([?&][^=&]*(?:password|secret|token)[^=&]*=)[^&]*", re.IGNORECASE)
HIDDEN = "***"


class BadSetting(InvalidInput):
    """A setting is wrong or missing."""


class Setting(msgspec.Struct, frozen=True):
    """A setting's value and the place that decided it."""

    name: str
    value: Any
    source: str

    @property
    def shown(self) -> str:
        """The value as people may see it: without secrets."""
        return masked(self.value) if self.name == "database_url" and self.value else str(self.value)


def settings(
    given: Mapping[str, object] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> dict[str, Setting]:
    """Every setting by its name: database_url, schema, grace and poll (seconds).

    Args:
        given: What the command line said; None values count as not said.

    Raises:
        BadSetting: An unknown name or a value of the wrong type in the file, naming both.
    """
    environ = os.environ if environ is None else environ
    said = {name: value for name, value in (given or {}).items() if value is not None}
    path, written = _file(Path.cwd() if cwd is None else cwd)
    return {name: _setting(name, said, environ, (path, written)) for name in DEFAULTS}


def database_url(
    explicit: str | None = None, *, environ: Mapping[str, str] | None = None, cwd: Path | None = None
) -> tuple[str, str]:
    """The database's URL and the place that it comes from. `explicit` is what code or the command line said.

    Raises:
        BadSetting: There is none anywhere, or it is not one of sqlite:///…, postgres://… or postgresql://….
    """
    if explicit is not None:
        return _checked_url(explicit, "--database"), "explicit"
    found = settings(environ=environ, cwd=cwd)["database_url"]
    if found.value is None:
        raise BadSetting(
            "No database is configured: set POSTROAD_DATABASE_URL (or DATABASE_URL), write database_url into "
            "postroad.toml, or pass one, such as sqlite:///app.db or postgresql://user@host/name.",
            field="database_url",
        )
    return _checked_url(found.value, found.source), found.source


def masked(url: str) -> str:
    """A database URL as people may see it: without its password."""
    scheme, slashes, rest = url.partition("://")
    if not slashes:
        return HIDDEN
    # The last @ of all: a password may hold any character, and hiding too much does no harm.
    login, at, place = rest.rpartition("@")
    user, colon, _ = login.partition(":")
    hidden = colon and f":{HIDDEN}"
    return f"{scheme}://{user}{hidden}{at}" + _SECRET.sub(rf"\1{HIDDEN}", place)


def _checked_url(url: str, source: str) -> str:
    if not _SCHEMES.match(url):
        raise BadSetting(
            f"The database's URL ({source}) must begin with sqlite:///, postgres:// or postgresql://, "
            f"got {masked(url)}.",
            field="database_url",
        )
    return url


def _setting(
    name: str,
    said: Mapping[str, object],
    environ: Mapping[str, str],
    file: tuple[str, Mapping[str, object]],
) -> Setting:
    if name in said:
        return Setting(name, _converted(name, said[name], "command line"), "command line")
    for variable in ENVIRONMENT[name]:
        if environ.get(variable):
            return Setting(name, _converted(name, environ[variable], variable), variable)
    path, written = file
    if name in written:
        return Setting(name, _converted(name, written[name], path), path)
    return Setting(name, DEFAULTS[name], DEFAULT)


def _converted(name: str, value: object, source: str) -> object:
    try:
        return msgspec.convert(value, _TYPES[name], strict=not isinstance(value, str))
    except msgspec.ValidationError as error:
        # The value may be a secret, and so may the error's text.
        wanted = "a text" if _TYPES[name] is str else "a number of seconds"
        raise BadSetting(f"{name} ({source}) must be {wanted}.", field=name) from error


def _file(folder: Path) -> tuple[str, Mapping[str, object]]:
    """The settings' file, if there is one, and what it says; unknown names are refused."""
    path, table = folder / "postroad.toml", _toml(folder / "postroad.toml")
    if table is None:
        path = folder / "pyproject.toml"
        tools = (_toml(path) or {}).get("tool", {})
        table = tools.get("postroad") if isinstance(tools, dict) else None
    if table is None:
        return "", {}
    if not isinstance(table, dict):
        raise BadSetting(f"[tool.postroad] in {path} must be a table.", field="tool.postroad")
    for name in table:
        if name not in DEFAULTS:
            raise BadSetting(
                f"{path} has a setting {name!r} that does not exist; there are {', '.join(DEFAULTS)}.", field=name
            )
    return path.name, table


def _toml(path: Path) -> dict[str, Any] | None:
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise BadSetting(f"{path} could not be read: {error}", field=path.name) from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        if path.name == "pyproject.toml" and "postroad" not in text:
            return None  # somebody else's trouble
        raise BadSetting(f"{path} is not TOML: {error}", field=path.name) from error
