"""What may be stored: text and JSON that both databases keep byte for byte. The rest is refused at the door."""

import hashlib
import math
import re
from typing import Any

import msgspec

from postroad.model.errors import InvalidInput, shown

PAYLOAD_BYTES_MAX = 256 * 1024
DEPTH_MAX = 64
KEY_BYTES_MAX = 512
NAME_BYTES_MAX = 255
ERROR_CHARS_MAX = 2_000
VERSION_MAX = 2**31 - 1  # what a column for it holds on Postgres
_FLOAT = re.compile(r"\d[.eE]")
INT_MIN, INT_MAX = -(2**63), 2**64 - 1


def text(value: object, field: str, *, bytes_max: int = KEY_BYTES_MAX, empty: bool = False) -> str:
    """The value, if it is text that can be stored; else InvalidInput naming the field."""
    if not isinstance(value, str):
        raise InvalidInput(f"{field} must be a str, got {type(value).__name__}.", field=field)
    if not empty and not value.strip():
        raise InvalidInput(f"{field} must not be empty.", field=field)
    flaw = _flaw(value)
    if flaw:
        raise InvalidInput(f"{field} holds {flaw}.", field=field)
    if len(value.encode()) > bytes_max:
        raise InvalidInput(f"{field} is longer than {bytes_max} bytes.", field=field)
    return value


def whole(value: object, field: str, *, most: int, least: int = 1) -> int:
    """The value, if it is an integer within these bounds; else InvalidInput naming the field."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidInput(f"{field} must be a whole number from {least} to {most}, got {shown(value)}.", field=field)
    return value


def callable_(fn: object, field: str) -> None:
    """Nothing, if the value can be called; else InvalidInput naming the field."""
    if not callable(fn):
        raise InvalidInput(f"{field} must be a function, got {shown(fn)}.", field=field)


def _flaw(value: str) -> str:
    if "\0" in value:
        return "the character NUL"
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            return "a lone surrogate"
    return ""


def encode(data: object, field: str = "data", *, bytes_max: int = PAYLOAD_BYTES_MAX) -> str:
    """The JSON text of a payload: dataclass, msgspec Struct, attrs, pydantic model, TypedDict or plain values.

    Raises:
        InvalidInput: NUL, a lone surrogate, NaN or Infinity, an integer beyond 64 bits, a depth above 64, a
            size above `bytes_max`, or a value that JSON has no form for; the message names the path.
    """
    plain = builtins(data, field)
    if not _sound(plain, 1):
        _check(plain, field, 1)
    encoded = msgspec.json.encode(plain)
    if len(encoded) > bytes_max:
        raise InvalidInput(f"{field} takes {len(encoded)} bytes, more than {bytes_max}.", field=field)
    return encoded.decode()


def builtins(data: object, field: str = "data") -> Any:
    """The payload as dicts, lists and scalars."""
    try:
        return msgspec.to_builtins(data, str_keys=True, enc_hook=_foreign)
    except RecursionError:
        raise InvalidInput(f"{field} is nested deeper than {DEPTH_MAX}.", field=field) from None
    except (TypeError, ValueError, NotImplementedError, OverflowError) as error:
        raise InvalidInput(f"{field} has no JSON form: {error}.", field=field) from None


def _foreign(value: object) -> object:
    dump = getattr(value, "model_dump", None)  # pydantic, without importing it
    if dump is None:
        raise NotImplementedError(f"objects of type {type(value).__name__} are not supported")
    return dump(mode="json")


def _sound(value: Any, depth: int) -> bool:
    """Whether `_check` has nothing to say against it, as most often: the path that it says costs most of its time."""
    kind = type(value)
    if kind is dict or kind is list or kind is tuple:
        if depth > DEPTH_MAX or (kind is dict and _flaw("".join(value))):
            return False
        for item in value.values() if kind is dict else value:
            if type(item) is str:
                if _flaw(item):
                    return False
            elif not _sound(item, depth + 1):
                return False
        return True
    if kind is str:
        return not _flaw(value)
    if kind is float:
        return math.isfinite(value)
    return kind is not int or INT_MIN <= value <= INT_MAX


def _check(value: Any, path: str, depth: int) -> None:
    """Refuse what one of the databases would not keep, and say where it is."""
    kind = type(value)
    if depth > DEPTH_MAX and kind in (dict, list, tuple):
        raise InvalidInput(f"{path[:200]} is nested deeper than {DEPTH_MAX}.", field=path[:200])
    if kind is str:
        if flaw := _flaw(value):
            raise InvalidInput(f"{path[:200]} holds {flaw}.", field=path[:200])
    elif kind is dict:
        for key, item in value.items():
            _check(key, f"{path} key", depth)
            _check(item, f"{path}.{key}", depth + 1)
    elif kind is list or kind is tuple:
        for index, item in enumerate(value):
            _check(item, f"{path}[{index}]", depth + 1)
    elif kind is float:
        if not math.isfinite(value):
            raise InvalidInput(f"{path[:200]} is {value}, which JSON has no form for.", field=path[:200])
    elif kind is int and not INT_MIN <= value <= INT_MAX:
        raise InvalidInput(f"{path[:200]} is an integer beyond 64 bits.", field=path[:200])


def canonical(encoded: str) -> str:
    """One rendering of equal JSON texts: sorted keys, no spaces, integral floats as integers."""
    if encoded.startswith('"') and "\\" not in encoded:
        return encoded
    value = msgspec.json.decode(encoded)
    if _FLOAT.search(encoded):  # perhaps: it may be in a string
        value = _numbers(value)
    return msgspec.json.encode(value, order="sorted").decode()


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


def content_hash(kind: str, *parts: str) -> str:
    """What "same content" is held against: the kind and the canonical JSON of each part."""
    digest = hashlib.sha256(kind.encode())
    for part in parts:
        digest.update(b"\0" + canonical(part).encode())
    return digest.hexdigest()


def same_content(kind: str, encoded: str, other_kind: str, other_encoded: str) -> bool:
    """Whether two payloads are the same content: equal kinds and equal canonical JSON."""
    return kind == other_kind and (encoded == other_encoded or canonical(encoded) == canonical(other_encoded))


def safe_error(error: object, chars_max: int = ERROR_CHARS_MAX) -> str:
    """An error's text, made fit to be stored: no NUL or lone surrogate, and bounded."""
    said = _described(error) if isinstance(error, BaseException) else str(error)
    cut = said[: chars_max + 1]
    clean = cut.replace("\0", "�").encode("utf-8", "replace").decode()
    return clean if len(clean) <= chars_max else clean[: chars_max - 1] + "…"


def _described(error: BaseException) -> str:
    name = type(error).__name__
    try:
        said = str(error)
    except BaseException as broken:  # a user's __str__ may raise anything
        return f"{name} (its text could not be had: {type(broken).__name__})"
    if not said or said.rstrip(".") == name:
        return name
    return said if said.startswith((f"{name}: ", f"{name}. ")) else f"{name}: {said}"
