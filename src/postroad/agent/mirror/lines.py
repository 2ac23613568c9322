"""The lines of a mirror, one per entry, and the names of its files."""

import hashlib
import re
from urllib.parse import unquote_to_bytes

import msgspec

from postroad.model.events import Entry

VERSION = 1
WHOLE_MAX = 120  # characters of a file's name, without its suffix
_CUT = 80
_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789_-")
_BREAKS = re.compile("[\n\r\x85\u2028\u2029]")
# Outside of a JSON text's strings a line's end is a blank like any other; inside they have none of the first two.
_UNBROKEN = {0x0A: " ", 0x0D: " ", 0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """An entry as a mirror has it.

    Attributes:
        v: The version of this form.
        stream: The stream's name.
        seq: The entry's place, dense from 1.
        id: The entry's id in its stream.
        parent: The id of the entry before it; None for the first one.
        kind: Its kind's name.
        version: The version of the kind.
        at: When it was committed, RFC 3339 in UTC with microseconds.
        cause: The id of the turn that recorded it; None: it came from outside.
        data: The payload.
    """

    v: int
    stream: str
    seq: int
    id: str
    parent: str | None
    kind: str
    version: int
    at: str
    cause: str | None
    data: msgspec.Raw


_decoder = msgspec.json.Decoder(Line)


def line_of(entry: Entry, parent: str | None) -> Line:
    """The line of an entry; `parent`: the id of the entry before it."""
    return Line(
        v=VERSION,
        stream=entry.stream,
        seq=entry.seq,
        id=entry.key,
        parent=parent,
        kind=entry.kind,
        version=entry.version,
        at=_at(entry),
        cause=entry.cause,
        data=msgspec.Raw(_unbroken(entry.raw).encode()),
    )


def written(line: Line) -> bytes:
    """A line as it stands in a file, with its end. Whoever splits the file's text into lines finds it whole."""
    return _unbroken(msgspec.json.encode(line).decode()).encode() + b"\n"


def read(raw: bytes) -> Line | None:
    """The line that was written so; None: this is no line of a mirror."""
    try:
        return _decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def is_of(line: Line, entry: Entry) -> bool:
    """Whether a line says what the log says. A turn that runs again gives its entries the same ids at another time."""
    same = (line.stream, line.seq, line.id, line.kind, line.at) == (
        entry.stream,
        entry.seq,
        entry.key,
        entry.kind,
        _at(entry),
    )
    return same and bytes(line.data) == _unbroken(entry.raw).encode()


def stem(name: str) -> str:
    """A file's name without suffixes, for any text: never the same for two, also where case and accents don't count.

    Small letters, digits, `-` and `_` stand for themselves, all other bytes are `%` and two digits. A long name is cut,
    and a hash follows behind `~`.
    """
    escaped = "".join(chr(byte) if byte in _PLAIN else f"%{byte:02x}" for byte in name.encode())
    if len(escaped) <= WHOLE_MAX:
        return escaped
    kept = re.sub("%[0-9a-f]?$", "", escaped[:_CUT])
    return f"{kept}~{hashlib.sha256(name.encode()).hexdigest()[:32]}"


def name_of(given: str) -> str | None:
    """What a stem is the stem of; None: it was cut, or is none."""
    try:
        name = unquote_to_bytes(given).decode()
    except UnicodeDecodeError:
        return None
    return name if name and stem(name) == given else None


def _at(entry: Entry) -> str:
    return entry.recorded_at.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _unbroken(text: str) -> str:
    return text.translate(_UNBROKEN) if _BREAKS.search(text) else text
