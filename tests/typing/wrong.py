"""Mistakes that mypy and pyright must catch, at the lines marked E1 to E9, and nowhere else."""

from dataclasses import dataclass
from typing import reveal_type

from postroad import OUTCOME, Dispatch, Fold, Kind, Postroad, Turn

post = Postroad()


@dataclass
class Sms:
    text: str


@dataclass
class Ping:
    lat: float


SMS = Kind("sms", Sms)
PING = Kind("ping", Ping)
COUNT = Fold("count", int, lambda count, entry: count + 1)


@post.sender(SMS)  # E1 the sender takes another payload than its kind's
def bad(d: Dispatch[Ping]) -> None: ...


@post.tool(effect="read")
async def find(number: str) -> int:
    return 1


async def f() -> None:
    async with post.begin() as tx:
        tx.send(SMS, Ping(1.0), to="x")  # E2 the body is not the kind's
    post.join(object()).send(SMS, Sms("x"))  # E3 no `with`
    with post.begin() as tx2:
        tx2.set_timer("k", after=5, stream="a/1")


async def t(turn: Turn) -> None:
    reveal_type(await turn.call(find, number="1"))
    reveal_type(turn.fold(COUNT))
    await turn.call(find, number=1)  # E4 the tool takes a str
    turn.record(PING, Sms("x"))  # E5 the entry is not the kind's
    for event in turn.events:
        if ping := PING.of(event):
            ping.text  # E6 a Ping has no text
        if outcome := OUTCOME.of(event):
            turn.send(SMS, Sms(outcome.error))  # E7 there may be no error


@post.sender(SMS, on_failure="ignore")  # E8 no such choice
def worse(d: Dispatch[Sms]) -> None: ...


@post.turn("load")  # E9 a handler gets a Turn
def decide(turn: str) -> None: ...
