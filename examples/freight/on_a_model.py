"""The freight agent with a model that reads what drivers write: the rules decide the rest, and the gate sees it all.

`python on_a_model.py` plays a driver who answers twice, with a scripted model; give the name of a real one as the
first argument (`openai:gpt-5`). Needs `postroad[demo,pydantic-ai]`.
"""

import sys
from dataclasses import dataclass
from typing import Any

from pydantic_ai import Agent
from pydantic_ai.messages import ModelMessage, ModelResponse, ToolCallPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

from postroad import Postroad, Turn
from postroad.agent.pydantic_ai import run
from postroad.demo.actions import PostHeroSlack
from postroad.demo.asks import Load
from postroad.demo.freight import handlers
from postroad.demo.kinds import DECISION, FIRST, REPLY, DriverSms
from postroad.demo.policy import Inbound, Plan, Replied, plan
from postroad.testing import Harness

STREAM = "load/481207"


@dataclass
class Understood:
    """What a driver's words come to: an ETA as 14:30, or None if they name none."""

    eta: str | None


class ReadingPolicy:
    """Has a model read what a driver writes; all else is decided by the rules, without a model."""

    def __init__(self, model: Any) -> None:
        self.reader = Agent(model, output_type=Understood, instructions="When does the driver say that they arrive?")

    async def decide(self, turn: Turn, load: Load, inbound: Inbound) -> Plan:
        """The rules' plan; for words without an ETA a line to the Hero team, while the ask stays open."""
        if not isinstance(inbound, Replied) or load.current is None:
            return plan(turn.subject, load, inbound)
        understood = (await run(self.reader, turn, inbound.text)).output
        if understood.eta is None:
            said = PostHeroSlack(f"Load {turn.subject}: the driver wrote, but named no ETA: {inbound.text}"[:200])
            return Plan("the driver named no ETA", (said,))
        return plan(turn.subject, load, Replied(inbound.event, f"ETA {understood.eta}"))


def freight(model: Any) -> Postroad:
    """The agent, without a database."""
    post = Postroad()
    post.include(handlers(FIRST, decider=ReadingPolicy(model)))

    @post.tool(effect="read")
    async def due(number: str) -> str:
        """When a load is expected."""
        return "14:00" if number else "unknown"

    return post


def scripted(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
    """A stand-in for a model: it looks up the load, then answers with the time that it finds in the words."""
    parts = [part for message in messages for part in message.parts]
    words = " ".join(str(part.content) for part in parts if part.part_kind == "user-prompt")
    if len(messages) == 1:
        return ModelResponse(parts=[ToolCallPart("due", {"number": "481207"})])
    found = next((word.strip(".") for word in words.split() if word[:1].isdigit()), None)
    return ModelResponse(parts=[ToolCallPart(info.output_tools[0].name, {"eta": found})])


def main(model: Any) -> None:
    """Play a truck at risk and a driver who answers twice, and print what was decided."""
    with Harness(freight(model)) as harness:
        with harness.post.begin() as tx:
            tx.publish(STREAM, FIRST.ping, FIRST.ping_body(risky=True, client="A", driver="+15550100207"), key="ping_1")
        harness.advance(60)
        for number, words in enumerate(("Stuck behind a tractor, sorry.", "I will be there at 14:30.")):
            with harness.post.begin() as tx:
                tx.publish(STREAM, REPLY, DriverSms(words), key=f"sms_{number}")
            harness.advance(60)
        for entry in harness.entries(STREAM):
            if (decision := DECISION.of(entry)) is not None:
                print(f"{decision.event}: {decision.reason}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else FunctionModel(scripted))
