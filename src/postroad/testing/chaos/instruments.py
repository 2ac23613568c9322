"""What the product's tables don't keep: clients' rows, where events landed, when timers fired, what gates did.

The simulation's instruments for real processes: as tables and triggers of either database.
"""

from typing import Any

from sqlalchemy import Connection

from postroad.testing.chaos.sizes import CLOCK_ERROR
from postroad.testing.simulation import history

# By the database's own clock, and so much later that nothing looks early that isn't: SQLite's has milliseconds, and
# a server's is known to its clients within CLOCK_ERROR.
_SQLITE_NOW = "CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000 + 1000"
_POSTGRES_NOW = f"CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint) + {CLOCK_ERROR}"
_TABLES = (
    "CREATE TABLE sim_written (name TEXT PRIMARY KEY)",
    "CREATE TABLE sim_landed (stream TEXT, seq BIGINT, position BIGINT)",
    "CREATE TABLE sim_rang (stream TEXT, event_id TEXT, at BIGINT)",
    "CREATE TABLE sim_gates (number {number}, place BIGINT, at BIGINT, did TEXT, kind TEXT, host TEXT, until BIGINT, "
    "failures BIGINT)",
)
_NUMBER = {"sqlite": "INTEGER PRIMARY KEY", "postgresql": "BIGINT GENERATED ALWAYS AS IDENTITY"}
_LANDING = (
    "INSERT INTO sim_landed SELECT NEW.stream, NEW.seq, i.position FROM postroad_inbox i "
    "WHERE i.stream = NEW.stream AND i.event_id = NEW.entry_id"
)
_RINGING = "INSERT INTO sim_rang VALUES (NEW.stream, NEW.event_id, {now})"
_WHEN = "NEW.event_id LIKE 'evt:%'"
_GATE = (
    "INSERT INTO sim_gates (place, at, did, kind, host, until, failures) SELECT coalesce(max(id), 0), {at}, {did}, "
    "{row}.kind, {row}.host, {row}.until, {row}.failures FROM postroad_transitions"
)
_GATES = {
    "INSERT": {"at": "NEW.updated_at", "did": "'close'", "row": "NEW"},
    "UPDATE": {"at": "NEW.updated_at", "did": "CASE WHEN NEW.probe IS NULL THEN 'keep' ELSE 'take' END", "row": "NEW"},
    "DELETE": {"at": "{now}", "did": "'open'", "row": "OLD"},
}


def install(conn: Connection, *, now: int) -> None:
    """Make the tables and the triggers, beside the product's own tables."""
    made = [statement.replace("{number}", _NUMBER[conn.dialect.name]) for statement in _TABLES]
    for statement in (*made, *(_postgres() if conn.dialect.name == "postgresql" else _sqlite())):
        conn.exec_driver_sql(statement.replace("%", "%%") if conn.dialect.name == "postgresql" else statement)


def everything(conn: Connection) -> dict[str, Any]:
    """All rows of the product's tables and of these, as one read transaction sees them."""
    return history.tables(conn) | history.instruments(conn)


def _gate(words: dict[str, str], now: str) -> str:
    return _GATE.format(**words).replace("{now}", now)


def _sqlite() -> tuple[str, ...]:
    ringing = _RINGING.format(now=_SQLITE_NOW)
    return (
        f"CREATE TRIGGER sim_landing AFTER INSERT ON postroad_log BEGIN {_LANDING}; END",
        f"CREATE TRIGGER sim_ringing AFTER INSERT ON postroad_inbox WHEN {_WHEN} BEGIN {ringing}; END",
        *(
            f"CREATE TRIGGER sim_gate_{verb} AFTER {verb} ON postroad_gates BEGIN {_gate(words, _SQLITE_NOW)}; END"
            for verb, words in _GATES.items()
        ),
    )


def _postgres() -> tuple[str, ...]:
    function = "CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {does}; RETURN NULL; END $$"
    trigger = "CREATE TRIGGER {name} AFTER {verb} ON {table} FOR EACH ROW {when} EXECUTE FUNCTION {name}()"
    return (
        function.format(name="sim_landing", does=_LANDING),
        trigger.format(name="sim_landing", verb="INSERT", table="postroad_log", when=""),
        function.format(name="sim_ringing", does=_RINGING.format(now=_POSTGRES_NOW)),
        trigger.format(name="sim_ringing", verb="INSERT", table="postroad_inbox", when=f"WHEN ({_WHEN})"),
        *(
            statement
            for verb, words in _GATES.items()
            for name in [f"sim_gate_{verb.lower()}"]
            for statement in (
                function.format(name=name, does=_gate(words, _POSTGRES_NOW)),
                trigger.format(name=name, verb=verb, table="postroad_gates", when=""),
            )
        ),
    )
