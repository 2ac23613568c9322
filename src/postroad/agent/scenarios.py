"""Scenarios: what happens to an app, step by step in virtual time, and what must come of it. Provisional.

A scenario is a YAML file. Its times are `HH:MM` (the next such moment), `+30m`, `+14d` (after the step
before) or a whole date with its zone. What a step may hold is said by `Step`, what it may expect by `Expect`.
"""

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import msgspec

from postroad.model.errors import InvalidInput

_CLOCK = re.compile(r"(\d\d):(\d\d)(?::(\d\d))?")
_AFTER = re.compile(r"\+(\d+)([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


class BadScenario(InvalidInput):
    """This scenario cannot be read."""


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is misspelt is refused, never ignored."""


class Publish(_Strict, frozen=True, kw_only=True):
    """An event from outside."""

    stream: str
    kind: str
    key: str
    data: Any = None
    version: int = 1


class Send(_Strict, frozen=True, kw_only=True):
    """A dispatch from outside any turn."""

    kind: str
    key: str
    to: str = ""
    body: Any = None


class Fail(_Strict, frozen=True, kw_only=True):
    """The next sends of a kind fail, `times` of them."""

    kind: str
    how: Literal["retry_later", "give_up", "unknown"] = "give_up"
    error: str = "refused"
    times: int = 1


class Refire(_Strict, frozen=True, kw_only=True):
    """A timer's event is published once more under the id it had: the pump died between publish and mark."""

    stream: str
    timer: str
    data: Any = None


class Rearm(_Strict, frozen=True, kw_only=True):
    """A timer is armed again from outside: a new generation."""

    stream: str
    timer: str
    after: float
    data: Any = None


class Other(_Strict, frozen=True, kw_only=True):
    """Another dispatcher claims what is due of a kind, or ends what it claimed, however late."""

    claim: str = ""
    settle: Literal["", "ok", "permanent"] = ""


class Expect(_Strict, frozen=True, kw_only=True):
    """What came of everything since the last expectation.

    Attributes:
        sent: By kind, the dispatches that were delivered: a key, or a mapping with the key and some of `to`,
            `attempt`, `body` (a part of it). Complete: what is not listed must not have been sent.
        dead: By kind, those that died. Complete.
        alerts: `code subject` of each. Complete.
        timers: What is armed now, with the time when it will fire. Complete, if given.
        log: By stream, the new entries: a kind, or {kind: a part of its data}. Complete, if given.
        inbox: By stream, how many events wait, dead ones too.
    """

    sent: dict[str, list[str | dict[str, Any]]] = {}
    dead: dict[str, list[str | dict[str, Any]]] = {}
    alerts: list[str] = []
    timers: dict[str, str] | None = None
    log: dict[str, list[str | dict[str, Any]]] = {}
    inbox: dict[str, int] = {}


class Step(_Strict, frozen=True, kw_only=True):
    """One moment of a scenario.

    First the loops work through everything that is due until `at`; `outage` means that they don't, neither
    on the way nor in this step. Then `deploy` replaces the app, the rest happens in the order below, the loops
    do what is due, and the expectation is held against it all.
    """

    at: str
    outage: bool = False
    deploy: str = ""
    fail: list[Fail] = []
    other: Other | None = None
    send: list[Send] = []
    publish: list[Publish] = []
    refire: list[Refire] = []
    rearm: list[Rearm] = []
    expect: Expect | None = None


class Scenario(_Strict, frozen=True, kw_only=True):
    """A story with its expectations. `app` is `module:attribute` of a function that makes the app."""

    name: str
    app: str
    start: str
    steps: list[Step]


def load(path: Path) -> Scenario:
    """Read a scenario.

    Raises:
        BadScenario: The file cannot be read, is no YAML, or holds something that a scenario has no place for.
    """
    import yaml

    try:
        plain = yaml.load(path.read_text("utf-8"), Loader=_loader())
        return msgspec.convert(plain, Scenario)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, msgspec.ValidationError) as error:
        raise BadScenario(f"{path}: {error}", path=str(path)) from error


def _loader() -> Any:
    """YAML 1.2's scalars: a time like 10:30 is text, not 630 minutes, and `on` is no boolean."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    Loader.yaml_implicit_resolvers = {}

    for tag, pattern, first in (
        ("bool", r"true|false", "tf"),
        ("null", r"null|~|", ["n", "~", ""]),
        ("int", r"-?[0-9]+", "-0123456789"),
        ("float", r"-?[0-9]+\.[0-9]+", "-0123456789"),
    ):
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"(?:{pattern})$"), list(first))
    return Loader


def moment(said: str, now: datetime) -> datetime:
    """The moment that a scenario's time means, at `now`.

    Raises:
        BadScenario: It is no time.
    """
    if match := _AFTER.fullmatch(said):
        return now + timedelta(**{_UNITS[match[2]]: int(match[1])})
    if match := _CLOCK.fullmatch(said):
        hour, minute, second = (int(part or 0) for part in match.groups())
        found = now.replace(hour=hour, minute=minute, second=second, microsecond=0)
        return found if found >= now.replace(microsecond=0) else found + timedelta(days=1)
    try:
        return datetime.fromisoformat(said).astimezone(UTC)
    except ValueError as error:
        raise BadScenario(f"{said!r} is no time.") from error


def start(scenario: Scenario) -> datetime:
    """When a scenario begins."""
    return moment(scenario.start, datetime(1970, 1, 1, tzinfo=UTC))
