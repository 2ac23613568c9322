"""What engine and store hand each other: rows to be written, claims that were won, results to be settled.

Times are microseconds since 1970 UTC, lengths of time microseconds, payloads their exact JSON text.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec

from postroad.model.acks import Presented
from postroad.model.delegations import DelegationEnd, NewDelegation
from postroad.model.lifecycle import Reason, Result, RunEnd, Status
from postroad.model.retry import Retry


class NewEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event to be put into a stream's inbox. `ready_at` None: at once.

    `keep`: one of the same kind that holds its id is taken for it, whatever that says.
    """

    stream: str
    event_id: str
    kind: str
    version: int = 1
    data: str
    ready_at: int | None = None
    keep: bool = False


class Published(msgspec.Struct, frozen=True):
    """Where an event stands: `created` is False if the same one was accepted before; no position: it landed."""

    event_id: str
    position: int | None
    created: bool


class NewEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An entry to be appended to a log."""

    entry_id: str
    kind: str
    version: int = 1
    data: str
    received_at: int | None = None
    run_id: str | None = None
    cause: str | None = None


class NewDispatch(msgspec.Struct, frozen=True, kw_only=True):
    """A dispatch to be written. `key` '' means that its id is its key; max_attempts None: its sender's.

    `ack_required`, 0 or 1: whether it ends by its consumer's acknowledgement, not by a send.
    """

    id: str
    key: str
    stream: str = ""
    kind: str
    version: int = 1
    destination: str = ""
    body: str
    headers: str = "{}"
    on_failure: Literal["event", "alert"] = "event"
    max_attempts: int | None = None
    due_at: int
    expires_at: int | None = None
    content_hash: str
    origin: str = "{}"
    keep: bool = False
    lane: str | None = None
    ack_required: int = 0
    host: str | None = None


class Enqueued(msgspec.Struct, frozen=True):
    """The dispatch that holds a key; `created` is False if it was there before."""

    id: str
    key: str
    created: bool


class TimerChange(msgspec.Struct, frozen=True, kw_only=True):
    """A change of one timer. `spec` is `at` or `after` as it was given: part of the content."""

    verb: Literal["set", "rearm", "cancel"]
    stream: str
    key: str
    fire_at: int = 0
    data: str = "{}"
    spec: str = ""


class InboxEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a claimed set."""

    position: int
    event_id: str
    kind: str
    version: int
    data: str
    received_at: int


class TurnClaim(msgspec.Struct, frozen=True, kw_only=True):
    """A claimed stream with the exact set of events of its turn.

    `attempt` counts from 1 and includes this one. `interrupted`: the last claimant was lost, not failed.
    `alone`: the set was split, this is one event of it. `again`: the set was claimed before. `stopping`: a person
    asked that the turn end.
    """

    stream: str
    token: str
    run_id: str
    turn_id: str
    attempt: int
    version: int
    until: int
    events: list[InboxEvent]
    interrupted: bool = False
    alone: bool = False
    again: bool = False
    stopping: bool = False


class ClaimedTurns(msgspec.Struct, frozen=True):
    """What one pass of claiming came to.

    `clogged`: the oldest waiting events hide other streams' (see `adopt`); `cursor` is for the next pass.
    """

    claims: list[TurnClaim]
    clogged: bool
    cursor: str


class EndedRun(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one run."""

    run_id: str
    end: RunEnd
    error: str | None = None


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at a turn. `end` None: under way, or lost with its process."""

    run_id: str
    stream: str
    turn_id: str
    attempt: int
    started_at: int
    ended_at: int | None
    end: RunEnd | None
    error: str | None


class Hold(msgspec.Struct, frozen=True):
    """Proof of a claim: what is held (a stream or a dispatch id) and the token."""

    subject: str
    token: str


class NewAlert(msgspec.Struct, frozen=True, kw_only=True):
    """Something a person must know, to be written in the transaction that found it."""

    severity: Literal["warning", "error"] = "error"
    code: str
    subject: str
    detail: str = ""


class TurnCommit(msgspec.Struct, frozen=True, kw_only=True):
    """All that one turn writes: its events consumed, what it recorded and what it causes.

    `consumed` move into the log, then `entries` follow. `dead` stay in the inbox with `dead_reason`. `operated`: the
    run has called tools. `stoppable`: it is refused if a person asked that the turn end.
    `spoke`: what this run has said to watchers may stand in the database. `reports` go to other streams; they refuse
    nothing, see `reports.tell`. `delegated` are among the `publishes` too; `finished` are tasks of this stream.
    """

    claim: TurnClaim
    consumed: list[InboxEvent]
    entries: list[NewEntry] = []
    dispatches: list[NewDispatch] = []
    timers: list[TimerChange] = []
    publishes: list[NewEvent] = []
    reports: list[NewEvent] = []
    delegated: list[NewDelegation] = []
    finished: list[DelegationEnd] = []
    acks: list[Presented] = []
    withdrawals: list[str] = []
    deletions: list[str] = []
    dead: list[InboxEvent] = []
    dead_reason: str = ""
    alerts: list[NewAlert] = []
    operated: bool = False
    stoppable: bool = False
    spoke: bool = False
    end: RunEnd = RunEnd.COMMITTED
    error: str | None = None


class TurnCommitted(msgspec.Struct, frozen=True, kw_only=True):
    """What a turn's commit came to: the stream's version now, what its publishes and withdrawals answered."""

    stream: str
    version: int
    published: list[Published] = []
    enqueued: list[Enqueued] = []
    withdrawn: list[str] = []
    events_left: bool = False


class DispatchClaim(msgspec.Struct, frozen=True, kw_only=True):
    """A claimed dispatch: the claim is the start of attempt number `attempt`."""

    id: str
    key: str
    stream: str
    kind: str
    version: int
    destination: str
    body: str
    headers: str
    origin: str
    attempt: int
    max_attempts: int
    epoch: int
    token: str
    until: int
    created_at: int
    first_attempt_at: int
    expires_at: int | None
    possible_duplicate: bool
    lane: str | None = None
    ack_required: bool = False
    host: str | None = None
    probe: bool = False


class SendPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How a kind's dispatches are claimed and settled by the app that sends them; `version` is the newest it knows.

    `on_dead`: whether a dead letter holds up its lane until a person decides. `patience`: for how long after its first
    attempt a dispatch costs none while its destination cannot be reached. `rate` and `rate_per_host`: attempts a
    second over all processes.
    """

    kind: str
    lease: int
    version: int = 2**31 - 1
    retry: Retry
    on_failure: Literal["event", "alert"] = "event"
    park_unknown: bool = False
    on_dead: Literal["block", "skip"] = "block"
    patience: int = 0
    rate: float | None = None
    rate_per_host: float | None = None


class HostRoom(msgspec.Struct, frozen=True):
    """How many dispatches a claimant can send to one host at once, and how many it is sending to each."""

    most: int
    busy: Mapping[str, int] = {}

    def of(self, host: str) -> int:
        """How many more it can send to a host."""
        return max(0, self.most - self.busy.get(host, 0))


class Settlement(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt's result, to be settled under its token. `floor`: no retry sooner than that; `fraction`: jitter.

    `epoch` is the claim's; it matters if an operator's retry has begun a new one since. None: the row's. `probe`: it
    was the attempt by which a gate is tried. `gate`: which one an unreachable destination closes: '' its kind's, or
    its host's. `unsent`: its sender was not called, so that it says nothing about where it goes.
    """

    id: str
    token: str
    attempt: int
    result: Result
    policy: SendPolicy
    error: str = ""
    receipt: str | None = None
    floor: int = 0
    fraction: float = 1.0
    epoch: int | None = None
    lane: str | None = None
    host: str | None = None
    probe: bool = False
    gate: str = ""
    unsent: bool = False


class Settled(msgspec.Struct, frozen=True):
    """What became of a settlement: the dispatch's status now, and whether the claim was over (nothing changed)."""

    id: str
    status: str
    reason: str
    stale: bool


class ClaimedDispatches(msgspec.Struct, frozen=True):
    """What one pass of claiming came to: what may be sent now, and what was ended instead.

    `unseen`: dispatches have joined lanes that a dispatcher must still look at (see `lanes.promote`). `again_at`: a
    rate holds back some that are due, until then.
    """

    claims: list[DispatchClaim]
    ended: list[Settled]
    unseen: bool = False
    again_at: int | None = None


class NewTransition(msgspec.Struct, frozen=True, kw_only=True):
    """A row of history: one change of a dispatch, or what a claimant did after its claim was over (from = to)."""

    entity: str
    from_status: Status | None
    to_status: Status
    reason_code: Reason
    summary: str = ""
    source: str = "system"
    actor: str = ""
    evidence: str = "[]"
    metadata: str = "{}"
