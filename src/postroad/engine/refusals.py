"""What of the settings no loop would start with: for whoever starts them, and for whoever only looks."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from postroad.engine import config, notifying
from postroad.engine.config import CODE, BadSetting, Setting
from postroad.model.acks import Keyring
from postroad.model.clock import SECOND, span
from postroad.model.errors import InvalidInput
from postroad.model.ids import check_schema

SHORTEST_POLL, LONGEST_POLL = SECOND // 1000, 30 * SECOND
Found = Mapping[str, Setting]


def refusals(found: Found) -> Iterator[BadSetting]:
    """Every setting that is refused, as an error that names it and the place that says it; no secret is shown."""
    for name, check in _CHECKS.items():
        try:
            check(found)
        except BadSetting as error:
            yield error
        except InvalidInput as error:
            yield BadSetting(f"{name} ({found[name].source}): {error.detail}", field=name)


def grace(found: Found) -> int:
    """How long a process has to finish what is under way, in microseconds; BadSetting if it is no such time."""
    setting = found["grace"]
    try:
        return span(setting.value, setting.name)
    except InvalidInput:
        raise _bad(setting, "0 seconds or more, and not for ever") from None


def poll(found: Found) -> int:
    """How often a loop looks that hears of nothing, in microseconds; BadSetting if that is too often or too rare."""
    setting = found["poll"]
    try:
        length = span(setting.value, setting.name)
    except InvalidInput:
        length = 0
    if not SHORTEST_POLL <= length <= LONGEST_POLL:
        raise _bad(setting, "0.001 to 30 seconds")
    return length


def _bad(setting: Setting, wanted: str) -> BadSetting:
    return BadSetting(f"{setting.name} ({setting.source}) must be {wanted}, got {setting.shown}.", field=setting.name)


def _database(found: Found) -> None:
    """That there is one may be said later; what the code says was refused there."""
    url = found["database_url"]
    if url.value is None or url.source == CODE:
        return
    from postroad.store import urls  # SQLAlchemy comes when it is needed only

    config.check_url(url.value, url.source)
    urls.checked(url.value)


def _schema(found: Found) -> None:
    url, schema = found["database_url"].value, found["schema"].value
    if schema is None:
        return
    check_schema(schema)
    if url is not None and url.startswith("sqlite"):
        raise InvalidInput("SQLite has no schemas; leave it out.")


def _keys(found: Found) -> None:
    Keyring(config.secret_keys(found)[:1])


def _former_keys(found: Found) -> None:
    Keyring(config.secret_keys(found)[1:])


_CHECKS: Mapping[str, Callable[[Found], Any]] = {
    "database_url": _database,
    "schema": _schema,
    "secret_key": _keys,
    "secret_keys_former": _former_keys,
    "grace": grace,
    "poll": poll,
    "dispatch.notify_template": notifying.of,
}
