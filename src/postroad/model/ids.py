"""Identity from the cause: ids that are the same on every retry, and the prefixes that are ours."""

import hashlib
import re
from collections.abc import Iterable

from postroad.model.errors import InvalidInput
from postroad.model.payload import NAME_BYTES_MAX, text

RESERVED_PREFIXES = ("postroad.", "evt:", "out:")
DELEGATED_PREFIX = "postroad.delegation:"
_TAKEN_BY_GENERATIONS = re.compile(r"#\d+$")
SCHEMA_BYTES_MAX = 63  # Postgres would cut a longer one, and never find it again
_MARKS = re.compile(r'["%:{}\\]')  # what means something to a driver or to our statements


def stream_type(stream: str) -> str:
    """The part of a stream's name before the first slash."""
    return stream.partition("/")[0]


def subject(stream: str) -> str:
    """The part of a stream's name after the first slash."""
    return stream.partition("/")[2]


def check_stream(stream: object, field: str = "stream") -> str:
    """A stream's name `<type>/<id>`, or InvalidInput naming the field."""
    name = text(stream, field)
    if not stream_type(name).strip() or not subject(name).strip():
        raise InvalidInput(f"{field} must look like type/id, got {name[:80]!r}.", field=field)
    return name


def check_name(name: object, field: str) -> str:
    """A kind's or handler's name, or InvalidInput naming the field."""
    return text(name, field, bytes_max=NAME_BYTES_MAX)


def check_schema(name: object, field: str = "schema") -> str:
    """The name of a Postgres schema that can be quoted as it is, or InvalidInput naming the field."""
    value = text(name, field, bytes_max=SCHEMA_BYTES_MAX)
    if _MARKS.search(value):
        raise InvalidInput(
            f"{field} must be a name without quotes, %, :, braces and backslashes, got {value!r}.", field=field
        )
    return value


def check_event_key(key: object, field: str = "key") -> str:
    """A key of an event that a user chose, or InvalidInput naming the field."""
    value = text(key, field)
    if value.startswith(RESERVED_PREFIXES):
        raise InvalidInput(
            f"{field} must not begin with {' or '.join(RESERVED_PREFIXES)}; these are ours.", field=field
        )
    return value


def check_timer_key(key: object, field: str = "key") -> str:
    """A timer's key, or InvalidInput naming the field."""
    value = text(key, field)
    if _TAKEN_BY_GENERATIONS.search(value):
        raise InvalidInput(f"{field} must not end with #<number>; later generations of timers do.", field=field)
    return value


def timer_event_id(key: str, generation: int) -> str:
    """The event that a timer's firing publishes: one per generation."""
    return f"evt:{key}#{generation}" if generation else f"evt:{key}"


def outcome_id(key: str, epoch: int, status: str) -> str:
    """The event that tells a stream how its dispatch ended: one per key, epoch and status."""
    return f"out:{key}:{epoch}:{status}" if epoch else f"out:{key}:{status}"


def task_id(parent: str, key: str) -> str:
    """The event by which a stream's delegation reaches whoever does it."""
    digest = hashlib.sha256(f"{parent}\0{key}".encode())
    return f"postroad.task:{digest.hexdigest()[:32]}"


def delegated_id(key: str) -> str:
    """The event that tells a stream how its delegation ended: one per key, and no event of anybody else's."""
    return f"{DELEGATED_PREFIX}{key}"


def turn_id(stream: str, event_ids: Iterable[str]) -> str:
    """A turn's id: the same for the same set of events of a stream, whoever processes it, however often."""
    digest = hashlib.sha256(stream.encode())
    for event_id in event_ids:
        digest.update(b"\0" + event_id.encode())
    return digest.hexdigest()[:32]


def run_id(token: str, stream: str) -> str:
    """The id of the run that a claim of a stream starts; whoever knows the claim's token can look it up."""
    return hashlib.sha256(f"{token}\0{stream}".encode()).hexdigest()[:32]


def entry_id(turn: str, ordinal: int) -> str:
    """The id of an entry that a turn recorded."""
    return f"postroad.{turn}.{ordinal}"


def key_in_turn(turn: str, ordinal: int) -> str:
    """The key of a dispatch or event for which a turn gave none."""
    return f"{turn}/{ordinal}"


def operation_key(turn: str, ordinal: int, tool: str, arguments: str) -> str:
    """The key that a keyed tool's call gives to its destination; `arguments` in their canonical form."""
    digest = hashlib.sha256(f"{tool}\0{arguments}".encode()).hexdigest()[:16]
    return f"{turn}/{ordinal}/{digest}"
