"""Tombstones: the keys and event ids that stay taken after their rows are gone.

A tombstone is written in the transaction that deletes the row. Whoever inserts a row with the same key waits for that
transaction at the unique index, and then gets through; so the look at tombstones is a statement of its own AFTER the
insert, whose snapshot shows what had committed by then, and undoes it if there is one. A transaction of a user's at
REPEATABLE READ sees no tombstone younger than its first statement.
"""

from collections.abc import Sequence

import msgspec
from sqlalchemy import Connection

from postroad.store.statements import Statement, as_json


class Tombstone(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of a row that is gone.

    `scope`: '' for a dispatch, whose key is unique in the database; the stream for an event, whose `key` and `id` are
    its event id. `stream` '': no stream holds the key for longer than the retention of tombstones.
    """

    scope: str
    key: str
    id: str
    stream: str
    content_hash: str


# The first holder of a key is the one that was answered with; a later one there is only after a look that was too old.
_BURY = Statement("""
INSERT INTO {p}tombstones (scope, key, id, stream, content_hash, ended_at)
SELECT scope, key, id, stream, content_hash, :now
FROM {rows:made(scope text, key text, id text, stream text, content_hash text)}
WHERE true
ORDER BY scope, key
ON CONFLICT (scope, key) DO UPDATE SET ended_at = excluded.ended_at
""")
# The content hash of the tombstone of the event `e`, or NULL.
OF_EVENT = "(SELECT t.content_hash FROM {p}tombstones t WHERE t.scope = e.stream AND t.key = e.event_id)"
# Whether the dispatch `d`, about to be written, has a key whose holder is gone.
OF_DISPATCH = "(SELECT t.id FROM {p}tombstones t WHERE t.scope = '' AND t.key = d.key)"


def bury(conn: Connection, made: Sequence[Tombstone], *, now: int) -> None:
    """Write tombstones; they count from `now`. The rows must have been locked by this transaction."""
    if made:
        _BURY(conn, made=as_json(made), now=now)
