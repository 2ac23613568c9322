CREATE TABLE {p}alerts (
    id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    severity TEXT NOT NULL,
    code TEXT NOT NULL,
    subject TEXT NOT NULL,
    detail TEXT NOT NULL,
    raised_at BIGINT NOT NULL,
    rung_at BIGINT
);
CREATE INDEX postroad_alerts_unrung ON {p}alerts (id) WHERE rung_at IS NULL;
CREATE TABLE {p}audit (
    id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    action TEXT NOT NULL,
    subject TEXT NOT NULL,
    actor TEXT NOT NULL,
    reason TEXT NOT NULL,
    "before" TEXT NOT NULL,
    "after" TEXT NOT NULL,
    at BIGINT NOT NULL
);
CREATE INDEX postroad_audit_subject ON {p}audit (subject, id);
CREATE TABLE {p}delegations (
    stream TEXT NOT NULL,
    "key" TEXT NOT NULL,
    child TEXT NOT NULL,
    position BIGINT NOT NULL,
    depth INTEGER NOT NULL,
    status TEXT NOT NULL,
    created_at BIGINT NOT NULL,
    deadline_at BIGINT NOT NULL,
    ended_at BIGINT,
    error TEXT,
    note TEXT,
    PRIMARY KEY (stream, "key"),
    CONSTRAINT postroad_delegations_is CHECK (status IN ('open', 'done', 'failed', 'cancelled', 'timed_out')),
    CONSTRAINT postroad_delegations_ended CHECK ((status = 'open') = (ended_at IS NULL))
);
CREATE INDEX postroad_delegations_child ON {p}delegations (child, ended_at, position);
CREATE INDEX postroad_delegations_due ON {p}delegations (deadline_at) WHERE status = 'open';
CREATE INDEX postroad_delegations_open ON {p}delegations (stream, status, "key");
CREATE TABLE {p}gates (
    kind TEXT NOT NULL,
    host TEXT NOT NULL,
    until BIGINT NOT NULL,
    closed_at BIGINT NOT NULL,
    failures INTEGER NOT NULL,
    probe TEXT,
    reason TEXT NOT NULL,
    updated_at BIGINT NOT NULL,
    PRIMARY KEY (kind, host)
);
CREATE TABLE {p}inbox (
    position INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    stream TEXT NOT NULL,
    type TEXT NOT NULL,
    event_id TEXT NOT NULL,
    kind TEXT NOT NULL,
    version INTEGER NOT NULL,
    data TEXT NOT NULL,
    received_at BIGINT NOT NULL,
    ready_at BIGINT NOT NULL,
    front INTEGER DEFAULT 1 NOT NULL,
    reason TEXT,
    CONSTRAINT postroad_inbox_event UNIQUE (stream, event_id)
);
CREATE INDEX postroad_inbox_dead ON {p}inbox (position) WHERE reason IS NOT NULL;
CREATE INDEX postroad_inbox_dead_of ON {p}inbox (stream, position) WHERE coalesce(reason, '-') <> '-';
CREATE INDEX postroad_inbox_front ON {p}inbox (type, ready_at, position) WHERE front = 1 AND reason IS NULL;
CREATE INDEX postroad_inbox_stops ON {p}inbox (kind, stream, position) WHERE kind = 'postroad.stop' AND reason IS NULL;
CREATE INDEX postroad_inbox_stream ON {p}inbox (type, stream, position) WHERE reason IS NULL;
CREATE TABLE {p}lane_members (
    number INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    lane TEXT NOT NULL,
    dispatch TEXT NOT NULL,
    kind TEXT NOT NULL,
    due_at BIGINT NOT NULL,
    fresh INTEGER DEFAULT 1 NOT NULL,
    CONSTRAINT postroad_lane_members_dispatch UNIQUE (dispatch)
);
CREATE INDEX postroad_lane_members_fresh ON {p}lane_members (kind, number) WHERE fresh = 1;
CREATE INDEX postroad_lane_members_lane ON {p}lane_members (lane, number);
CREATE TABLE {p}lanes (
    lane TEXT NOT NULL,
    head TEXT,
    PRIMARY KEY (lane)
);
CREATE TABLE {p}log (
    stream TEXT NOT NULL,
    seq BIGINT NOT NULL,
    entry_id TEXT NOT NULL,
    kind TEXT NOT NULL,
    version INTEGER NOT NULL,
    data TEXT NOT NULL,
    received_at BIGINT NOT NULL,
    recorded_at BIGINT NOT NULL,
    run_id TEXT,
    cause TEXT,
    PRIMARY KEY (stream, seq),
    CONSTRAINT postroad_log_entry UNIQUE (stream, entry_id)
);
CREATE TABLE {p}operations (
    turn_id TEXT NOT NULL,
    ordinal INTEGER NOT NULL,
    run_id TEXT NOT NULL,
    stream TEXT NOT NULL,
    tool TEXT NOT NULL,
    version INTEGER NOT NULL,
    effect TEXT NOT NULL,
    "key" TEXT,
    status TEXT NOT NULL,
    repeats INTEGER,
    entry TEXT,
    resolved TEXT,
    started_at BIGINT NOT NULL,
    ended_at BIGINT,
    arguments TEXT NOT NULL,
    result TEXT,
    PRIMARY KEY (turn_id, ordinal),
    CONSTRAINT postroad_operations_effect CHECK (effect IN ('read', 'idempotent', 'keyed', 'unsafe')),
    CONSTRAINT postroad_operations_status CHECK (status IN ('started', 'finished', 'failed', 'reused'))
);
CREATE INDEX postroad_operations_run ON {p}operations (run_id);
CREATE INDEX postroad_operations_started ON {p}operations (started_at);
CREATE INDEX postroad_operations_stream ON {p}operations (stream, started_at);
CREATE TABLE {p}outbox (
    id TEXT NOT NULL,
    "key" TEXT NOT NULL,
    stream TEXT NOT NULL,
    kind TEXT NOT NULL,
    version INTEGER NOT NULL,
    destination TEXT NOT NULL,
    lane TEXT,
    host TEXT,
    policy TEXT NOT NULL,
    status TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    max_attempts INTEGER,
    epoch INTEGER NOT NULL,
    due_at BIGINT,
    first_attempt_at BIGINT,
    claim_token TEXT,
    expires_at BIGINT,
    ack_required INTEGER DEFAULT 0 NOT NULL,
    receipt TEXT,
    last_error TEXT,
    content_hash TEXT NOT NULL,
    origin TEXT NOT NULL,
    created_at BIGINT NOT NULL,
    updated_at BIGINT NOT NULL,
    headers TEXT NOT NULL,
    body TEXT NOT NULL,
    PRIMARY KEY (id),
    CONSTRAINT postroad_outbox_key UNIQUE ("key"),
    CONSTRAINT postroad_outbox_attempt CHECK (attempt >= 0),
    CONSTRAINT postroad_outbox_max_attempts CHECK (max_attempts >= 1),
    CONSTRAINT postroad_outbox_policy CHECK (policy IN ('event', 'alert')),
    CONSTRAINT postroad_outbox_status CHECK (status IN ('pending', 'delivering', 'delivered', 'acked', 'dead_letter', 'expired')),
    CONSTRAINT postroad_outbox_claim CHECK ((status = 'delivering') = (claim_token IS NOT NULL) AND (status <> 'delivering' OR due_at IS NOT NULL))
);
CREATE INDEX postroad_outbox_created ON {p}outbox (created_at);
CREATE INDEX postroad_outbox_due ON {p}outbox (kind, due_at) WHERE status IN ('pending', 'delivering') AND due_at IS NOT NULL;
CREATE INDEX postroad_outbox_expires ON {p}outbox (expires_at) WHERE status IN ('pending', 'delivering') AND expires_at IS NOT NULL;
CREATE INDEX postroad_outbox_host ON {p}outbox (kind, host, due_at) WHERE status IN ('pending', 'delivering') AND due_at IS NOT NULL AND host IS NOT NULL;
CREATE INDEX postroad_outbox_no_host ON {p}outbox (kind, due_at) WHERE status IN ('pending', 'delivering') AND due_at IS NOT NULL AND host IS NULL;
CREATE TABLE {p}partials (
    stream TEXT NOT NULL,
    run_id TEXT NOT NULL,
    turn_id TEXT NOT NULL,
    updated_at BIGINT NOT NULL,
    said TEXT NOT NULL,
    PRIMARY KEY (stream)
);
CREATE TABLE {p}queues (
    stream TEXT NOT NULL,
    type TEXT NOT NULL,
    claim_token TEXT,
    until BIGINT,
    state TEXT NOT NULL,
    attempts INTEGER NOT NULL,
    picked TEXT,
    alone TEXT,
    lease BIGINT,
    PRIMARY KEY (stream),
    CONSTRAINT postroad_queues_token CHECK ((claim_token IS NULL) = (state <> 'claimed'))
);
CREATE INDEX postroad_queues_parked ON {p}queues (stream) WHERE until IS NULL;
CREATE INDEX postroad_queues_until ON {p}queues (type, until) WHERE until IS NOT NULL;
CREATE TABLE {p}rates (
    kind TEXT NOT NULL,
    host TEXT NOT NULL,
    next_at BIGINT NOT NULL,
    PRIMARY KEY (kind, host)
);
CREATE TABLE {p}runs (
    run_id TEXT NOT NULL,
    stream TEXT NOT NULL,
    turn_id TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    claim_token TEXT NOT NULL,
    started_at BIGINT NOT NULL,
    ended_at BIGINT,
    end_reason TEXT,
    error TEXT,
    PRIMARY KEY (run_id)
);
CREATE INDEX postroad_runs_started ON {p}runs (started_at);
CREATE INDEX postroad_runs_stream ON {p}runs (stream, started_at);
CREATE INDEX postroad_runs_trouble ON {p}runs (end_reason, ended_at) WHERE end_reason <> 'committed';
CREATE TABLE {p}streams (
    id TEXT NOT NULL,
    type TEXT NOT NULL,
    version BIGINT NOT NULL,
    deleted_at BIGINT,
    PRIMARY KEY (id)
);
CREATE INDEX postroad_streams_deleted ON {p}streams (deleted_at) WHERE deleted_at IS NOT NULL;
CREATE TABLE {p}timers (
    stream TEXT NOT NULL,
    "key" TEXT NOT NULL,
    fire_at BIGINT NOT NULL,
    kind TEXT NOT NULL,
    data TEXT NOT NULL,
    spec TEXT NOT NULL,
    status TEXT NOT NULL,
    generation INTEGER NOT NULL,
    updated_at BIGINT NOT NULL,
    PRIMARY KEY (stream, "key"),
    CONSTRAINT postroad_timers_status CHECK (status IN ('armed', 'fired', 'cancelled'))
);
CREATE INDEX postroad_timers_due ON {p}timers (fire_at) WHERE status = 'armed';
CREATE TABLE {p}tombstones (
    scope TEXT NOT NULL,
    "key" TEXT NOT NULL,
    id TEXT NOT NULL,
    stream TEXT NOT NULL,
    content_hash TEXT NOT NULL,
    ended_at BIGINT NOT NULL,
    PRIMARY KEY (scope, "key")
);
CREATE INDEX postroad_tombstones_ended ON {p}tombstones (ended_at) WHERE stream = '';
CREATE INDEX postroad_tombstones_stream ON {p}tombstones (stream) WHERE stream <> '';
CREATE TABLE {p}transitions (
    id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    entity TEXT NOT NULL,
    from_status TEXT,
    to_status TEXT NOT NULL,
    reason_code TEXT NOT NULL,
    summary TEXT NOT NULL,
    source TEXT NOT NULL,
    actor TEXT NOT NULL,
    evidence TEXT NOT NULL,
    metadata TEXT NOT NULL,
    at BIGINT NOT NULL
);
CREATE INDEX postroad_transitions_entity ON {p}transitions (entity, id);
CREATE INDEX postroad_transitions_trouble ON {p}transitions (at) WHERE to_status IN ('dead_letter', 'expired') OR from_status = to_status;
