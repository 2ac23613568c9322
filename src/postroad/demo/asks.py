"""What the agent knows about a load: its asks, folded from the decisions in the load's log."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

# Minutes between two attempts, by client, and what each step of the ladder does.
WAITS = {"A": 30, "B": 60, "C": 45}
DEFAULT_WAIT = 30
LADDER = ("send_sms", "send_sms", "create_hero_task")


@dataclass(frozen=True, slots=True)
class Ask:
    """A question to a driver, and the step of the ladder that was taken last (from 1).

    `id` says what it was asked about (`ask:eta_request:ping_0700`); `short` is what keys carry (`A`).
    """

    id: str
    short: str
    client: str
    driver: str
    step: int
    open: bool = True

    @property
    def wait_minutes(self) -> int | None:
        """How long until the next step; None after the last one."""
        return None if self.step >= len(LADDER) else WAITS.get(self.client, DEFAULT_WAIT)


@dataclass(frozen=True, slots=True)
class Load:
    """The state of one load."""

    asks: dict[str, Ask] = field(default_factory=dict)

    @property
    def current(self) -> Ask | None:
        """The newest open ask."""
        return next((ask for ask in reversed(self.asks.values()) if ask.open), None)

    def after(self, asks: Iterable[Ask]) -> "Load":
        """The load with these asks changed or added."""
        return replace(self, asks={**self.asks, **{ask.id: ask for ask in asks}})

    def opened(self, event: str, client: str, driver: str) -> Ask:
        """The ask that an event opens, before its first step."""
        return Ask(f"ask:eta_request:{event}", letters(len(self.asks)), client, driver, step=0)

    def is_timer_current(self, short: str, step: int) -> bool:
        """Whether a timer still means something: its ask is open and no later step was taken."""
        return any(ask.open and ask.short == short and ask.step == step for ask in self.asks.values())


def letters(ordinal: int) -> str:
    """A, B, … Z, AA, AB, …: the short name of a load's ask number `ordinal`, from 0."""
    name = ""
    ordinal += 1
    while ordinal:
        ordinal, digit = divmod(ordinal - 1, 26)
        name = chr(ord("A") + digit) + name
    return name


def action_key(load: str, about: Ask | str, kind: str) -> str:
    """The key of what a decision sends: by the ask's step, or by the event for what is about no ask."""
    cause = about if isinstance(about, str) else f"{about.short}/{about.step}"
    return f"{load}/{cause}/{kind}"


def timer_key(load: str, ask: Ask) -> str:
    """The key of the timer behind an ask's step."""
    return f"tmr:{load}:{ask.short}:{ask.step}"
