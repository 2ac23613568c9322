"""The freight agent's kinds, in the two releases of its code that the demo and the evals deploy."""

from dataclasses import dataclass, field
from typing import Any

from postroad import Kind
from postroad.demo.asks import Ask


@dataclass(frozen=True, slots=True)
class LocationPing:
    """A truck said where it is. `risk` of being late is low or high; `driver` a phone number."""

    risk: str
    client: str
    driver: str


@dataclass(frozen=True, slots=True)
class ScoredPing:
    """The second form: the risk is a number from 0 to 1."""

    score: float
    client: str
    driver: str


@dataclass(frozen=True, slots=True)
class DriverSms:
    """A driver wrote."""

    text: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """An action that the gate did not let through."""

    action: str
    reason: str


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided about an event: why, what it causes (keys), what was refused, the asks as they are."""

    event: str
    reason: str
    actions: list[str] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    asks: list[Ask] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Sms:
    """An SMS, as the service takes it."""

    text: str


@dataclass(frozen=True, slots=True)
class SignedSms:
    """The second form: it says who writes."""

    text: str
    sender: str


@dataclass(frozen=True, slots=True)
class HeroTask:
    """Work for a person."""

    title: str
    urgent: bool = False


@dataclass(frozen=True, slots=True)
class SlackPost:
    """A line in a channel."""

    text: str


@dataclass(frozen=True, slots=True)
class Stage:
    """A load's stage."""

    stage: str


HIGH = 0.5
SENDER = "Dispatch desk"
REPLY = Kind("DriverSms", DriverSms)
DECISION = Kind("DecisionRecorded", Decision)
HERO = Kind("create_hero_task", HeroTask)
SLACK = Kind("post_hero_slack", SlackPost)
STAGE = Kind("update_stage", Stage)


@dataclass(frozen=True, slots=True)
class Release:
    """What changed between two releases: the pings that come in, and the SMS that go out."""

    number: int
    ping: Kind[Any]
    sms: Kind[Any]

    def sms_body(self, text: str) -> Sms | SignedSms:
        """An SMS in this release's form."""
        return Sms(text) if self.number == 1 else SignedSms(text, SENDER)

    def ping_body(self, *, risky: bool, client: str, driver: str) -> LocationPing | ScoredPing:
        """A ping in this release's form."""
        if self.number == 1:
            return LocationPing("high" if risky else "low", client, driver)
        return ScoredPing(0.9 if risky else 0.1, client, driver)


def is_risky(ping: LocationPing | ScoredPing) -> bool:
    """Whether a load is likely to be late."""
    return ping.risk == "high" if isinstance(ping, LocationPing) else ping.score >= HIGH


def _scored(ping: Any) -> Any:
    return {"score": 0.9 if ping.pop("risk") == "high" else 0.1, **ping}


def _signed(sms: Any) -> Any:
    return {**sms, "sender": SENDER}


FIRST = Release(1, Kind("LocationPing", LocationPing), Kind("send_sms", Sms))
SECOND = Release(
    2,
    Kind("LocationPing", ScoredPing, version=2, upgrade={1: _scored}),
    Kind("send_sms", SignedSms, version=2, upgrade={1: _signed}),
)
RELEASES = {release.number: release for release in (FIRST, SECOND)}
