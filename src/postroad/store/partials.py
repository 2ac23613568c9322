"""What running turns have said before they have decided: a row per stream at the most, on which nothing depends.

A row is written only under the claim of the run that says it, and counts only as long as that claim does: what a
killed process has left is nobody's, whether it is still there or not.
"""

from collections.abc import Mapping, Sequence, Set

import msgspec
from sqlalchemy import Connection

from postroad.store import dialects
from postroad.store.statements import Statement, as_json


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """All that a run has said so far, with the proof of its claim."""

    name: str
    token: str
    run: str
    turn: str
    words: str


# The claim is locked, so that whoever ends it removes the row, or comes first. Nobody is waited for: a claim that is
# just being renewed or ended gets its words the next time, or needs none. `updated_at` tells one text from the next,
# so that it grows even where the clock does not.
_SAY = Statement("""
INSERT INTO {p}partials AS p (stream, run_id, turn_id, updated_at, said)
SELECT said.name, said.run, said.turn, :now, said.words
FROM {rows:said(name text, token text, run text, turn text, words text)}
WHERE (
    SELECT 1 FROM {p}queues AS q WHERE q.stream = said.name AND q.claim_token = said.token {skip_locked}
) IS NOT NULL ORDER BY said.name
ON CONFLICT (stream) DO UPDATE SET run_id = excluded.run_id, turn_id = excluded.turn_id, said = excluded.said,
    updated_at = CASE WHEN excluded.updated_at > p.updated_at THEN excluded.updated_at ELSE p.updated_at + 1 END
RETURNING run_id
""")
_CLEAR = Statement("DELETE FROM {p}partials WHERE stream {in_list:streams}")
# A row that is locked is just being written by another run, or removed.
_LEFT = Statement(
    "SELECT stream FROM {p}partials WHERE stream {in_list:streams} AND run_id {in_list:runs} "
    "ORDER BY stream {skip_locked}"
)


def carry(conn: Connection, said: Sequence[Said], over: Mapping[str, str], *, now: int) -> Set[str]:
    """Write what runs have said, and remove what runs have left that are over (their streams by their ids).

    The answer are the runs whose words were written: those whose claim is current, and not being changed just now.
    """
    dialects.distrust_statistics(conn)
    if over:
        left = _LEFT(conn, streams=as_json(sorted(set(over.values()))), runs=as_json(sorted(over))).scalars()
        clear(conn, left)
    return set(_SAY.for_rows(conn, said, now=now).scalars()) if said else set()


def clear(conn: Connection, streams: Sequence[str]) -> None:
    """Remove what was said in these streams; their claims, or these rows, are locked."""
    if streams:
        _CLEAR(conn, streams=as_json(streams))
