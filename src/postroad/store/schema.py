"""The tables. Text ids, integer microseconds UTC, JSON as the exact text that was accepted, flags as 0 and 1.

Finished rows cost the hot paths nothing: every index that a loop reads is partial, over what is unfinished.
"""

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Identity,
    Index,
    Integer,
    MetaData,
    Table,
    UniqueConstraint,
    text,
)
from sqlalchemy import Text as AnyText

PREFIX = "postroad_"
# Text that is sorted or compared byte by byte on Postgres; SQLite does so by itself.
Text = AnyText().with_variant(AnyText(collation="C"), "postgresql")
# Positions grow for ever and are never used again: an identity on Postgres, AUTOINCREMENT on SQLite.
Position = BigInteger().with_variant(Integer, "sqlite")

metadata = MetaData()

streams = Table(
    PREFIX + "streams",
    metadata,
    Column("id", Text, primary_key=True),
    Column("type", Text, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("deleted_at", BigInteger),
)
# For retention: what was kept for a stream goes some time after it.
_DELETED = text("deleted_at IS NOT NULL")
Index(PREFIX + "streams_deleted", streams.c.deleted_at, postgresql_where=_DELETED, sqlite_where=_DELETED)

log = Table(
    PREFIX + "log",
    metadata,
    Column("stream", Text, primary_key=True),
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("entry_id", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("version", Integer, nullable=False),
    Column("data", AnyText, nullable=False),
    Column("received_at", BigInteger, nullable=False),
    Column("recorded_at", BigInteger, nullable=False),
    Column("run_id", Text),
    Column("cause", Text),
    UniqueConstraint("stream", "entry_id", name=PREFIX + "log_entry"),
)

inbox = Table(
    PREFIX + "inbox",
    metadata,
    Column("position", Position, Identity(cache=1), primary_key=True),
    Column("stream", Text, nullable=False),
    Column("type", Text, nullable=False),
    Column("event_id", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("version", Integer, nullable=False),
    Column("data", AnyText, nullable=False),
    Column("received_at", BigInteger, nullable=False),
    Column("ready_at", BigInteger, nullable=False),
    Column("front", Integer, nullable=False, server_default=text("1")),
    Column("reason", AnyText),
    UniqueConstraint("stream", "event_id", name=PREFIX + "inbox_event"),
    sqlite_autoincrement=True,
)
Index(PREFIX + "inbox_stream", inbox.c.type, inbox.c.stream, inbox.c.position,
      postgresql_where=text("reason IS NULL"), sqlite_where=text("reason IS NULL"))  # fmt: skip
Index(
    PREFIX + "inbox_front",
    inbox.c.type,
    inbox.c.ready_at,
    inbox.c.position,
    postgresql_where=text("front = 1 AND reason IS NULL"),
    sqlite_where=text("front = 1 AND reason IS NULL"),
)
# For `status` and operators: dead events, counted and listed without a walk over what waits.
Index(PREFIX + "inbox_dead", inbox.c.position,
      postgresql_where=text("reason IS NOT NULL"), sqlite_where=text("reason IS NOT NULL"))  # fmt: skip
# For whoever looks at one stream: those of it, whatever waits in it and whatever is dead elsewhere.
_ENDED = text("coalesce(reason, '-') <> '-'")
Index(PREFIX + "inbox_dead_of", inbox.c.stream, inbox.c.position, postgresql_where=_ENDED, sqlite_where=_ENDED)

# For whoever runs turns: which of them people have stopped.
_STOPS = text("kind = 'postroad.stop' AND reason IS NULL")
Index(PREFIX + "inbox_stops", inbox.c.kind, inbox.c.stream, inbox.c.position,
      postgresql_where=_STOPS, sqlite_where=_STOPS)  # fmt: skip

# A stream has a row here only while it is claimed, backs off, is parked or was freed with events left.
# `until` says when to look at it again; NULL: a person must. `picked` is the claimed set as inbox positions,
# `alone` the rest of a set that was split, to be tried one by one. `lease`: for how long a claim
# was taken, and is renewed.
queues = Table(
    PREFIX + "queues",
    metadata,
    Column("stream", Text, primary_key=True),
    Column("type", Text, nullable=False),
    Column("claim_token", Text),
    Column("until", BigInteger),
    Column("state", Text, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("picked", AnyText),
    Column("alone", AnyText),
    Column("lease", BigInteger),
    CheckConstraint("(claim_token IS NULL) = (state <> 'claimed')", name=PREFIX + "queues_token"),
    postgresql_with={"fillfactor": 70},
)
Index(PREFIX + "queues_until", queues.c.type, queues.c.until,
      postgresql_where=text("until IS NOT NULL"), sqlite_where=text("until IS NOT NULL"))  # fmt: skip
Index(PREFIX + "queues_parked", queues.c.stream,
      postgresql_where=text("until IS NULL"), sqlite_where=text("until IS NULL"))  # fmt: skip

outbox = Table(
    PREFIX + "outbox",
    metadata,
    Column("id", Text, primary_key=True),
    Column("key", Text, nullable=False),
    Column("stream", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("version", Integer, nullable=False),
    Column("destination", Text, nullable=False),
    Column("lane", Text),
    Column("host", Text),
    Column("policy", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("max_attempts", Integer),
    Column("epoch", Integer, nullable=False),
    Column("due_at", BigInteger),
    Column("first_attempt_at", BigInteger),
    Column("claim_token", Text),
    Column("expires_at", BigInteger),
    Column("ack_required", Integer, nullable=False, server_default=text("0")),
    Column("receipt", AnyText),
    Column("last_error", AnyText),
    Column("content_hash", Text, nullable=False),
    Column("origin", AnyText, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("updated_at", BigInteger, nullable=False),
    # What may be long comes last: SQLite walks through it to get at what stands behind.
    Column("headers", AnyText, nullable=False),
    Column("body", AnyText, nullable=False),
    UniqueConstraint("key", name=PREFIX + "outbox_key"),
    CheckConstraint("attempt >= 0", name=PREFIX + "outbox_attempt"),
    CheckConstraint("max_attempts >= 1", name=PREFIX + "outbox_max_attempts"),
    CheckConstraint("policy IN ('event', 'alert')", name=PREFIX + "outbox_policy"),
    CheckConstraint(
        "status IN ('pending', 'delivering', 'delivered', 'acked', 'dead_letter', 'expired')",
        name=PREFIX + "outbox_status",
    ),
    # A claim is a status, a token and the end of a lease (due_at), all three or none.
    CheckConstraint(
        "(status = 'delivering') = (claim_token IS NOT NULL) AND (status <> 'delivering' OR due_at IS NOT NULL)",
        name=PREFIX + "outbox_claim",
    ),
)
_UNFINISHED = text("status IN ('pending', 'delivering') AND due_at IS NOT NULL")
Index(PREFIX + "outbox_due", outbox.c.kind, outbox.c.due_at,
      postgresql_where=_UNFINISHED, sqlite_where=_UNFINISHED)  # fmt: skip
# Of the kinds whose sender says which host a dispatch goes to, so that one that is down holds up no other's.
_OF_HOST = text("status IN ('pending', 'delivering') AND due_at IS NOT NULL AND host IS NOT NULL")
Index(PREFIX + "outbox_host", outbox.c.kind, outbox.c.host, outbox.c.due_at,
      postgresql_where=_OF_HOST, sqlite_where=_OF_HOST)  # fmt: skip
# Beside them the others of such a kind, which a host that is down must not hold up either.
_OF_NO_HOST = text("status IN ('pending', 'delivering') AND due_at IS NOT NULL AND host IS NULL")
Index(PREFIX + "outbox_no_host", outbox.c.kind, outbox.c.due_at,
      postgresql_where=_OF_NO_HOST, sqlite_where=_OF_NO_HOST)  # fmt: skip
# For people, who look at the newest first, and for retention, which ends the oldest.
Index(PREFIX + "outbox_created", outbox.c.created_at)
_EXPIRES = text("status IN ('pending', 'delivering') AND expires_at IS NOT NULL")
Index(PREFIX + "outbox_expires", outbox.c.expires_at, postgresql_where=_EXPIRES, sqlite_where=_EXPIRES)

# A lane has a row only while it has unfinished members. `head`: the one dispatch of it that has a due time.
lanes = Table(
    PREFIX + "lanes",
    metadata,
    Column("lane", Text, primary_key=True),
    Column("head", Text),
    postgresql_with={"fillfactor": 70},
)

# Unfinished dispatches of lanes, in the order in which they were sent. `fresh`: no dispatcher has seen it yet.
# `due_at`: when it was to be sent; it is due once it is its lane's head.
lane_members = Table(
    PREFIX + "lane_members",
    metadata,
    Column("number", Position, Identity(cache=1), primary_key=True),
    Column("lane", Text, nullable=False),
    Column("dispatch", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("due_at", BigInteger, nullable=False),
    Column("fresh", Integer, nullable=False, server_default=text("1")),
    UniqueConstraint("dispatch", name=PREFIX + "lane_members_dispatch"),
    sqlite_autoincrement=True,
)
Index(PREFIX + "lane_members_lane", lane_members.c.lane, lane_members.c.number)
Index(PREFIX + "lane_members_fresh", lane_members.c.kind, lane_members.c.number,
      postgresql_where=text("fresh = 1"), sqlite_where=text("fresh = 1"))  # fmt: skip

# What is down: the sends of a kind ('' as host), or those to one host of it. A row only while its gate is closed.
# `until`: nobody tries before that. `probe`: the token of the claim that tries, until its lease is over.
gates = Table(
    PREFIX + "gates",
    metadata,
    Column("kind", Text, primary_key=True),
    Column("host", Text, primary_key=True),
    Column("until", BigInteger, nullable=False),
    Column("closed_at", BigInteger, nullable=False),
    Column("failures", Integer, nullable=False),
    Column("probe", Text),
    Column("reason", AnyText, nullable=False),
    Column("updated_at", BigInteger, nullable=False),
)

# Of the kinds ('' as host), and hosts of a kind, whose rate is limited: when the next attempt may start.
rates = Table(
    PREFIX + "rates",
    metadata,
    Column("kind", Text, primary_key=True),
    Column("host", Text, primary_key=True),
    Column("next_at", BigInteger, nullable=False),
    postgresql_with={"fillfactor": 70},
)

# Keys and event ids that stay taken after their rows were purged. `scope`: '' for a dispatch's key, an event's stream.
tombstones = Table(
    PREFIX + "tombstones",
    metadata,
    Column("scope", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    Column("id", Text, nullable=False),
    Column("stream", Text, nullable=False),
    Column("content_hash", Text, nullable=False),
    Column("ended_at", BigInteger, nullable=False),
)
_HOMELESS = text("stream = ''")
Index(PREFIX + "tombstones_ended", tombstones.c.ended_at,
      postgresql_where=_HOMELESS, sqlite_where=_HOMELESS)  # fmt: skip
_AT_HOME = text("stream <> ''")
Index(PREFIX + "tombstones_stream", tombstones.c.stream, postgresql_where=_AT_HOME, sqlite_where=_AT_HOME)

# What people did: who, why, to what, and what it was before and after.
audit = Table(
    PREFIX + "audit",
    metadata,
    Column("id", Position, Identity(cache=1), primary_key=True),
    Column("action", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("actor", Text, nullable=False),
    Column("reason", AnyText, nullable=False),
    Column("before", AnyText, nullable=False),
    Column("after", AnyText, nullable=False),
    Column("at", BigInteger, nullable=False),
    sqlite_autoincrement=True,
)
Index(PREFIX + "audit_subject", audit.c.subject, audit.c.id)

timers = Table(
    PREFIX + "timers",
    metadata,
    Column("stream", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    Column("fire_at", BigInteger, nullable=False),
    Column("kind", Text, nullable=False),
    Column("data", AnyText, nullable=False),
    Column("spec", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("generation", Integer, nullable=False),
    Column("updated_at", BigInteger, nullable=False),
    CheckConstraint("status IN ('armed', 'fired', 'cancelled')", name=PREFIX + "timers_status"),
)
Index(PREFIX + "timers_due", timers.c.fire_at,
      postgresql_where=text("status = 'armed'"), sqlite_where=text("status = 'armed'"))  # fmt: skip

# `end_reason` NULL: still running, or lost with its process. `end` is a reserved word on both databases.
runs = Table(
    PREFIX + "runs",
    metadata,
    Column("run_id", Text, primary_key=True),
    Column("stream", Text, nullable=False),
    Column("turn_id", Text, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("claim_token", Text, nullable=False),
    Column("started_at", BigInteger, nullable=False),
    Column("ended_at", BigInteger),
    Column("end_reason", Text),
    Column("error", AnyText),
)
Index(PREFIX + "runs_stream", runs.c.stream, runs.c.started_at)
# For `status` (how many runs lately) and for retention, which ends the oldest first.
Index(PREFIX + "runs_started", runs.c.started_at)
Index(PREFIX + "runs_trouble", runs.c.end_reason, runs.c.ended_at,
      postgresql_where=text("end_reason <> 'committed'"), sqlite_where=text("end_reason <> 'committed'"))  # fmt: skip

# Tool calls, each of one run: written when it starts, and again when it ends. Ordinals count over all runs of a turn.
# `repeats`: the ordinal of the earlier run's call that it repeats, with its recorded result if `status` is reused.
# `entry`: the log entry that the run's commit attached it to. `resolved`: what a person decided.
operations = Table(
    PREFIX + "operations",
    metadata,
    Column("turn_id", Text, primary_key=True),
    Column("ordinal", Integer, primary_key=True, autoincrement=False),
    Column("run_id", Text, nullable=False),
    Column("stream", Text, nullable=False),
    Column("tool", Text, nullable=False),
    Column("version", Integer, nullable=False),
    Column("effect", Text, nullable=False),
    Column("key", Text),
    Column("status", Text, nullable=False),
    Column("repeats", Integer),
    Column("entry", Text),
    Column("resolved", Text),
    Column("started_at", BigInteger, nullable=False),
    Column("ended_at", BigInteger),
    Column("arguments", AnyText, nullable=False),
    Column("result", AnyText),
    CheckConstraint("effect IN ('read', 'idempotent', 'keyed', 'unsafe')", name=PREFIX + "operations_effect"),
    CheckConstraint("status IN ('started', 'finished', 'failed', 'reused')", name=PREFIX + "operations_status"),
)
Index(PREFIX + "operations_run", operations.c.run_id)
Index(PREFIX + "operations_stream", operations.c.stream, operations.c.started_at)
# For retention.
Index(PREFIX + "operations_started", operations.c.started_at)

# What running turns say before they have decided, one row per stream at the most; nothing depends on it.
partials = Table(
    PREFIX + "partials",
    metadata,
    Column("stream", Text, primary_key=True),
    Column("run_id", Text, nullable=False),
    Column("turn_id", Text, nullable=False),
    Column("updated_at", BigInteger, nullable=False),
    Column("said", AnyText, nullable=False),
)

transitions = Table(
    PREFIX + "transitions",
    metadata,
    Column("id", Position, Identity(cache=1), primary_key=True),
    Column("entity", Text, nullable=False),
    Column("from_status", Text),
    Column("to_status", Text, nullable=False),
    Column("reason_code", Text, nullable=False),
    Column("summary", AnyText, nullable=False),
    Column("source", Text, nullable=False),
    Column("actor", Text, nullable=False),
    Column("evidence", AnyText, nullable=False),
    Column("metadata", AnyText, nullable=False),
    Column("at", BigInteger, nullable=False),
    sqlite_autoincrement=True,
)
Index(PREFIX + "transitions_entity", transitions.c.entity, transitions.c.id)
# For `status`: what went wrong lately, without a walk over all that went well.
_TROUBLE = text("to_status IN ('dead_letter', 'expired') OR from_status = to_status")
Index(PREFIX + "transitions_trouble", transitions.c.at, postgresql_where=_TROUBLE, sqlite_where=_TROUBLE)

alerts = Table(
    PREFIX + "alerts",
    metadata,
    Column("id", Position, Identity(cache=1), primary_key=True),
    Column("severity", Text, nullable=False),
    Column("code", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("detail", AnyText, nullable=False),
    Column("raised_at", BigInteger, nullable=False),
    Column("rung_at", BigInteger),
    sqlite_autoincrement=True,
)
Index(PREFIX + "alerts_unrung", alerts.c.id,
      postgresql_where=text("rung_at IS NULL"), sqlite_where=text("rung_at IS NULL"))  # fmt: skip

# Work that a turn of `stream` has started on `child`, by the event at `position`. `note`: what came after its end.
delegations = Table(
    PREFIX + "delegations",
    metadata,
    Column("stream", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    Column("child", Text, nullable=False),
    Column("position", BigInteger, nullable=False),
    Column("depth", Integer, nullable=False),
    Column("status", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("deadline_at", BigInteger, nullable=False),
    Column("ended_at", BigInteger),
    Column("error", AnyText),
    Column("note", AnyText),
    CheckConstraint("status IN ('open', 'done', 'failed', 'cancelled', 'timed_out')", name=PREFIX + "delegations_is"),
    CheckConstraint("(status = 'open') = (ended_at IS NULL)", name=PREFIX + "delegations_ended"),
)
Index(PREFIX + "delegations_open", delegations.c.stream, delegations.c.status, delegations.c.key)
_AT_WORK = text("status = 'open'")
Index(PREFIX + "delegations_due", delegations.c.deadline_at, postgresql_where=_AT_WORK, sqlite_where=_AT_WORK)
Index(PREFIX + "delegations_child", delegations.c.child, delegations.c.ended_at, delegations.c.position)
