"""Who answers: a scripted model, which needs no network and always says the same, or a real one by a setting."""

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from postroad import RetryLater, Turn

Answer = Callable[[Turn, Sequence[str]], Awaitable[str]]
WORD_SECONDS = 0.06
INSTRUCTIONS = "You are a helpful assistant in a demonstration. Answer in one or two sentences."


def chosen() -> Answer:
    """The model of POSTROAD_CHAT_MODEL, such as openai:gpt-5-mini, with its provider's key; else the scripted one."""
    name = os.environ.get("POSTROAD_CHAT_MODEL")
    return real(name) if name else scripted


def real(name: str) -> Answer:
    """A model of a provider, as a Pydantic AI agent: `pip install 'postroad[pydantic-ai]'`."""
    from pydantic_ai import Agent

    from postroad.agent import pydantic_ai as agents

    agent = Agent(name, instructions=INSTRUCTIONS)

    async def answer(turn: Turn, texts: Sequence[str]) -> str:
        result = await agents.run(agent, turn, "\n".join(texts), history=agents.remembered(turn), partials=True)
        agents.remember(turn, result)
        return result.output

    return answer


@dataclass(frozen=True)
class Phrase:
    """Words that the scripted model knows, and the tool that it then calls as a model does: by name, with JSON."""

    words: str
    tool: str
    before: str
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def arguments(self, found: "re.Match[str]") -> str:
        said = {name: int(one) if one.isdigit() else one for name, one in found.groupdict().items() if one}
        return msgspec.json.encode({**self.defaults, **said}).decode()


PHRASES = (
    Phrase(r"weather(?: in (?P<city>\w+))?", "weather", "Let me look out of the window.", {"city": "Rome"}),
    Phrase(r"label this (?P<word>\w+)", "label", "I look for a sticker."),
    Phrase(r"charge (?P<euros>\d{1,6}) euros?", "charge", "I call the bank."),
    Phrase(r"send a mail to (?P<to>\S+)", "send_mail", "I go to the post office.", {"subject": "Hello"}),
)
HINT = (
    "I am a script, and know a few phrases: what's the weather · label this urgent · charge 5 euros · "
    "send a mail to ann@example.com · count to 50 · be busy · be broken."
)


async def scripted(turn: Turn, texts: Sequence[str]) -> str:
    """Answer each text, and say it word by word."""
    said: list[str] = []
    for text in texts:
        async for piece in pieces(turn, text):
            for word in piece.split():
                turn.partial(f"{word} ")
                said.append(word)
                await asyncio.sleep(WORD_SECONDS)
    return " ".join(said)


async def pieces(turn: Turn, text: str) -> Any:
    """What the scripted model has to say to a text, with its tools' answers."""
    for phrase in PHRASES:
        if found := re.search(phrase.words, text, re.IGNORECASE):
            yield phrase.before
            yield f"Done: {await turn.call_json(phrase.tool, phrase.arguments(found))}."
            return
    if found := re.search(r"count to (\d{1,3})", text):
        yield " ".join(str(number) for number in range(1, int(found[1]) + 1))
    elif "be busy" in text:
        if turn.attempt == 1:  # as a provider says it that limits its rate: no fault, and not now
            raise RetryLater("the model is busy", after=3)
        yield "Sorry, I was busy."
    elif "be broken" in text:
        raise RuntimeError("this is a bug in the handler")
    else:
        yield f"You said “{text}”."
        yield HINT
