"""Tools: functions that a turn may call, with what they may do to the world, and their arguments' types."""

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any, Generic, ParamSpec, TypeVar

import msgspec

from postroad.model.errors import InvalidInput, shown
from postroad.model.ids import check_name
from postroad.model.operations import Effect
from postroad.model.payload import encode

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)
KEY = "key"
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Tool(Generic[P, R_co]):
    """A function that a turn may call; `turn.call` records its calls. Calling it directly is calling the function.

    Attributes:
        name: The function's name.
        description: Its docstring, for models.
        effect: read, idempotent, keyed or unsafe.
        version: Part of what a recorded call is recognized by.
        timeout: How long a call may take, in microseconds.
        schema: The JSON schema of its arguments, for models. What a keyed tool gets as `key` is not among them.
    """

    def __init__(self, fn: Callable[P, R_co], *, effect: Effect, version: int, timeout: int) -> None:
        self.fn = fn
        self.name = check_name(getattr(fn, "__name__", None), "tool")
        self.description = inspect.getdoc(fn) or ""
        self.effect = effect
        self.version = version
        self.timeout = timeout
        hints = _hints(fn, self.name)
        self._signature = _signature(fn, self.name, effect)
        self._arguments = _struct(self.name, self._signature, hints)
        self._result: Any = hints.get("return", Any)
        self.schema: Mapping[str, Any] = _schema(self._arguments, self.name)
        self._check_result()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        return self.fn(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Tool({self.name!r}, effect={self.effect!r}, version={self.version})"

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """The JSON of a call's arguments; InvalidInput if they don't fit."""
        try:
            given = self._signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise InvalidInput(f"Arguments of {self.name}: {error}.", field="arguments") from None
        return self.parse(encode(given, "arguments"))

    def parse(self, arguments: str | bytes) -> str:
        """The arguments that a model gave as JSON, with defaults filled in; InvalidInput if they don't fit."""
        try:
            read = msgspec.json.decode(arguments, type=self._arguments, dec_hook=_decoded)
        except (ValueError, TypeError) as error:  # msgspec's and pydantic's are ValueErrors
            raise InvalidInput(f"Arguments of {self.name}: {error}.", field="arguments") from None
        return encode(read, "arguments")

    def values(self, arguments: str, key: str | None) -> dict[str, Any]:
        """What to call the function with, by name, from what `bind` or `parse` gave."""
        read = msgspec.json.decode(arguments, type=self._arguments, dec_hook=_decoded)
        found = {name: getattr(read, name) for name in self._signature.parameters}
        return found | ({KEY: key} if self.effect == "keyed" else {})

    def result(self, encoded: str) -> Any:
        """A recorded result, as the function's return type has it."""
        return msgspec.json.decode(encoded, type=self._result, dec_hook=_decoded)

    def _check_result(self) -> None:
        try:
            msgspec.json.Decoder(self._result, dec_hook=_decoded)
        except (TypeError, ValueError, NameError, AttributeError) as error:
            raise InvalidInput(f"tool {self.name}: no JSON form for what it returns: {error}", field="tool") from None


def _hints(fn: Callable[..., Any], name: str) -> dict[str, Any]:
    try:
        return typing.get_type_hints(fn, include_extras=True)
    except (NameError, TypeError) as error:
        said = f"tool {name}: its types must be there when it is declared: {error}."
        raise InvalidInput(said, field="tool") from None


def _signature(fn: Callable[..., Any], name: str, effect: Effect) -> inspect.Signature:
    """The function's parameters without a keyed tool's key."""
    signature = inspect.signature(fn)
    for parameter in signature.parameters.values():
        if parameter.kind not in _NAMED:
            said = f"tool {name}: models name every argument; {parameter} cannot be named."
            raise InvalidInput(said, field="tool")
    if effect != "keyed":
        return signature
    if KEY not in signature.parameters:
        said = f'tool {name} is keyed, so it needs a parameter `{KEY}: str = ""` to hand to its destination.'
        raise InvalidInput(said, field="tool")
    rest = [parameter for parameter in signature.parameters.values() if parameter.name != KEY]
    return signature.replace(parameters=rest)


def _struct(name: str, signature: inspect.Signature, hints: Mapping[str, Any]) -> type[msgspec.Struct]:
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    for parameter in signature.parameters.values():
        if parameter.name not in hints:
            raise InvalidInput(f"tool {name}: the argument {parameter.name!r} has no type.", field="tool")
        form = hints[parameter.name]
        bare = parameter.default is inspect.Parameter.empty
        fields.append((parameter.name, form) if bare else (parameter.name, form, parameter.default))
    try:
        made = msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)
        msgspec.json.Decoder(made, dec_hook=_decoded)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"tool {name}: no JSON form for its arguments: {error}", field="tool") from None
    return made


def _schema(arguments: type[msgspec.Struct], name: str) -> dict[str, Any]:
    try:
        (top,), parts = msgspec.json.schema_components(
            [arguments], schema_hook=_foreign_schema, ref_template="#/$defs/{name}"
        )
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"tool {name}: no schema for its arguments: {error}", field="tool") from None
    own = top["$ref"].rpartition("/")[2]
    flat = dict(parts.pop(own))
    flat.pop("title", None)
    return flat | ({"$defs": parts} if parts else {})


def _foreign_schema(form: type) -> dict[str, Any]:
    schema = getattr(form, "model_json_schema", None)  # pydantic, without importing it
    if schema is None:
        raise NotImplementedError
    found: dict[str, Any] = schema()
    return found


def _decoded(form: type, value: Any) -> Any:
    validate = getattr(form, "model_validate", None)  # pydantic, without importing it
    if validate is None:
        raise NotImplementedError(f"no JSON form for {shown(form)}")
    return validate(value)
