"""Much that is finished, for plan tests: made once for all that look at it, in transactions that they roll back."""

from sqlalchemy import Connection

from postroad.store.statements import Statement

ROWS = 100_000
STREAMS = 10_000
NUMBERS = "WITH RECURSIVE n(n) AS (SELECT CAST(0 AS bigint) UNION ALL SELECT n + 1 FROM n WHERE n + 1 < :rows)"
_FILL = [
    Statement(f"""INSERT INTO {{p}}streams (id, type, version) {NUMBERS}
        SELECT 'load/' || n, 'load', {ROWS // STREAMS} FROM n WHERE n < {STREAMS}"""),
    Statement(f"""INSERT INTO {{p}}log (stream, seq, entry_id, kind, version, data, received_at, recorded_at)
        {NUMBERS} SELECT 'load/' || (n % {STREAMS}), n / {STREAMS} + 1, 'x' || n, 'k', 1, '1', 0, 0 FROM n"""),
    Statement(f"""INSERT INTO {{p}}runs (run_id, stream, turn_id, attempt, claim_token, started_at, ended_at,
        end_reason) {NUMBERS} SELECT 'r' || n, 'load/' || (n % {STREAMS}), 't', 1, 'c', n, n, 'committed' FROM n"""),
    Statement(f"""INSERT INTO {{p}}inbox (stream, type, event_id, kind, version, data, received_at, ready_at, reason)
        {NUMBERS} SELECT 'load/' || (n % {STREAMS}), 'load', 'd' || n, 'k', 1, '1', 0, 0, 'dead' FROM n"""),
    Statement(f"""INSERT INTO {{p}}partials (stream, run_id, turn_id, updated_at, said)
        {NUMBERS} SELECT 'load/' || n, 'r' || n, 't', 0, 'hm' FROM n WHERE n < {STREAMS // 2}"""),
]  # fmt: skip


def fill(conn: Connection) -> None:
    """Fill the tables."""
    for statement in _FILL:
        statement(conn, rows=ROWS)
