"""What a sender's return, exception or silence says about its attempt."""

import inspect
from typing import assert_never

from postroad.engine.calls import Aborted, CallResult, Raised, Returned, TimedOut
from postroad.engine.declarations import Sender
from postroad.model.clock import SECOND
from postroad.model.dispatches import Receipt
from postroad.model.errors import GiveUp, OutcomeUnknown, RetryLater, Unreachable, shown
from postroad.model.lifecycle import Result
from postroad.model.payload import encode, safe_error
from postroad.model.retry import floor_of, length_of


def judge(result: CallResult, sender: Sender) -> tuple[Result, str, str | None, int]:
    """What an attempt came to: the result, the error's text, the receipt, and a Retry-After in microseconds."""
    unknown: Result = "unknown" if sender.on_unknown == "park" else "failed"
    match result:
        case Returned(None):
            return "ok", "", None, 0
        case Returned(str() as reference):
            return "ok", "", _receipt(Receipt(reference)), 0
        case Returned(Receipt() as receipt):
            return "ok", "", _receipt(receipt), 0
        case Returned(value):
            if inspect.iscoroutine(value):
                value.close()  # never awaited, so it has sent nothing
            return (
                "failed",
                f"the sender returned {type(value).__name__}; success is Receipt, str or None",
                None,
                0,
            )
        case Raised(Unreachable() as error):
            return "unreachable", words(error), None, floor_of(error.after)
        case Raised(RetryLater() as error):
            return "failed", words(error), None, floor_of(error.after)
        case Raised(GiveUp() as error):
            return "permanent", words(error), None, 0
        case Raised(OutcomeUnknown() as error):
            return unknown, words(error), None, 0
        case Raised(error):
            return "failed", safe_error(error), None, 0
        case TimedOut(stuck):
            said = f"timeout after {sender.timeout / SECOND:g} s" + (", still running" if stuck else "")
            return unknown, said, None, 0
        case Aborted(why):
            cut: Result = unknown if sender.on_unknown == "park" else "cut_short"
            return cut, f"ended while sending: {why}", None, 0
        case _:
            assert_never(result)


def words(error: RetryLater | GiveUp | OutcomeUnknown) -> str:
    """What a handler says of its own accord; whose class it is says nothing more."""
    said = safe_error(error.reason or error)
    after = error.after if isinstance(error, RetryLater) else None
    if after is not None and length_of(after) is None:
        return f"{said} (after={shown(after)} is no length of time, and was not waited for)"
    return said


def _receipt(receipt: Receipt) -> str:
    """What the provider said, as it can be stored; a provider's odd text must not undo a success."""
    try:
        return encode({"reference": receipt.reference, "data": dict(receipt.data)}, "receipt", bytes_max=64 * 1024)
    except Exception as error:
        return encode({"reference": safe_error(receipt.reference, 500), "error": safe_error(error, 500)}, "receipt")
