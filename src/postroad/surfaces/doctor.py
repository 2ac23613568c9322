"""`postroad doctor`: what is wrong with an app, its settings and its database, and what to do about it.

What needs a database is imported after the app, which may want to settle itself which SQLite the process uses.
"""

import os
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING

from postroad.engine.config import DEFAULT, ENVIRONMENT, Setting
from postroad.model.errors import InvalidInput
from postroad.surfaces import configuring
from postroad.surfaces.checks import Check
from postroad.surfaces.output import FAILED, WrongUse, show_json, show_table
from postroad.surfaces.running import load

if TYPE_CHECKING:
    from postroad.engine.app import Postroad

PREFIX = "POSTROAD_"
# Not settings: what a process is told about itself.
_OF_THE_PROCESS = ("POSTROAD_BUNDLED_SQLITE", "POSTROAD_FAILPOINT")


def show(reference: str, database: str | None, schema: str | None, as_json: bool) -> int:
    """Print what was looked at, one line each, and return the exit code: 1 if there is an error.

    Raises:
        BadApp: The app cannot be imported.
        WrongUse: The command line contradicts the app's code.
    """
    found = list(examined(load(reference), database=database, schema=schema))
    healthy = all(check.level != "error" for check in found)
    if as_json:
        show_json({"healthy": healthy, "checks": found})
    else:
        show_table(("", "", ""), [(check.level, check.name, check.line) for check in found])
    return 0 if healthy else FAILED


def examined(post: "Postroad", *, database: str | None, schema: str | None) -> Iterator[Check]:
    """Everything that was looked at; what cannot be looked at, since something before it is wrong, is left out."""
    from postroad.surfaces import app_checks, database_checks

    try:
        settings = configuring.of_app(post, database=database, schema=schema)
    except WrongUse:
        raise
    except InvalidInput as error:
        yield Check("error", "settings", str(error), "see docs/settings.md")
        return
    yield from _of_settings(settings)
    yield from app_checks.of_kinds(post)
    yield from app_checks.of_notifier(post, settings)
    yield from app_checks.of_keys(settings)
    yield from database_checks.of_database(post, settings)


def _of_settings(settings: Mapping[str, Setting]) -> Iterator[Check]:
    said = [f"{one.name} ({one.source})" for one in settings.values() if one.source != DEFAULT]
    yield Check("ok", "settings", ", ".join(said) or "all of them have their defaults")
    names = [name for names in ENVIRONMENT.values() for name in names]
    for variable in sorted(os.environ):
        if variable.startswith(PREFIX) and variable not in (*names, *_OF_THE_PROCESS):
            meant = "".join(f"did you mean {near}?" for near in get_close_matches(variable, names, n=1))
            yield Check("warning", "settings", f"{variable} in the environment is no setting", meant or "remove it")
