"""The contracts of purging and retention over both databases and every way to run a transaction."""

import subprocess
import sys

from postroad.model.rows import Enqueued
from postroad.store.database import Database
from postroad.testing.contracts import purging, retention
from postroad.testing.contracts.dispatches import Waiting, dispatch, enqueue, outbox_rows


class TestPurge(purging.PurgeContract):
    """Rows go, their keys do not."""


class TestPurgeRaces(purging.PurgeRaces):
    """With several connections."""


class TestRetention(retention.RetentionContract):
    """What is old goes."""


class TestRetentionRaces(retention.RetentionRaces):
    """With several connections."""


PURGER = """
import sys
from postroad.store import moves, purging
from postroad.store.database import Database

database = Database(sys.argv[1], schema=sys.argv[2] or None)

def purge(conn, *, now):
    purging.purge(conn, list(moves.lock(conn, [sys.argv[3]]).values()), history=False, now=now)
    print("purged, not committed", flush=True)
    sys.stdin.readline()

database.transact(purge)
database.close()
"""


def test_another_process_purges(database: Database) -> None:
    """A key whose row another process deletes while it is asked for is answered by that row's tombstone."""
    enqueue(database.transact, dispatch(1))
    url = database.engine.url.render_as_string(hide_password=False)
    command = [sys.executable, "-c", PURGER, url, database.schema or "", f"{1:032x}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "purged, not committed\n"
        waiting = Waiting(database, lambda: enqueue(database.transact, dispatch(2, key="key/1")))
        waiting.blocked()
        other.stdin.write("commit\n")
        other.stdin.close()
    assert other.returncode == 0
    assert waiting.result() == [Enqueued(f"{1:032x}", "key/1", False)]
    assert database.read(outbox_rows) == []
