"""Settings and where they come from: code > command line > environment > `postroad.toml` > defaults.

The file is `postroad.toml` in the working directory or, without one, the table `[tool.postroad]` of the
`pyproject.toml` there. In the environment a setting is `POSTROAD_` and its name in capitals, a table's name first
(`POSTROAD_RETENTION_DELIVERED`); the database's URL may also be `DATABASE_URL`. Lists are JSON there.
"""

import json
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec

from postroad.model import lengths
from postroad.model.errors import InvalidInput
from postroad.model.retention import Retention

DEFAULT, CODE, COMMAND_LINE = "default", "code", "command line"
HIDDEN = "***"
PREFIX = "POSTROAD_"
# Not settings: what a process is told about itself.
_OF_THE_PROCESS = (f"{PREFIX}BUNDLED_SQLITE", f"{PREFIX}FAILPOINT")
_OF_TESTS = f"{PREFIX}TEST_"  # what a test suite is told, which the processes that it starts inherit
_SCHEMES = re.compile(r"(sqlite|postgres|postgresql)(\+\w+)?://")
_SECRET = re.compile(r"([?&][^=&]*(?:password|secret|token)[^=&]*=)[^&]*", re.IGNORECASE)


class BadSetting(InvalidInput):
    """A setting is wrong or missing."""


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


def _typed(kind: Any) -> Callable[[Any], Any]:
    return lambda value: msgspec.convert(value, kind, strict=not isinstance(value, str))


def _texts(value: Any) -> Sequence[str]:
    found: list[str] = msgspec.convert(json.loads(value) if isinstance(value, str) else value, list[str])
    return found


def _same(value: Any) -> Any:
    return value


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """A setting that there is: what it reads as, what it is if nobody says it, and how people may see it."""

    wanted: str
    read: Callable[[Any], Any]
    default: Any = None
    plain: Callable[[Any], Any] = _same


_TEXT = Known(wanted="a text", read=_typed(str))
_SECONDS = Known(wanted="a number of seconds", read=_typed(float))
_FLAG = Known(wanted="true or false", read=_typed(bool), default=True)
_TEXTS = Known(wanted="a list of texts", read=_texts)
_KEPT = Known(
    wanted="a length of time, such as 12h or 7d",
    read=lambda value: lengths.read(value, "length"),
    plain=lengths.written,
)
_with = msgspec.structs.replace

KNOWN: Mapping[str, Known] = {
    "database_url": _with(_TEXT, plain=masked),
    "schema": _TEXT,
    "secret_key": _with(_TEXT, plain=lambda _: HIDDEN),
    "secret_keys_former": _with(_TEXTS, default=(), plain=lambda keys: [HIDDEN] * len(keys)),
    "grace": _with(_SECONDS, default=25.0),
    "poll": _with(_SECONDS, default=0.25),
    "dispatch.notify_template": _TEXTS,
    "dispatch.payload_in_argv": _with(_FLAG, default=False),
    "retention.enabled": _FLAG,
    **{
        f"retention.{field.name}": _with(_FLAG if field.type is bool else _KEPT, default=field.default)
        for field in msgspec.structs.fields(Retention)
    },
}
_TABLES = frozenset(name.partition(".")[0] for name in KNOWN if "." in name)
DEFAULTS: Mapping[str, Any] = {name: known.default for name, known in KNOWN.items()}
ENVIRONMENT: Mapping[str, tuple[str, ...]] = {
    name: (f"{PREFIX}{name.replace('.', '_').upper()}", *(("DATABASE_URL",) if name == "database_url" else ()))
    for name in KNOWN
}


class Setting(msgspec.Struct, frozen=True):
    """A setting's value and the place that decided it."""

    name: str
    value: Any
    source: str

    @property
    def plain(self) -> Any:
        """The value as it may be written down: lengths of time as texts, secrets masked."""
        return None if self.value is None else KNOWN[self.name].plain(self.value)

    @property
    def shown(self) -> str:
        """The value as people may see it: without secrets."""
        return json.dumps(self.plain) if isinstance(self.plain, bool | list | tuple) else str(self.plain)

    def __repr__(self) -> str:
        return f"Setting({self.name!r}, {self.shown!r}, {self.source!r})"


def settings(
    given: Mapping[str, object] | None = None,
    *,
    code: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> dict[str, Setting]:
    """Every setting by its name, a table's name first (`retention.delivered`).

    `grace` and `poll` are seconds, what is in `retention` microseconds.

    Args:
        given: What the command line said; None values count as not said.
        code: What the app's code said; None values count as not said.

    Raises:
        BadSetting: An unknown name or a value of the wrong type, naming the place. No value is shown.
    """
    environ = os.environ if environ is None else environ
    path, written = _file(Path.cwd() if cwd is None else cwd)
    said = [
        *((CODE, name, value) for name, value in (code or {}).items()),
        *((COMMAND_LINE, name, value) for name, value in (given or {}).items()),
        *((variable, name, environ.get(variable) or None) for name in KNOWN for variable in ENVIRONMENT[name]),
        *((path, name, value) for name, value in written.items()),
    ]
    found = {name: Setting(name, value, DEFAULT) for name, value in DEFAULTS.items()}
    for source, name, value in reversed(said):  # the nearest one comes last, and wins
        if value is not None:
            found[name] = Setting(name, _converted(name, value, source), source)
    return found


def database_url(
    explicit: str | None = None, *, environ: Mapping[str, str] | None = None, cwd: Path | None = None
) -> tuple[str, str]:
    """The database's URL and the place that it comes from. `explicit` is what code or the command line said.

    Raises:
        BadSetting: There is none anywhere, or it is not one of sqlite:///…, postgres://… or postgresql://….
    """
    if explicit is not None:
        return check_url(explicit, "--database"), "explicit"
    found = settings(environ=environ, cwd=cwd)["database_url"]
    if found.value is None:
        raise BadSetting(
            "No database is configured: set POSTROAD_DATABASE_URL (or DATABASE_URL), write database_url into "
            "postroad.toml, or pass one, such as sqlite:///app.db or postgresql://user@host/name.",
            field="database_url",
        )
    return check_url(found.value, found.source), found.source


def secret_keys(found: Mapping[str, Setting]) -> tuple[str, ...]:
    """The server's keys: the first one signs, all of them verify; none if there is no `secret_key`."""
    key = found["secret_key"].value
    return () if key is None else (key, *found["secret_keys_former"].value)


def retention(found: Mapping[str, Setting]) -> Retention | None:
    """How long what has ended is kept; None: for ever."""
    if not found["retention.enabled"].value:
        return None
    return Retention(**{name: found[f"retention.{name}"].value for name in Retention.__struct_fields__})


def nearest(name: str) -> str:
    """The setting that somebody may have meant; '' if none is like it."""
    ends = {known.rpartition(".")[2]: known for known in KNOWN} | {known: known for known in KNOWN}
    tried = (name, name.rpartition(".")[2])
    return next((ends[close] for one in tried for close in get_close_matches(one, ends, n=1)), "")


def unknown_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """A sentence on each variable of the environment that looks like a setting and is none: it would be passed over.

    None: of the process's environment. No value is shown.
    """
    known = [name for names in ENVIRONMENT.values() for name in names]
    return [
        f"{variable} in the environment is no setting: {_cure(variable)}"
        for variable in sorted(os.environ if environ is None else environ)
        if variable.startswith(PREFIX)
        and not variable.startswith(_OF_TESTS)
        and variable not in (*known, *_OF_THE_PROCESS)
    ]


def _cure(variable: str) -> str:
    known = [first.removeprefix(PREFIX) for first, *_ in ENVIRONMENT.values()]
    near = get_close_matches(variable.removeprefix(PREFIX), known, n=1)
    return f"did you mean {PREFIX}{near[0]}?" if near else "remove it"


def check_url(url: str, source: str) -> str:
    """The URL, if it is one of a database that we work with; else BadSetting, which shows no password."""
    if not _SCHEMES.match(url):
        raise BadSetting(
            f"The database's URL ({source}) must begin with sqlite:///, postgres:// or postgresql://, "
            f"got {masked(url)}.",
            field="database_url",
        )
    return url


def _converted(name: str, value: Any, source: str) -> Any:
    try:
        return KNOWN[name].read(value)
    except (InvalidInput, ValueError):  # msgspec's and json's errors are ValueErrors
        # The value may be a secret, and so may the error's text.
        raise BadSetting(f"{name} ({source}) must be {KNOWN[name].wanted}.", field=name) from None


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
    flat = _flat(table)
    for name in flat:
        if name not in KNOWN:
            if name in _TABLES:
                raise BadSetting(f"[{name}] in {path} must be a table.", field=name)
            meant = nearest(name)
            cure = f"did you mean {meant}?" if meant else f"there are {', '.join(KNOWN)}."
            raise BadSetting(f"{path} has a setting {name!r} that does not exist; {cure}", field=name)
    return path.name, flat


def _flat(table: Mapping[str, object]) -> dict[str, object]:
    """The settings of a file with their tables' names in front."""
    flat: dict[str, object] = {}
    for name, value in table.items():
        if isinstance(value, dict) and name not in KNOWN and (value or name in _TABLES):
            flat |= {f"{name}.{inner}": one for inner, one in value.items()}
        else:
            flat[name] = value
    return flat


def _toml(path: Path) -> dict[str, Any] | None:
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        raise BadSetting(f"{path} could not be read: it is not UTF-8.", field=path.name) from None
    except OSError as error:
        raise BadSetting(f"{path} could not be read: {error.strerror}.", field=path.name) from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        if path.name == "pyproject.toml" and "postroad" not in text:
            return None  # somebody else's trouble
        raise BadSetting(f"{path} is not TOML: {error}", field=path.name) from error
