"""Everything that can be known of a run at one moment: the tables, the sink, the clients' ledger."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cached_property
from operator import attrgetter
from typing import Any

import msgspec
from sqlalchemy import Connection, text

from postroad.model.lifecycle import Reason
from postroad.store import moments, schema
from postroad.store.statements import Statement
from postroad.testing.simulation.deeds import Deed
from postroad.testing.simulation.gate_walk import Walk, walked
from postroad.testing.simulation.ledger import Ledger
from postroad.testing.simulation.options import Options
from postroad.testing.simulation.outages import Outage
from postroad.testing.simulation.owners import TABLE as OWNERS_TABLE
from postroad.testing.simulation.sink import Arrival, Begun
from postroad.testing.simulation.toolbox import Handled, Happened
from postroad.testing.simulation.workload import ORDER, Order

Rows = list[Any]
TABLES = (
    "streams", "log", "inbox", "queues", "outbox", "timers", "runs", "transitions", "alerts", "gates", "delegations",
)  # fmt: skip
_ORDER = {
    "log": "stream, seq", "inbox": "position", "transitions": "id", "alerts": "id", "outbox": "id", "streams": "id",
    "timers": "stream, key", "queues": "stream", "runs": "started_at, stream, attempt, run_id",
    "gates": "kind, host", "delegations": "stream, key",
}  # fmt: skip
_SELECT = {name: Statement(f"SELECT * FROM {{p}}{name} ORDER BY {_ORDER[name]}") for name in TABLES}

_PARKED = Statement(
    "SELECT q.stream, (SELECT count(*) FROM postroad_inbox i WHERE i.stream = q.stream AND i.reason IS NULL) "
    "FROM postroad_queues q LEFT JOIN postroad_streams s ON s.id = q.stream "
    "WHERE q.state = 'parked' AND s.deleted_at IS NULL ORDER BY q.stream"
)
_ARMED_CRONS = Statement("SELECT count(*) FROM postroad_timers WHERE status = 'armed' AND stream LIKE 'cron:%'")
_UNRUNG = Statement(
    "SELECT EXISTS (SELECT 1 FROM postroad_queues) OR EXISTS (SELECT 1 FROM postroad_alerts WHERE rung_at IS NULL)"
)
_OPERATED = {
    "beside": Statement("SELECT * FROM sim_beside ORDER BY rowid"),
    "opened": Statement("SELECT * FROM sim_opened ORDER BY rowid"),
    "ends": Statement("SELECT * FROM sim_ended ORDER BY rowid"),
    "purged": Statement("SELECT * FROM sim_purged ORDER BY id"),
    "tombstones": Statement("SELECT * FROM {p}tombstones ORDER BY scope, key"),
    "audit": Statement("SELECT * FROM {p}audit ORDER BY id"),
    "operations": Statement("SELECT * FROM {p}operations ORDER BY turn_id, ordinal"),
    "deleted": Statement("SELECT * FROM sim_deleted ORDER BY stream"),
    "late": Statement("SELECT * FROM sim_late ORDER BY rowid"),
}
_BEGAN = Statement("SELECT run_id FROM {p}runs ORDER BY rowid")
_OUTBOX = [column.name for column in schema.outbox.columns]

# What the product's own tables don't keep, or only as the product says it: the place in the inbox of each event
# that landed, when a timer's event came, by the simulation's own clock (`sim_now`, defined per connection), what
# a dispatch was when its row was deleted, and what was done to gates, each after which row of history (`place`);
# how far a stream was when it was deleted, and what was written of tool calls under a claim that was over;
# how many delegations a stream had open after each new one, and every change of how one stands;
# which runs of crons began beside others.
INSTRUMENTS = (
    *OWNERS_TABLE,
    "CREATE TABLE sim_written (name TEXT PRIMARY KEY)",
    "CREATE TABLE sim_landed (stream TEXT, seq INTEGER, position INTEGER)",
    "CREATE TRIGGER sim_landing AFTER INSERT ON postroad_log BEGIN "
    "INSERT INTO sim_landed SELECT NEW.stream, NEW.seq, i.position FROM postroad_inbox i "
    "WHERE i.stream = NEW.stream AND i.event_id = NEW.entry_id; END",
    "CREATE TABLE sim_rang (stream TEXT, event_id TEXT, at INTEGER)",
    "CREATE TRIGGER sim_ringing AFTER INSERT ON postroad_inbox WHEN NEW.event_id LIKE 'evt:%' BEGIN "
    "INSERT INTO sim_rang VALUES (NEW.stream, NEW.event_id, sim_now()); END",
    "CREATE TABLE sim_purged AS SELECT * FROM postroad_outbox WHERE 0",
    f"CREATE TRIGGER sim_purging AFTER DELETE ON postroad_outbox BEGIN INSERT INTO sim_purged ({', '.join(_OUTBOX)}) "
    f"VALUES ({', '.join(f'OLD.{name}' for name in _OUTBOX)}); END",
    "CREATE TABLE sim_gates (number INTEGER PRIMARY KEY, place INTEGER, at INTEGER, did TEXT, kind TEXT, host TEXT, "
    "until INTEGER, failures INTEGER)",
    "CREATE TABLE sim_deleted (stream TEXT, version INTEGER, position INTEGER, runs INTEGER)",
    "CREATE TRIGGER sim_deleting AFTER UPDATE OF deleted_at ON postroad_streams BEGIN "
    "INSERT INTO sim_deleted SELECT NEW.id, NEW.version, max(coalesce((SELECT max(position) FROM postroad_inbox), 0), "
    "coalesce((SELECT max(position) FROM sim_landed), 0)), "
    "(SELECT count(*) FROM postroad_runs WHERE stream = NEW.id); END",
    "CREATE TABLE sim_late (did TEXT, run_id TEXT, tool TEXT)",
    "CREATE TABLE sim_beside (stream TEXT, run_id TEXT)",
    "CREATE TRIGGER sim_beginning AFTER INSERT ON postroad_runs WHEN NEW.stream LIKE 'cron:%' AND EXISTS "
    "(SELECT 1 FROM postroad_runs WHERE stream = NEW.stream AND run_id <> NEW.run_id AND end_reason IS NULL) BEGIN "
    "INSERT INTO sim_beside VALUES (NEW.stream, NEW.run_id); END",
    "CREATE TABLE sim_opened (stream TEXT, key TEXT, open INTEGER, depth INTEGER)",
    "CREATE TRIGGER sim_opening AFTER INSERT ON postroad_delegations BEGIN "
    "INSERT INTO sim_opened SELECT NEW.stream, NEW.key, count(*), NEW.depth FROM postroad_delegations "
    "WHERE stream = NEW.stream AND status = 'open'; END",
    "CREATE TABLE sim_ended (stream TEXT, key TEXT, was TEXT, status TEXT)",
    "CREATE TRIGGER sim_ending AFTER UPDATE OF status ON postroad_delegations BEGIN "
    "INSERT INTO sim_ended VALUES (NEW.stream, NEW.key, OLD.status, NEW.status); END",
    *(
        f"CREATE TRIGGER sim_call_{verb} AFTER {when} ON postroad_operations "
        "WHEN (SELECT end_reason FROM postroad_runs WHERE run_id = NEW.run_id) IS NOT NULL BEGIN "
        f"INSERT INTO sim_late VALUES ('{verb}', NEW.run_id, NEW.tool); END"
        for verb, when in (("start", "INSERT"), ("end", "UPDATE OF status"))
    ),
    *(
        f"CREATE TRIGGER sim_gate_{verb} AFTER {verb} ON postroad_gates BEGIN "
        "INSERT INTO sim_gates (place, at, did, kind, host, until, failures) "
        f"SELECT coalesce(max(id), 0), {at}, {did}, {row}.kind, {row}.host, {row}.until, {row}.failures "
        "FROM postroad_transitions; END"
        for verb, at, did, row in (
            ("INSERT", "NEW.updated_at", "'close'", "NEW"),
            ("UPDATE", "NEW.updated_at", "CASE WHEN NEW.probe IS NULL THEN 'keep' ELSE 'take' END", "NEW"),
            ("DELETE", "sim_now()", "'open'", "OLD"),
        )
    ),
)


class History(msgspec.Struct, kw_only=True, dict=True):
    """One moment of a run. Rows have the tables' columns as attributes, in the tables' own order.

    `before` is the last moment that was looked at, for what may only grow; `end`: nothing is left to do; `calm`: since
    when there are no more faults. `turned_away`: the ids of what could not reach its destination, as often as that was.
    What is derived from the rows is derived once.
    """

    options: Options
    now: int
    streams: Rows = []
    log: Rows = []
    inbox: Rows = []
    queues: Rows = []
    outbox: Rows = []
    timers: Rows = []
    runs: Rows = []
    transitions: Rows = []
    alerts: Rows = []
    gates: Rows = []
    gate_log: Rows = []
    operations: Rows = []
    delegations: Rows = []
    opened: Rows = []
    ends: Rows = []
    beside: Rows = []
    deleted: Rows = []
    late: Rows = []
    began: list[str] = []
    written: set[str] = set()
    landed: Rows = []
    rang: Rows = []
    purged: Rows = []
    tombstones: Rows = []
    audit: Rows = []
    deeds: list[Deed] = []
    outages: list[Outage] = []
    turned_away: list[str] = []
    sends: list[tuple[str, str, Begun | str]] = []
    arrivals: list[Arrival] = []
    rung: list[Any] = []
    tried: list[tuple[str, str, int]] = []
    handled: list[Handled] = []
    happened: list[Happened] = []
    ledger: Ledger
    before: "History | None" = None
    end: bool = False
    calm: int = 0

    @cached_property
    def logs(self) -> dict[str, Rows]:
        """The log's rows by stream, in order."""
        return grouped(self.log, "stream")

    @cached_property
    def stories(self) -> dict[str, Rows]:
        """The transitions by dispatch, in order."""
        return grouped(self.transitions, "entity")

    @cached_property
    def dispatches(self) -> Rows:
        """Every dispatch that was ever committed: the outbox's rows, and as they were last those that were purged."""
        return [*self.outbox, *(row for row in self.purged if row.id in self.stories)]

    def epoch(self, id: str, first: int) -> int:
        """The epoch of a dispatch whose first attempt began then; -1: no attempt did. 0 if nobody said when."""
        return self._firsts.get((id, first), -1) if first else 0

    @cached_property
    def _firsts(self) -> dict[tuple[str, int], int]:
        firsts = (step for step in self.transitions if step.reason_code == Reason.ATTEMPT)
        return {(step.entity, step.at): meta["epoch"] for step in firsts if (meta := about(step))["attempt"] == 1}

    @cached_property
    def known(self) -> dict[tuple[str, str], Any]:
        """Every event and entry there is, by stream and id: the log's row, else the inbox's."""
        found = {(row.stream, row.event_id): row for row in self.inbox}
        return found | {(row.stream, row.entry_id): row for row in self.log}

    @cached_property
    def walk(self) -> Walk:
        """What was done to gates, beside what happened to dispatches."""
        return walked(self.transitions, self.gate_log, self.dispatches, self.audit)

    @cached_property
    def gone(self) -> set[str]:
        """The streams that were deleted."""
        return {row.stream for row in self.deleted}

    @cached_property
    def calls(self) -> dict[str, Rows]:
        """The recorded tool calls by turn, in order."""
        return grouped(self.operations, "turn_id")

    @cached_property
    def orders(self) -> dict[tuple[str, str], Order]:
        """Every order that there is, by stream and id."""
        rows = self.known.items()
        return {at: msgspec.json.decode(row.data, type=Order) for at, row in rows if row.kind == ORDER.name}


def about(step: Any) -> dict[str, Any]:
    """What a row of history says in numbers: its attempt and epoch."""
    found: dict[str, Any] = msgspec.json.decode(step.metadata)
    return found


def grouped(rows: Rows, *names: str) -> dict[Any, Rows]:
    """Rows by the value of a column, or by the values of several."""
    value: Callable[[Any], Any] = attrgetter(*names)
    found: defaultdict[Any, Rows] = defaultdict(list)
    for row in rows:
        found[value(row)].append(row)
    return dict(found)


def tables(conn: Connection) -> dict[str, Any]:
    """All rows of the product's tables as one read transaction sees them."""
    return _all(conn, _SELECT)


def _all(conn: Connection, selects: Mapping[str, Statement]) -> dict[str, Any]:
    return {name: select(conn).all() for name, select in selects.items()}


def left_over(conn: Connection) -> tuple[int, dict[str, int]]:
    """How much waits that need not, and the parked streams that are not deleted, with how many events wait in each.

    Crons have their timers armed for ever, and what is parked waits for a person.
    """
    parked: dict[str, int] = dict(_PARKED(conn).all())
    return moments.waiting(conn) - int(_ARMED_CRONS(conn).scalar_one()) - sum(parked.values()), parked


def unrung(conn: Connection) -> bool:
    """Whether an alert has not rung, or a stream is in somebody's hands."""
    return bool(_UNRUNG(conn).scalar_one())


def everything(conn: Connection) -> dict[str, Any]:
    """All rows of the product's tables, and all that the simulation keeps."""
    return tables(conn) | instruments(conn) | operated(conn)


def operated(conn: Connection) -> dict[str, Any]:
    """What the simulation alone looks at: operators, calls, delegations, crons, deletions, runs as they began."""
    return _all(conn, _OPERATED) | {"began": _BEGAN(conn).scalars()}


def instruments(conn: Connection) -> dict[str, Any]:
    """What the simulation's own tables hold."""
    return {
        "written": set(conn.execute(text("SELECT name FROM sim_written")).scalars()),
        "landed": list(conn.execute(text("SELECT stream, seq, position FROM sim_landed ORDER BY stream, seq"))),
        "gate_log": list(conn.execute(text("SELECT * FROM sim_gates ORDER BY number"))),
        "rang": list(conn.execute(text("SELECT stream, event_id, at FROM sim_rang ORDER BY at, stream, event_id"))),
    }
