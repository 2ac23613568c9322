"""Uses of the public surface that mypy and pyright must accept. Checked, never run."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypedDict, assert_type

import msgspec
from pydantic import BaseModel
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from postroad import (
    OUTCOME,
    REPORT,
    TASK,
    TIMER_FIRED,
    Accepted,
    Alert,
    Cancellation,
    Changed,
    Delegated,
    Delegation,
    Dispatch,
    DispatchFilter,
    DispatchRow,
    Drained,
    Entry,
    Event,
    Fold,
    GiveUp,
    Handlers,
    Kind,
    Outcome,
    OutcomeUnknown,
    Postroad,
    Receipt,
    Report,
    Retry,
    RetryLater,
    Task,
    Tool,
    Transaction,
    Turn,
    Withdrawn,
    sqlite,
)
from postroad.testing import FakeClock, Harness


@dataclass
class Sms:
    text: str


class Mail(BaseModel):
    subject: str


class Order(TypedDict):
    id: int


class Ping(msgspec.Struct):
    lat: float


@asynccontextmanager
async def resources(post: Postroad) -> AsyncIterator[dict[str, int]]:
    yield {"connections": 1}


SMS = Kind("sms", Sms, version=2, aliases=["text_message"], upgrade={1: lambda old: {"text": old}})
MAIL = Kind("mail", Mail)
ORDER = Kind("order", Order)
PING = Kind("ping", Ping)
LOOSE = Kind("loose", dict[str, Any])
NAMES: Fold[list[str]] = Fold("names", list, lambda names, entry: [*names, entry.kind])

engine: Engine = sqlite.configure(create_engine("sqlite:///app.db"))
post = Postroad(engine, lifespan=resources, migrate=True)
other = Postroad("postgres://localhost/app", schema="postroad")
handlers = Handlers()


@handlers.sender(SMS, timeout=timedelta(seconds=3), lease=10, retry=Retry.QUICK, concurrency=2, on_failure="alert")
def send_sms(d: Dispatch[Sms]) -> Receipt:
    assert_type(d.body, Sms)
    if d.possible_duplicate:
        raise OutcomeUnknown("look it up")
    return Receipt(d.key, {"attempt": d.attempt})


@handlers.sender(MAIL, on_unknown="park")
async def send_mail(d: Dispatch[Mail]) -> str:
    if d.attempt > 3:
        raise GiveUp("enough")
    raise RetryLater(after=timedelta(minutes=1))


@handlers.sender("by_name", retry=Retry(attempts=3, budget=60, first=1, cap=10, jitter=False))
def send_by_name(d: Dispatch[Any]) -> None: ...


class Printer:
    """Prints."""

    async def send(self, dispatch: Dispatch[Any], /) -> Receipt | str | None:
        return dispatch.id


handlers.transport(LOOSE, Printer())
handlers.kinds(PING)
handlers.elsewhere(ORDER, "of_another_app")
handlers.recorded("notes")
post.include(handlers, "shop.handlers:handlers")


@handlers.stream_owner
def owner(connection: Connection, stream: str) -> str | None:
    found: str | None = connection.scalar(text("SELECT owner FROM chats"))
    return found


@post.turn("room", wake_on_report=True)
def room(turn: Turn) -> None: ...


@post.turn("load", debounce=1, debounce_max=timedelta(seconds=5), attempts=3, timeout=60)
async def load(turn: Turn) -> None:
    assert_type(turn.fold(NAMES), list[str])
    for event in turn.events:
        if ping := PING.of(event):
            assert_type(ping, Ping)
            turn.record(PING, ping)
        elif outcome := OUTCOME.of(event):
            assert_type(outcome, Outcome)
            turn.record("note", {"error": outcome.error})
        elif fired := TIMER_FIRED.of(event):
            notify(turn, str(fired))
    entries = turn.log(last=10)
    turn.publish("load/2", PING, Ping(entries[-1].seq))
    assert_type(await turn.call(find, number="1"), int)
    turn.set_timer("soon", after=timedelta(minutes=30), data={"step": 1})
    turn.rearm_timer("soon", at=turn.now)
    turn.cancel_timer("soon")


post.delegation("work", depth=2, fan_out=10)


@post.turn("work")
def work(turn: Turn) -> None:
    accepted = turn.delegate("work/2", Ping(1.0), key="look", timeout=timedelta(hours=1))
    assert_type(accepted, Accepted)
    for event in turn.events:
        assert_type(Delegated.of(event), Delegated | None)
        task = TASK.of(event)
        assert_type(task, Task | None)
        if task is not None:
            turn.finish({"depth": task.depth}, task=event)
    assert_type(turn.tasks(), Sequence[Delegation])
    for open_ in turn.delegations():
        turn.finish(error=open_.error, task=open_)


@post.turn("chat", on_duplicate=lambda turn, key: turn.record("note", {"key": key}))
def chat(turn: Turn) -> None:
    turn.write(lambda conn: conn.execute(text("select 1")))


@post.cron("digest", "0 7 * * *", tz="Europe/Berlin", missed="all", attempts=3, timeout=timedelta(minutes=5), lease=9)
async def digest(turn: Turn) -> None:
    turn.publish("load/1", PING, Ping(1.0), key=turn.events[0].key)


@post.filter("load", OUTCOME)
def delivered(event: Event) -> str | None:
    return "delivered" if event.data["status"] == "delivered" else None


@post.alert_sink
def ring(alert: Alert) -> None:
    print(alert.severity, alert.code, alert.subject, alert.raised_at.isoformat())


@post.tool(effect="read")
async def find(number: str) -> int:
    return int(number)


def notify(tx: Transaction, said: str) -> Accepted:
    """One helper for a script, a request and a turn."""
    return tx.send(SMS, Sms(said), to="driver", key="k", after=5, expires=timedelta(hours=1), origin={"by": "x"})


def rows(conn: Connection, session: Session) -> None:
    with post.join(conn) as tx:
        notify(tx, "hello")
    with post.join(session) as tx:
        withdrawn = tx.withdraw("k")
        tx.publish("load/1", "ping", {"lat": 1.0}, key="ping-1")
    assert_type(withdrawn, Withdrawn)
    assert_type(withdrawn.done, bool)


async def rows_async(conn: AsyncConnection, session: AsyncSession) -> None:
    async with post.join(conn) as tx:
        tx.send(MAIL, Mail(subject="Thanks"), to="ann@example.com", at=datetime.now(UTC))
    async with post.join(session) as tx:
        accepted = tx.publish("load/1", PING, Ping(1.0))
    assert_type(accepted.created, bool)
    assert_type(post.position(accepted), int | None)
    for entry in await post.aread("load/1", after=3, limit=10):
        assert_type(entry, Entry)
    landed = await post.areport(
        "load/1", {"n": 1}, key="cron:1", wait=timedelta(seconds=5), source="load/2", owner="ann"
    )
    assert_type(landed, Entry | None)
    if landed:
        assert_type(REPORT.of(landed), Report | None)
    assert_type(post.report("load/1", Ping(1.0), key="cron:1", wait=None, on_conflict="error"), Entry | None)


async def run() -> None:
    async with post.running():
        pass
    async with post.lifespan(object()):
        pass
    assert_type(await post.adrain(), Drained)


def observe(name: str, values: Mapping[str, Any]) -> None: ...


def operate() -> None:
    post.observe(observe)
    with post.running(pump_interval=1):
        pass
    found = post.dispatches.get("k")
    if found is not None:
        assert_type(found.due_at, datetime | None)
    for row in post.dispatches.list(status="dead_letter", kind="sms", limit=5):
        print(row.key, row.reason)
        page = post.dispatches.list(key="order/", reason="max_attempts", origin={"by": "x"}, after=row.cursor)
        assert_type(page, Sequence[DispatchRow])
    if not post.dispatches.retry("order/1", actor="ann", reason="route fixed", force=True, expires=timedelta(hours=1)):
        assert_type(post.dispatches.replay("order/1", actor="ann", key="order/1/again").id, str | None)
    old = DispatchFilter(status="delivered", before=datetime.now(UTC) - timedelta(days=7))
    assert_type(post.dispatches.purge(old, actor="ann", reason="tidy", history=True, dry_run=True), Changed)
    assert_type(post.dispatches.retry(DispatchFilter(kind="sms"), actor="ann", rate=20).done, int)
    post.dispatches.withdraw("order/2", actor="ann")
    post.dispatches.resolve("order/3", "sent", actor="ann", reason="the carrier has it")
    for delegation in post.delegations.list(status="open", to="scout/1", after=("chief/1", "k")):
        assert_type(post.delegations.cancel(delegation.parent, delegation.key, actor="ann"), Cancellation)
    post.close()


async def under_test(conn: Connection) -> None:
    with Harness(post, on=conn, senders="run") as harness:
        harness.fail(SMS, RetryLater("busy"), times=2)
        assert_type(harness.drain().delivered, int)
        assert_type(harness.advance(1800), Drained)
        assert_type(harness.sent(SMS, to="driver")[0].body, Sms)
        assert_type(harness.clock, FakeClock)
    async with Harness(post, start="2026-01-05T07:00Z") as harness:
        await harness.adrain()
        await harness.aadvance(timedelta(hours=1))
        assert_type(harness.entries("load/1")[0].cause, str | None)


def tools(tool: Tool[[str], int]) -> None:
    assert_type(tool("1"), int)
