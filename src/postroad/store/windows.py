"""The part of a log that a turn sees: its last entries, and whatever came since the previous turn decided."""

from collections.abc import Sequence

import msgspec
from sqlalchemy import Connection

from postroad.model.events import FAILED, INTERRUPTED, NOOP, REPORT_NAME, Entry, Failure, Interruption, Noop
from postroad.store import log

STEP = 500


def window(conn: Connection, stream: str, *, version: int, last: int, most: int) -> list[Entry]:
    """The `last` entries up to place `version`, oldest first, or more: all since the previous turn's decision.

    Nothing of that is left out, however much a filter has answered since; but `most` entries at the most.
    """
    floor = max(0, version - most)
    after = max(floor, version - last)
    found = log.read(conn, stream, after=after, limit=version - after)
    while (decided := _decided(found)) is None and after > floor:
        before = max(floor, after - STEP)
        found = log.read(conn, stream, after=before, limit=after - before) + found
        after = before
    since = len(found) if decided is None else len(found) - decided - 1
    wanted = min(max(last, since), len(found))
    return found[len(found) - wanted :]


def _decided(entries: Sequence[Entry]) -> int | None:
    """The index of the newest entry that a turn's decision recorded or consumed; None: there is none.

    An event that was answered, or given up, without a decision is named by an entry behind it. Reports land without
    one; those that woke a turn are taken for such too, so that a later turn sees them rather once more than not at all.
    """
    answered: set[str] = set()
    for index in range(len(entries) - 1, -1, -1):
        entry = entries[index]
        if entry.kind in _NAMING:
            answered.update(_names(entry))
        elif entry.cause is not None or (entry.key not in answered and entry.kind != REPORT_NAME):
            return index
    return None


def _names(entry: Entry) -> Sequence[str]:
    match msgspec.json.decode(entry.raw, type=_NAMING[entry.kind]):
        case Noop(event=event):
            return [event]
        case Failure(events=events) | Interruption(events=events):
            return events
    raise AssertionError("unreachable")


_NAMING: dict[str, type[Noop | Failure | Interruption]] = {NOOP: Noop, FAILED: Failure, INTERRUPTED: Interruption}
