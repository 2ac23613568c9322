"""Statements for many rows: what is the same in all of them is a parameter, and no row comes out otherwise for it."""

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import msgspec
import pytest
from sqlalchemy import Connection

from postroad.model.lifecycle import Reason, Status
from postroad.model.rows import NewTransition, Settled, Settlement
from postroad.store import dispatch_claims, outbox, settle, statements, transitions
from postroad.store.database import Database
from postroad.store.statements import Statement
from postroad.testing.contracts.dispatches import dispatch
from tests.contracts.conftest import Run
from tests.contracts.outbox_scene import POLICIES

POLICY = POLICIES["due"]
MANY = statements.SHARING_ROWS_MIN
ODD = 'it\'s "odd", \\ {braces} %s :now\n\u2028 ünïcode'
HISTORY = Statement(
    "SELECT entity, from_status, to_status, reason_code, summary, source, actor, evidence, metadata "
    "FROM {p}transitions ORDER BY id"
)
DISPATCHES = Statement(
    "SELECT key, status, due_at, attempt, first_attempt_at, max_attempts, last_error, receipt, claim_token, updated_at "
    "FROM {p}outbox ORDER BY key"
)
COLUMNS = ("entity", "from_status", "summary", "metadata")


def transition(number: int, varying: Sequence[str]) -> NewTransition:
    row = NewTransition(
        entity=ODD, from_status=Status.PENDING, to_status=Status.DELIVERING, reason_code=Reason.ATTEMPT, summary=ODD
    )
    values = {
        "entity": f"{number} {ODD}",
        "from_status": None if number % 2 else Status.PENDING,
        "summary": ODD * number,
        "metadata": msgspec.json.encode({"n": number}).decode(),
    }
    return msgspec.structs.replace(row, **{column: values[column] for column in varying})


@pytest.mark.parametrize("count", [1, 2, MANY - 1, MANY, 3 * MANY])
@pytest.mark.parametrize("varying", [(), ("summary",), ("entity", "from_status"), COLUMNS], ids="-".join)
def test_rows_are_written_as_they_are(
    run: Run, monkeypatch: pytest.MonkeyPatch, count: int, varying: Sequence[str]
) -> None:
    """Whatever columns rows differ in, if any, each is written with its own values, in the given order."""
    monkeypatch.setattr(transitions, "check_edge", lambda before, after: None)
    rows = [transition(number, varying) for number in range(count)]
    run(transitions.record, rows)
    found = run(lambda conn: HISTORY(conn).mappings())
    assert found == [msgspec.to_builtins(row) for row in rows]


def test_a_statement_has_no_end_of_forms(database: Database) -> None:
    """However many ways there are in which rows can be alike, not each of them is kept; and all are written out."""
    columns = "abcdefgh"
    statement = Statement(
        f"SELECT {', '.join(f'new.{c} AS {c}' for c in columns)} "
        f"FROM {{rows:new({', '.join(c + ' text' for c in columns)})}} ORDER BY new.ord"
    )
    patterns = [columns[: n % 8 + 1] + columns[n // 8 :] for n in range(64)] + list(combinations(columns, 4))

    def every(conn: Connection) -> None:
        for varying in patterns:
            rows = [{c: f"{c}{n}" if c in varying else c for c in columns} for n in range(MANY)]
            assert statement.for_rows(conn, rows).mappings() == rows
        assert len(statement._forms(conn)) == statements.FORMS_MAX

    database.read(every)


def results(how: str, number: int) -> dict[str, Any]:
    """What the attempt of a dispatch came to."""
    mixed = [
        {"result": "ok"},
        {"result": "failed", "error": f"{number} {ODD}"},
        {"result": "permanent", "error": ODD},
        {"result": "ok", "receipt": f'{{"reference":"{number}"}}'},
        {"result": "cut_short", "error": "stopped"},
    ]
    return {"sent": mixed[0], "failed": {"result": "failed", "error": ODD}}.get(how) or mixed[number % len(mixed)]


@pytest.mark.parametrize("how", ["sent", "failed", "mixed"])
def test_a_batch_is_settled_as_each_of_it_would_be(run: Run, how: str) -> None:
    """Results that are settled together leave what they leave one by one, all alike or each of another kind."""
    left: list[tuple[list[Settled], Any]] = []
    for batch in (1, 2 * MANY):
        run(
            outbox.insert,
            [dispatch(1000 * batch + n, key=f"{batch}/{n:02}", kind="due") for n in range(2 * MANY)],
            source="s",
            actor="",
            in_turn=False,
        )
        claimed = run(
            dispatch_claims.claim, POLICY, names=[POLICY.kind], token="token", limit=100, takeover=True
        ).claims
        claims = sorted(claimed, key=lambda claim: claim.key)
        asked = [
            Settlement(
                id=claim.id, token="token", attempt=1, epoch=0, policy=POLICY, fraction=0.5, **results(how, number)
            )
            for number, claim in enumerate(claims)
        ]
        parts = [asked[first : first + batch] for first in range(0, len(asked), batch)]
        ends = [end for part in parts for end in run(settle.settle, part)]
        rows = [row for row in run(lambda conn: DISPATCHES(conn).mappings()) if row["key"].startswith(f"{batch}/")]
        plain = [{**row, "key": row["key"].partition("/")[2]} for row in rows]
        left.append(([msgspec.structs.replace(end, id="") for end in ends], plain))
        run(lambda conn: Statement("DELETE FROM {p}outbox")(conn))
    assert len(left[0][1]) == 2 * MANY
    assert left[0] == left[1]
