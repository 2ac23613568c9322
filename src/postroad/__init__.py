"""Postroad: a durable runtime for agents, and for any program whose decisions act on the world.

Names are loaded when they are first used, so that `import postroad` costs next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from postroad.engine.app import Postroad
    from postroad.engine.declarations import OUTCOME, REPORT, TASK, TIMER_FIRED, Transport
    from postroad.engine.delegations import Delegations
    from postroad.engine.dispatches import Dispatches
    from postroad.engine.handlers import Handlers
    from postroad.engine.running import Drained, Loops
    from postroad.engine.streams import Streams
    from postroad.engine.tools import Tool
    from postroad.engine.transaction import Opening, Transaction
    from postroad.engine.turn import Turn
    from postroad.model.delegations import Cancellation, Delegated, Delegation, Task
    from postroad.model.dispatches import (
        Accepted,
        Alert,
        Changed,
        Dispatch,
        DispatchFilter,
        DispatchRow,
        Receipt,
        Withdrawn,
    )
    from postroad.model.errors import (
        AckNotRequested,
        AckRefused,
        BadAckToken,
        CommitUnknown,
        ConcurrencyConflict,
        DatabaseBusy,
        DatabaseReplaced,
        DispatchNotFound,
        GiveUp,
        InvalidInput,
        KeyConflict,
        NestedTransaction,
        NotInTransaction,
        OutcomeUnknown,
        PostroadError,
        Refused,
        RetryLater,
        SchemaMismatch,
        SourceRefused,
        Span,
        StaleClaim,
        StreamDeleted,
        TimerConflict,
        TransactionAborted,
        TurnStopped,
        UnknownKind,
        Unreachable,
    )
    from postroad.model.events import Entry, Event, Outcome, Partial
    from postroad.model.folds import Fold
    from postroad.model.kinds import Kind
    from postroad.model.operations import Operation
    from postroad.model.reports import Report
    from postroad.model.retry import Retry
    from postroad.model.streams import EventRow, StreamRow, WaitingEvent
    from postroad.transports.argv import Argv
    from postroad.transports.webhook import Webhook

__version__ = "0.1.0"

_HOMES = {
    "engine.app": ("Postroad",),
    "engine.declarations": ("OUTCOME", "REPORT", "TASK", "TIMER_FIRED", "Transport"),
    "engine.delegations": ("Delegations",),
    "engine.dispatches": ("Dispatches",),
    "engine.handlers": ("Handlers",),
    "engine.running": ("Drained", "Loops"),
    "engine.transaction": ("Opening", "Transaction"),
    "engine.streams": ("Streams",),
    "engine.tools": ("Tool",),
    "engine.turn": ("Turn",),
    "model.delegations": ("Cancellation", "Delegated", "Delegation", "Task"),
    "model.dispatches": (
        "Accepted", "Alert", "Changed", "Dispatch", "DispatchFilter", "DispatchRow", "Receipt", "Withdrawn",
    ),
    "model.errors": (
        "AckNotRequested", "AckRefused", "BadAckToken", "CommitUnknown", "ConcurrencyConflict", "DatabaseBusy",
        "DatabaseReplaced", "DispatchNotFound", "GiveUp", "InvalidInput", "KeyConflict", "NestedTransaction",
        "NotInTransaction", "OutcomeUnknown", "PostroadError", "Refused", "RetryLater", "SchemaMismatch",
        "SourceRefused", "Span", "StaleClaim", "StreamDeleted", "TimerConflict", "TransactionAborted", "TurnStopped",
        "UnknownKind", "Unreachable",
    ),
    "model.events": ("Entry", "Event", "Outcome", "Partial"),
    "model.folds": ("Fold",),
    "model.kinds": ("Kind",),
    "model.operations": ("Operation",),
    "model.reports": ("Report",),
    "model.retry": ("Retry",),
    "model.streams": ("EventRow", "StreamRow", "WaitingEvent"),
    "transports.argv": ("Argv",),
    "transports.webhook": ("Webhook",),
}  # fmt: skip
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "OUTCOME", "REPORT", "TASK", "TIMER_FIRED", "Accepted", "AckNotRequested", "AckRefused", "Alert", "Argv",
    "BadAckToken", "Cancellation", "Changed", "CommitUnknown", "ConcurrencyConflict", "DatabaseBusy",
    "DatabaseReplaced", "Delegated", "Delegation", "Delegations", "Dispatch", "DispatchFilter", "DispatchNotFound",
    "DispatchRow", "Dispatches", "Drained", "Entry", "Event", "EventRow", "Fold", "GiveUp", "Handlers", "InvalidInput",
    "KeyConflict", "Kind", "Loops", "NestedTransaction", "NotInTransaction", "Opening", "Operation", "Outcome",
    "OutcomeUnknown", "Partial", "Postroad", "PostroadError", "Receipt", "Refused", "Report", "Retry", "RetryLater",
    "SchemaMismatch", "SourceRefused", "Span", "StaleClaim", "StreamDeleted", "StreamRow", "Streams", "Task",
    "TimerConflict", "Tool", "Transaction", "TransactionAborted", "Transport", "Turn", "TurnStopped", "UnknownKind",
    "Unreachable", "WaitingEvent", "Webhook", "Withdrawn",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'postroad' has no attribute {name!r}")
    value = getattr(import_module(f"postroad.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
