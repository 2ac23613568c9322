"""Reports: what others tell a stream between its turns, and what their entries say beside that."""

from typing import Any

import msgspec

from postroad.model.events import REPORT_NAME
from postroad.model.rows import NewEvent

SURFACE = "scheduled-task"
TURN_KIND = "report"


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A report's entry, as a conversation that is replayed for a model needs it.

    Attributes:
        data: What was reported, as it was given.
        role: Whose words a model takes it for.
        source: The stream it comes from, if it said so.
        origin_surface: Where it came in: no person typed it.
        tools: The tool calls behind it, of which there are none.
        turn_kind: What stands in front of its key's first colon, `cron` for `cron:backup:1`; else `report`.
        parent: The key of the entry in front of it; None before it has landed, and for the first of all.
    """

    data: Any
    role: str = "assistant"
    source: str | None = None
    origin_surface: str = SURFACE
    tools: list[str] = []
    turn_kind: str = TURN_KIND
    parent: str | None = None


def event(stream: str, key: str, data: str, *, source: str | None = None, turn_kind: str | None = None) -> NewEvent:
    """The event by which a report with this payload, a JSON text, waits for its place in the stream.

    Another one with the same key adds nothing, whatever it says, unless `keep` is taken from it.
    """
    said = Report(data=msgspec.Raw(data.encode()), source=source, turn_kind=turn_kind or turn_kind_of(key))
    return NewEvent(
        stream=stream, event_id=key, kind=REPORT_NAME, data=msgspec.json.encode(said).decode(), keep=True
    )  # fmt: skip


def turn_kind_of(key: str) -> str:
    """What stands in front of a key's first colon; `report` if that is nothing."""
    kind, colon, _ = key.partition(":")
    return kind if kind and colon else TURN_KIND


def landed(raw: str, parent: str | None) -> str:
    """A report's payload as its entry has it, behind the entry `parent`."""
    fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    fields["parent"] = msgspec.Raw(msgspec.json.encode(parent))
    return msgspec.json.encode(fields).decode()


def accepted(raw: str) -> str:
    """A report's payload as it was accepted, of that of its entry."""
    return landed(raw, None)
