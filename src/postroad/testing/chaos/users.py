"""The clients: users of the app in a process of their own, which ask, and ask again until they are answered."""

import asyncio
import os
from functools import cache
from typing import Any

import msgspec
from sqlalchemy import Engine, create_engine, text

from postroad.model.dispatches import Withdrawn
from postroad.model.errors import DatabaseBusy, KeyConflict, Refused, TimerConflict
from postroad.store import dialects
from postroad.testing.chaos.program import post
from postroad.testing.chaos.reporting import ORPHANED
from postroad.testing.chaos.sizes import DATABASE_URL, FINISH, LIFE, PAUSE_SECONDS, SOCKET, USERS
from postroad.testing.chaos.wishes import Wish, Wishes
from postroad.testing.simulation.ledger import Answer
from postroad.testing.simulation.workload import BY_NAME, ORDER, Message, Order, destination

TRIES = 40
RETRY_SECONDS = 0.5
_WRITE = text("INSERT INTO sim_written (name) VALUES (:name) ON CONFLICT DO NOTHING")


class Link:
    """The way to the director, who keeps the ledger: a call begins once it is written down there."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._lock = asyncio.Lock()

    @classmethod
    async def open(cls) -> "Link":
        """Connect, and say who this is."""
        link = cls(*await asyncio.open_unix_connection(os.environ[SOCKET]))
        link.tell("hello")
        return link

    def tell(self, what: str, **values: object) -> None:
        """Tell something that needs no answer."""
        self._writer.write(msgspec.json.encode({"what": what, "life": os.environ[LIFE], **values}) + b"\n")

    async def ask(self, what: str, **values: object) -> Any:
        """Tell something, and wait for the answer."""
        async with self._lock:
            self.tell(what, **values)
            line = await self._reader.readline()
        if not line:
            os._exit(ORPHANED)
        return msgspec.json.decode(line)


class User:
    """Makes calls one after the other."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def ask(self, wishes: Wishes) -> None:
        """Ask for one thing after the other."""
        while True:
            wish = wishes.next()
            await self.insist(wish)
            if again := wishes.again(wish):
                await self.insist(again)
            await asyncio.sleep(wishes.pause(PAUSE_SECONDS))

    async def insist(self, wish: Wish) -> None:
        """Make a call until it is answered, under the same key."""
        for _ in range(TRIES):
            if await (self._withdraw(wish) if wish.verb == "withdraw" else self._call(wish)):
                return
            await asyncio.sleep(RETRY_SECONDS)

    async def _call(self, wish: Wish) -> bool:
        number = await self._link.ask("invoke", **msgspec.structs.asdict(wish))
        answer, said = await _answer(wish)
        self._link.tell("answer", call=number, answer=answer, error=said)
        return answer is not Answer.INFO and said != DatabaseBusy.__name__

    async def _withdraw(self, wish: Wish) -> bool:
        try:
            async with post.begin() as tx:
                withdrawn: Withdrawn = tx.withdraw(wish.key)
        except Exception:
            return False
        if withdrawn.done:
            self._link.tell("withdrawn", key=wish.key)
        return True


async def _answer(wish: Wish) -> tuple[Answer, str]:
    """Make a call; how it ended, as the caller saw it."""
    try:
        await (asyncio.to_thread(_joined, wish) if wish.joined else _alone(wish))
    except (KeyConflict, TimerConflict, DatabaseBusy) as error:
        return Answer.REFUSED, type(error).__name__  # each of them says that nothing was written
    except Refused as error:
        return Answer.REFUSED, f"unexpected {type(error).__name__}: {error}"
    except Exception as error:
        return Answer.INFO, type(error).__name__
    return Answer.OK, ""


async def _alone(wish: Wish) -> None:
    async with post.begin() as tx:
        _record(tx, wish)


@cache
def _engine() -> Engine:
    """The users' own way to the database, for their own rows."""
    engine = create_engine(os.environ[DATABASE_URL])
    return dialects.configure_sqlite(engine) if engine.dialect.name == "sqlite" else engine


def _joined(wish: Wish) -> None:
    with _engine().begin() as conn:
        conn.execute(_WRITE, {"name": wish.key})
        with post.join(conn) as tx:
            _record(tx, wish)


def _record(tx: Any, wish: Wish) -> None:
    match wish.verb:
        case "publish":
            tx.publish(wish.stream, ORDER, msgspec.json.decode(wish.data, type=Order), key=wish.key)
        case "send":
            kind, message, after = msgspec.json.decode(wish.data, type=tuple[str, Message, float])
            tx.send(BY_NAME[kind], message, to=destination(kind, wish.stream), key=wish.key, after=after)
        case _:
            tx.set_timer(wish.key, after=msgspec.json.decode(wish.data), stream=wish.stream, data={})


async def ask(seed: int) -> None:
    """Ask again for what killed clients were not answered, then for more; with CHAOS_FINISH only the former."""
    link = await Link.open()
    user = User(link)
    left = msgspec.convert(await link.ask("wishes"), list[Wish])
    await asyncio.gather(*(user.insist(wish) for wish in left))
    if FINISH not in os.environ:
        users = [Wishes(seed, f"{os.environ[LIFE]}.{number}") for number in range(USERS)]
        await asyncio.gather(*(user.ask(wishes) for wishes in users))
