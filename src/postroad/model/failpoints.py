"""Named places at which a test may stop, delay or kill the process. A call that does nothing unless armed."""

from collections.abc import Callable

# Every failpoint by name, with where it stands; a test compares this table with the call sites.
FAILPOINTS: dict[str, str] = {
    "accept.before_insert": "a block is left, nothing of it is written",
    "accept.after_insert": "what the block recorded is written, nothing is committed",
    "accept.after_commit": "it is committed, the caller does not know yet",
    "commit.before": "before COMMIT of any transaction of ours",
    "commit.after": "after COMMIT of any transaction of ours",
    "acks.verified": "tokens were found true and their dispatches are locked, nothing is written",
    "group.member": "a group is refused as a whole, its next member is about to be written by itself",
    "group.committed": "a group is committed, none of its callers knows yet",
    "turn.after_claim_commit": "streams are claimed, no turn has begun",
    "turn.before_handler": "the handler is about to be called",
    "turn.before_commit": "the handler has decided, nothing is written",
    "turn.after_commit": "the decision is committed, nobody is woken",
    "tool.before_start": "a tool is about to be called, nothing of that is recorded",
    "tool.started": "the call's start is recorded and committed, the tool is not called yet",
    "tool.returned": "the tool has ended, its result is not recorded",
    "tool.recorded": "its result is recorded and committed, the handler does not have it yet",
    "dispatch.after_claim_commit": "dispatches are claimed, no send has begun",
    "dispatch.before_send": "the sender is about to be called",
    "dispatch.after_send": "the sender has ended, its result is not settled",
    "dispatch.after_settle": "results are settled, nobody is woken",
    "timer.after_commit": "timers have fired and it is committed, nobody is woken",
    "alert.after_ring": "the sinks were told of alerts, nothing is marked as rung",
    "shutdown.begun": "the loops claim nothing more, what has begun is waited for",
    "shutdown.abandoned": "the grace is over, what has not ended was told to, nothing is given back",
    "inbox.publish": "before the events are put into the inbox",
    "inbox.published": "the events are in the inbox, nothing is committed",
    "queues.claim": "before a claim looks for streams",
    "queues.claimed": "the claim and its runs are written, nothing is committed",
    "queues.left": "a stream is given back, backs off, is parked or split; its run is not ended",
    "turns.fenced": "a turn's claim was found current and is locked",
    "turns.logged": "its log entries are written",
    "turns.consumed": "its events have left the inbox",
    "turns.deleted": "the streams that it deletes are marked so",
    "turns.dispatched": "its dispatches are in the outbox",
    "turns.timed": "its timers are set and cancelled",
    "turns.acknowledged": "what it acknowledges is acked",
    "turns.withdrawn": "its withdrawals are done",
    "turns.published": "its own events are in inboxes",
    "turns.delegated": "what it delegates and what it ends is written, with the reports of the ends",
    "turns.alerted": "its alerts are raised",
    "turns.attached": "its tool calls are attached to what it recorded",
    "turns.ended": "its run is ended, the stream still claimed",
    "turns.freed": "its stream is free again, nothing is committed",
    "delegations.ended": "delegations are marked as ended, the reports of it are not in inboxes",
    "timers.due": "the due timers are read and locked, nothing is published",
    "timers.published": "their events are in the inbox, the timers not yet marked as fired",
    "timers.marked": "the timers are marked, nothing is committed",
    "outbox.insert": "before dispatches are inserted",
    "outbox.inserted": "dispatches are inserted, who holds the keys that were taken is not read yet",
    "dispatch.selected": "due dispatches are locked, nothing is changed",
    "dispatch.claimed": "the claimed rows are changed, their history is not written",
    "settle.locked": "the dispatches to be settled are locked, nothing is changed",
    "moves.written": "rows of dispatches are changed, their outcomes are not published",
    "moves.told": "their outcomes are in the inbox, their history is not written",
    "moves.recorded": "their history is written, their alerts are not raised",
    "purging.deleted": "dispatches are purged, their keys have no tombstones yet",
    "purging.buried": "their keys have tombstones, nothing is committed",
    "retention.ended": "old rows are deleted, the audit does not say so yet",
    "migration.statement": "before each statement of a migration",
}
_armed: Callable[[str], None] | None = None


def failpoint(name: str) -> None:
    """Say that this place was reached."""
    if _armed is not None:
        _armed(name)


def arm(reached: Callable[[str], None] | None) -> None:
    """Have `reached` called with the name of each failpoint from now on; None disarms."""
    global _armed
    _armed = reached
