"""What a decider may propose, and the gate that everything proposed must pass before it is committed."""

import re
from dataclasses import dataclass

from postroad.demo.asks import Ask

STAGES = ("in_transit", "eta_confirmed", "escalated")
TEXT_CHARS_MAX = 480
TITLE_CHARS_MAX = 200
_PHONE = re.compile(r"\+[1-9][0-9]{6,14}")


@dataclass(frozen=True, slots=True)
class SendSms:
    """An SMS to a driver. Every action may be about an ask; its key then carries the ask's step."""

    to: str
    text: str
    about: Ask | None = None


@dataclass(frozen=True, slots=True)
class CreateHeroTask:
    """Work for a person of the Hero team."""

    title: str
    urgent: bool = False
    about: Ask | None = None


@dataclass(frozen=True, slots=True)
class PostHeroSlack:
    """A line in the Hero team's channel."""

    text: str
    about: Ask | None = None


@dataclass(frozen=True, slots=True)
class UpdateStage:
    """The load's stage, for the client's screen."""

    stage: str
    about: Ask | None = None


@dataclass(frozen=True, slots=True)
class FollowUp:
    """A timer after which the ask's next step is due, by its client's wait."""

    about: Ask


@dataclass(frozen=True, slots=True)
class CallOff:
    """The end of a follow-up. Housekeeping only: one that fires nevertheless is a noop."""

    about: Ask


Action = SendSms | CreateHeroTask | PostHeroSlack | UpdateStage | FollowUp | CallOff


def objection(action: Action) -> str | None:
    """Why an action must not be carried out, or None."""
    match action:
        case SendSms(to=to, text=text):
            if not _PHONE.fullmatch(to):
                return f"not a phone number: {to[:40]!r}"
            return _bounded(text, TEXT_CHARS_MAX, "text")
        case CreateHeroTask(title=title):
            return _bounded(title, TITLE_CHARS_MAX, "title")
        case PostHeroSlack(text=text):
            return _bounded(text, TEXT_CHARS_MAX, "text")
        case UpdateStage(stage=stage):
            return None if stage in STAGES else f"no such stage: {stage[:40]!r}"
        case FollowUp(about=ask) if ask.wait_minutes is None:
            return f"step {ask.step} is the last one"
        case FollowUp() | CallOff():
            return None


def _bounded(text: str, chars_max: int, field: str) -> str | None:
    if not text.strip():
        return f"{field} is empty"
    return f"{field} is longer than {chars_max} characters" if len(text) > chars_max else None
