"""What a sender's return, exception or silence says about its attempt."""

import inspect
from typing import NamedTuple, assert_never

from postroad.engine.calls import Aborted, CallResult, Raised, Returned, TimedOut
from postroad.engine.declarations import Sender
from postroad.model.clock import SECOND
from postroad.model.dispatches import Receipt
from postroad.model.errors import GiveUp, OutcomeUnknown, RetryLater, Unreachable, shown
from postroad.model.gates import WHOLE_KIND
from postroad.model.lifecycle import Result
from postroad.model.payload import encode, safe_error
from postroad.model.retry import floor_of, length_of
from postroad.model.rows import DispatchClaim, Settlement


class Verdict(NamedTuple):
    """What an attempt came to: the result, the error's text, the receipt, and a Retry-After in microseconds."""

    result: Result
    said: str = ""
    receipt: str | None = None
    floor: int = 0


NOT_BEGUN = Verdict("failed", "it had not begun, nothing was sent")


def judge(result: CallResult, sender: Sender) -> Verdict:
    """What an attempt came to by its end."""
    unknown: Result = "unknown" if sender.on_unknown == "park" else "failed"
    match result:
        case Returned(None):
            return Verdict("ok")
        case Returned(str() as reference):
            return Verdict("ok", receipt=_receipt(Receipt(reference)))
        case Returned(Receipt() as receipt):
            return Verdict("ok", receipt=_receipt(receipt))
        case Returned(value):
            if inspect.iscoroutine(value):
                value.close()  # never awaited, so it has sent nothing
            return Verdict("failed", f"the sender returned {type(value).__name__}; success is Receipt, str or None")
        case Raised(Unreachable() as error):
            return Verdict("unreachable", words(error), floor=floor_of(error.after))
        case Raised(RetryLater() as error):
            return Verdict("failed", words(error), floor=floor_of(error.after))
        case Raised(GiveUp() as error):
            return Verdict("permanent", words(error))
        case Raised(OutcomeUnknown() as error):
            return Verdict(unknown, words(error))
        case Raised(error):
            return Verdict("failed", safe_error(error))
        case TimedOut(stuck):
            said = f"timeout after {sender.timeout / SECOND:g} s" + (", still running" if stuck else "")
            return Verdict(unknown, said)
        case Aborted(why):
            cut: Result = unknown if sender.on_unknown == "park" else "cut_short"
            return Verdict(cut, f"ended while sending: {why}")
        case _:
            assert_never(result)


def gate_of(claim: DispatchClaim, result: CallResult) -> str:
    """Which gate an unreachable destination closes: that of its host, if it has one, unless the sender says else."""
    whole = isinstance(result, Raised) and isinstance(result.error, Unreachable) and result.error.whole_kind
    return WHOLE_KIND if whole or claim.host is None else claim.host


def settlement(
    claim: DispatchClaim, sender: Sender, verdict: Verdict, *, gate: str = "", fraction: float = 0.0, unsent: bool
) -> Settlement:
    """A verdict as the store settles it; `unsent`: no sender was called."""
    return Settlement(
        id=claim.id,
        token=claim.token,
        attempt=claim.attempt,
        epoch=claim.epoch,
        result=verdict.result,
        policy=sender.policy,
        error=verdict.said,
        receipt=verdict.receipt,
        floor=verdict.floor,
        fraction=fraction,
        lane=claim.lane,
        host=claim.host,
        probe=claim.probe,
        gate=gate,
        unsent=unsent,
    )


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
