"""The tools that the model may call, one of each effect.

The world that they change is a file, `world.txt`: it stands for the services out there, which a crash of ours does not
roll back. Each tool takes a while, so that there is time to kill the worker: acts happen in the middle of it.
"""

import asyncio
import os
from pathlib import Path

from postroad import Handlers

tools = Handlers()
WORLD = Path("world.txt")
TAKES_SECONDS = float(os.environ.get("CHAT_TOOL_SECONDS", "3"))


async def happen(line: str, *, once: bool) -> None:
    """Do something to the world. `once`: it is there already if it was done before."""
    await asyncio.sleep(TAKES_SECONDS / 2)
    if not (once and line in world()):
        note(line)
    await asyncio.sleep(TAKES_SECONDS / 2)


def note(line: str) -> None:
    """Write what was done."""
    with WORLD.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def world() -> list[str]:
    """Everything that was done, oldest first."""
    return WORLD.read_text("utf-8").splitlines() if WORLD.exists() else []


@tools.tool(effect="read")
async def weather(city: str) -> str:
    """What the weather is like in a city."""
    await asyncio.sleep(TAKES_SECONDS)
    return f"{len(city) + 15} degrees and dry in {city}"


@tools.tool(effect="idempotent")
async def label(word: str) -> str:
    """Put a label on this conversation. Done twice it is the same label."""
    await happen(f"label {word}", once=True)
    return f"labelled {word}"


@tools.tool(effect="keyed")
async def charge(euros: int, *, key: str = "") -> str:
    """Charge the customer's card. The bank does the same once per key."""
    await happen(f"charge {euros} euros, key {key[:12]}", once=True)
    return f"{euros} euros are charged"


@tools.tool(effect="unsafe")
async def send_mail(to: str, subject: str) -> str:
    """Send a mail. Called twice, two mails arrive: this mail server knows no keys."""
    await happen(f"mail to {to}: {subject}", once=False)
    return f"the mail to {to} is on its way"
