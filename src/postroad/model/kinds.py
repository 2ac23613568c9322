"""Kinds: stored names with the type of their payload, and how older payloads become today's."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

import msgspec

from postroad.model.errors import InvalidInput, shown
from postroad.model.events import Event
from postroad.model.ids import RESERVED_PREFIXES, check_name
from postroad.model.payload import VERSION_MAX, callable_, encode, whole

T = TypeVar("T")
Upgrade = Callable[[Any], Any]


class Kind(Generic[T]):
    """A stored name with the type of its payload: a dataclass, msgspec Struct, pydantic model, TypedDict or dict.

    The version is stored with each row; `upgrade` turns older payloads into today's, one step each:
    `upgrade={1: from_1_to_2}` gets the plain JSON value of version 1 and returns that of version 2.
    `aliases` are former names, under which rows may still wait.

    >>> MAIL = Kind("mail", dict[str, str])
    """

    __slots__ = ("_decoder", "aliases", "body", "name", "upgrade", "version")

    def __init__(
        self,
        name: str,
        body: type[T],
        *,
        version: int = 1,
        aliases: Sequence[str] = (),
        upgrade: Mapping[int, Upgrade] | None = None,
    ) -> None:
        self.name = check_name(name, "kind")
        if self.name.startswith(RESERVED_PREFIXES) and not self.name.startswith("postroad."):
            raise InvalidInput(f"kind must not begin with {RESERVED_PREFIXES}.", field="kind")
        self.body = body
        self.version = whole(version, "version", most=VERSION_MAX)
        self.aliases = _aliases(aliases)
        self.upgrade: dict[int, Upgrade] = _steps({} if upgrade is None else upgrade, self.version)
        self._decoder = _decoder(body, self.name)

    def __repr__(self) -> str:
        return f"Kind({self.name!r}, version={self.version})"

    @property
    def names(self) -> tuple[str, ...]:
        """Today's name and the former ones."""
        return (self.name, *self.aliases)

    def of(self, item: Event) -> T | None:
        """The typed payload if the event or entry is of this kind, else None."""
        if item.kind not in self.names:
            return None
        return self.decode(item.raw, item.version)

    def encode(self, data: object, field: str = "data") -> str:
        """The payload's JSON text, held against this kind's type; InvalidInput names what is wrong."""
        encoded = encode(data, field)
        try:
            decoded = self._decoder(encoded)
        except (ValueError, TypeError) as error:
            raise InvalidInput(f"{field} does not fit kind {self.name!r}: {error}", field=field) from error
        if hasattr(data, "model_dump") and type(decoded) is type(data):
            _check_whole(decoded, data, field)
        return encoded

    def takes_none(self) -> bool:
        """Whether None is a payload of this kind."""
        try:
            return self._decoder("null") is None
        except (ValueError, TypeError):
            return False

    def decode(self, raw: str, version: int) -> T:
        """The typed payload of a stored text, upgraded from the version it was written in.

        Raises:
            ValueError: The payload does not fit this kind's type (msgspec.ValidationError among others).
        """
        if version >= self.version:
            return self._decoder(raw)
        plain = msgspec.json.decode(raw)
        for step in range(version, self.version):
            if step in self.upgrade:
                plain = self.upgrade[step](plain)
        return self._decoder(encode(plain))


def _check_whole(decoded: object, data: object, field: str) -> None:
    """Refuse a pydantic model whose JSON leaves something out or masks it: it would arrive as something else."""
    lost = [name for name, value in vars(data).items() if vars(decoded).get(name) != value]
    if lost:
        raise InvalidInput(
            f"{field} would not arrive as it is: the JSON of {type(data).__name__} leaves out or masks "
            f"{', '.join(sorted(lost))}.",
            field=field,
        )


def _aliases(aliases: Sequence[str]) -> tuple[str, ...]:
    if isinstance(aliases, str) or not isinstance(aliases, Iterable):
        raise InvalidInput(f"aliases must be a sequence of names, got {shown(aliases)}.", field="aliases")
    return tuple(check_name(alias, "aliases") for alias in aliases)


def _steps(upgrade: Mapping[int, Upgrade], version: int) -> dict[int, Upgrade]:
    if not isinstance(upgrade, Mapping):
        raise InvalidInput(f"upgrade must map versions to functions, got {shown(upgrade)}.", field="upgrade")
    for step, fn in upgrade.items():
        if isinstance(step, bool) or not isinstance(step, int) or not 1 <= step < version:
            raise InvalidInput(
                f"upgrade starts from versions below this kind's ({version}), got {shown(step)}.", field="upgrade"
            )
        callable_(fn, "upgrade")
    return dict(upgrade)


def _decoder(body: type[T], name: str) -> Callable[[str], T]:
    validate = getattr(body, "model_validate_json", None)  # pydantic, without importing it
    if validate is not None:
        return cast(Callable[[str], T], validate)
    try:
        return msgspec.json.Decoder(body).decode
    except (TypeError, ValueError, NameError, AttributeError) as error:
        raise InvalidInput(
            f"body of kind {name!r} is no type that JSON has a form for: {error}", field="body"
        ) from error
