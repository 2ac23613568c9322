"""Who plays in the demo: the loads, when their drivers answer, and how the services misbehave."""

from dataclasses import dataclass

from postroad.demo.asks import LADDER
from postroad.demo.services import Script


@dataclass(frozen=True, slots=True)
class Player:
    """A load at risk. Its driver answers SMS number `replies_to` (0: none); each answer comes `copies` times."""

    number: str
    client: str
    about: str
    replies_to: int = 1
    copies: int = 1

    @property
    def stream(self) -> str:
        return f"load/{self.number}"

    @property
    def driver(self) -> str:
        return f"+15550100{self.number[-3:]}"

    @property
    def ping(self) -> str:
        return f"ping_{self.number}"

    def sms(self, step: int) -> str:
        """The key of the SMS of a step."""
        return f"{self.number}/A/{step}/{LADDER[0]}"


SILENT = Player("481207", "A", "the driver never answers: two SMS, then a person", replies_to=0)
ANSWERS = Player("481208", "B", "the driver answers, and the service hands the answer over twice", copies=2)
BUSY = Player("481209", "A", "the SMS service says 500 twice")
LOST = Player("481210", "C", "the SMS service sends the SMS, but its answer is lost")
REFUSED = Player("481211", "A", "the SMS service refuses the first SMS for good", replies_to=2)
SLOW = Player("481212", "A", "the SMS service is slow, and the team's Slack refuses")
FIRST_ACT = (SILENT, ANSWERS, BUSY, LOST, REFUSED, SLOW)

HELD = Player("481213", "A", "the dispatcher dies in the middle of this one's SMS")

ARMED = Player("481217", "B", "waits behind a timer", replies_to=2)
QUEUED = Player("481215", "A", "its SMS waits in the outbox")
THINKING = Player("481214", "A", "its turn is half-finished")
WAITING = Player("481216", "C", "its event waits in the inbox")
PLAYERS = {player.number: player for player in (*FIRST_ACT, HELD, ARMED, QUEUED, THINKING, WAITING)}


def think(player: Player) -> str:
    """The key under which the model is asked about a load's ping."""
    return f"think/{player.number}/{player.ping}"


SCRIPT: Script = {
    BUSY.sms(1): ["busy", "busy"],
    LOST.sms(1): ["lost"],
    REFUSED.sms(1): ["refuse"],
    SLOW.sms(1): ["slow"],
    f"{SLOW.number}/reply_{SLOW.number}_1/post_hero_slack": ["refuse"],
    HELD.sms(1): ["hold"],
    think(THINKING): ["hold"],
}
