"""`postroad doctor`: what is wrong with an app, its settings and its database, and what to do about it.

What needs a database is imported after the app, which may want to settle itself which SQLite the process uses.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from postroad.engine.config import DEFAULT, Setting, unknown_variables
from postroad.engine.refusals import refusals
from postroad.model.errors import InvalidInput
from postroad.surfaces import configuring
from postroad.surfaces.checks import Check
from postroad.surfaces.output import FAILED, WrongUse, show_json, show_table
from postroad.surfaces.running import load

if TYPE_CHECKING:
    from postroad.engine.app import Postroad

# By what name people look for what is said of a setting, where that is not "settings".
_NAMES = {
    "database_url": "database", "schema": "schema", "secret_key": "secret_key", "secret_keys_former": "secret_key",
    "dispatch.notify_template": "notifier",
}  # fmt: skip


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
    refused = {one.about["field"]: one.detail.rstrip(".") for one in refusals(settings)}
    for field, said in refused.items():
        yield Check("error", _NAMES.get(field, "settings"), said, "no loop starts with it")
    yield from app_checks.of_kinds(post)
    if "dispatch.notify_template" not in refused:
        yield from app_checks.of_notifier(post, settings)
    if not refused.keys() & {"secret_key", "secret_keys_former"}:
        yield from app_checks.of_keys(settings)
    if not refused.keys() & {"database_url", "schema"}:
        yield from database_checks.of_database(post, settings)


def _of_settings(settings: Mapping[str, Setting]) -> Iterator[Check]:
    said = [f"{one.name} ({one.source})" for one in settings.values() if one.source != DEFAULT]
    yield Check("ok", "settings", ", ".join(said) or "all of them have their defaults")
    for variable in unknown_variables():
        found, _, cure = variable.partition(": ")
        yield Check("warning", "settings", found, cure)
