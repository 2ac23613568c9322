"""What must hold of a mirror's files, whatever died while it wrote them."""

import json
from collections.abc import Sequence
from pathlib import Path

from postroad import Entry
from postroad.agent.mirror import Mirror

Line = tuple[int, str, str | None]


def files_of(mirror: Mirror, stream: str) -> list[Path]:
    """The files of a stream, oldest first."""
    path = mirror.path(stream)
    return [*sorted(path.with_suffix(".old").glob("*.jsonl")), *([path] if path.exists() else [])]


def lines_of(mirror: Mirror, stream: str) -> list[Line]:
    """Place, id and parent of each whole line that is there, in order."""
    raw = b"".join(path.read_bytes() for path in files_of(mirror, stream))
    read = [json.loads(line) for line in raw.split(b"\n")[:-1]]
    assert {line["stream"] for line in read} <= {stream}
    return [(line["seq"], line["id"], line["parent"]) for line in read]


def aside_of(mirror: Mirror, stream: str) -> list[bytes]:
    """The lines that were set aside; none is there twice."""
    files = sorted(mirror.path(stream).with_suffix(".aside").glob("*.jsonl"))
    lines = [line for path in files for line in path.read_bytes().split(b"\n")[:-1]]
    assert len(lines) == len(set(lines)), stream
    return lines


def expected(log: Sequence[Entry]) -> list[Line]:
    """What the lines of a log should be."""
    return [(one.seq, one.key, log[place - 1].key if place else None) for place, one in enumerate(log)]


def prefixes(there: Sequence[Line], log: Sequence[Entry]) -> None:
    """Of lines nothing is there twice, out of order, or ahead of the log, which was read after them."""
    assert there == expected(log)[: len(there)]


def whole(log: Sequence[Entry], mirror: Mirror) -> None:
    """All of the log is there, each entry once; no file ends within a line."""
    stream = log[0].stream
    assert lines_of(mirror, stream) == expected(log), stream
    assert all(path.read_bytes().endswith(b"\n") for path in files_of(mirror, stream))
