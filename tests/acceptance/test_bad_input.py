"""What is refused, where, and with which words: a table of cases over the public verbs, alike on both databases."""

import asyncio
import contextlib
import math
import secrets
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from postroad import (
    OUTCOME,
    Dispatch,
    Fold,
    Handlers,
    InvalidInput,
    KeyConflict,
    Kind,
    NotInTransaction,
    Postroad,
    Refused,
    Retry,
    TimerConflict,
    Transaction,
    Turn,
    UnknownKind,
    sqlite,
)
from postroad.store import moments
from postroad.testing.harness import Harness

pytestmark = pytest.mark.filterwarnings("ignore::postroad.store.sqlite_version.SQLiteVersionWarning")

EMOJI = "🎉"  # four bytes
SURROGATE = "\ud83d"
DEEP: Any = None
for _ in range(100_000):
    DEEP = [DEEP]
A_DAY = timedelta(days=1)
WEST = timezone(timedelta(hours=-12))
YEAR_1 = datetime.min.replace(tzinfo=timezone(timedelta(hours=12)))
NAIVE = datetime.fromisoformat("2026-01-01T00:00")


@dataclass
class Sms:
    text: str


SMS = Kind("sms", Sms)
ANY: Kind[Any] = Kind("any", Any)
LOOSE_SMS: Kind[Any] = SMS


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str | None]]:
    """A database's URL and schema, shared by the module: what is refused writes nothing."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path_factory.mktemp('bad') / 'bad.db'}", None
        return
    server, schema = request.getfixturevalue("postgres_url"), f"bad_{secrets.token_hex(6)}"
    yield server, schema
    with psycopg.connect(server.replace("+psycopg", "", 1), autocommit=True) as conn:
        conn.execute(f'DROP SCHEMA IF EXISTS "{schema}" CASCADE')


@pytest.fixture
def post(url: tuple[str, str | None]) -> Iterator[Postroad]:
    """An app on that database that sends `sms` and `any`."""
    made = Postroad(url[0], schema=url[1], migrate=True)
    made.kinds(SMS, ANY)
    made.recorded("a")
    yield made
    made.close()


def waiting(post: Postroad) -> int:
    """How many rows wait for anything."""
    return post.database.read(moments.waiting)


Verb = Callable[[Transaction], object]
BAD_TEXT: list[tuple[str, Any]] = [
    ("empty", ""),
    ("spaces", " \t\n"),
    ("NUL", "a\0b"),
    ("lone surrogate", f"a{SURROGATE}"),
    ("number", 7),
    ("too long", "k" * 513),
    ("2,000 characters", "k" * 2_000),
    ("3,000 characters", "k" * 3_000),
    ("10,000 characters", "k" * 10_000),
    ("1,000 emoji", EMOJI * 1_000),
    ("129 emoji", EMOJI * 129),
]
IN_TEXT: list[tuple[str, str, Callable[[Any], Verb]]] = [
    ("stream", "publish stream", lambda bad: lambda tx: tx.publish(bad if bad in ("", 7) else f"a/{bad}", ANY, 1)),
    ("key", "publish key", lambda bad: lambda tx: tx.publish("a/1", ANY, 1, key=bad)),
    ("key", "send key", lambda bad: lambda tx: tx.send(SMS, Sms("x"), key=bad)),
    ("key", "withdraw key", lambda bad: lambda tx: tx.withdraw(bad)),
    ("key", "timer key", lambda bad: lambda tx: tx.set_timer(bad, after=1, stream="a/1")),
    ("key", "rearm key", lambda bad: lambda tx: tx.rearm_timer(bad, after=1, stream="a/1")),
    ("key", "cancel key", lambda bad: lambda tx: tx.cancel_timer(bad, stream="a/1")),
]
BAD_PAYLOADS: list[tuple[str, Any]] = [
    ("NUL", "a\0b"),
    ("lone surrogate", {"x": [SURROGATE]}),
    ("surrogate in a key", {SURROGATE: 1}),
    ("NaN", [math.nan]),
    ("Infinity", {"x": -math.inf}),
    ("beyond 64 bits", 10**30),
    ("5,000 digits", 10**5_000),
    ("depth 65", eval("[" * 65 + "]" * 65)),
    ("depth 100,000", DEEP),
    ("300 kB", "x" * 300_000),
    ("an object", object()),
]
CASES: list[tuple[str, str, Verb]] = [
    *((f"{verb}: {name}", field, make(bad)) for field, verb, make in IN_TEXT for name, bad in BAD_TEXT),
    *((f"publish data: {n}", "data", lambda tx, b=b: tx.publish("a/1", ANY, b)) for n, b in BAD_PAYLOADS),
    *((f"send body: {n}", "body", lambda tx, b=b: tx.send(ANY, b)) for n, b in BAD_PAYLOADS),
    *((f"timer data: {n}", "data", lambda tx, b=b: tx.set_timer("k", after=1, data=b, stream="a/1"))
      for n, b in BAD_PAYLOADS),
    *((f"to: {n}", "to", lambda tx, b=b: tx.send(ANY, 1, to=b))
      for n, b in [*BAD_TEXT[1:5], ("3,000 characters", "k" * 3_000)]),
    *((f"at: {n}", "at", lambda tx, b=b: tx.send(ANY, 1, at=b))
      for n, b in [("naive", NAIVE), ("text", "tomorrow")]),
    ("timer at: naive", "at", lambda tx: tx.set_timer("k", at=NAIVE, stream="a/1")),
    ("timer without a time", "at", lambda tx: tx.set_timer("k", stream="a/1")),
    ("timer without a stream", "stream", lambda tx: tx.set_timer("k", after=1)),
    ("timer key like a generation", "key", lambda tx: tx.set_timer("k#2", after=1, stream="a/1")),
    *((f"after: {b}", "after", lambda tx, b=b: tx.send(ANY, 1, after=b)) for b in (-1, math.nan, math.inf, "5")),
    *((f"expires: {b}", "expires", lambda tx, b=b: tx.send(ANY, 1, expires=b)) for b in (-1, math.nan, -A_DAY)),
    ("at and after", "at", lambda tx: tx.send(ANY, 1, at=datetime.now().astimezone(), after=1)),
    ("stream without an id", "stream", lambda tx: tx.publish("a", ANY, 1)),
    ("stream with an empty id", "stream", lambda tx: tx.publish("a/", ANY, 1)),
    ("stream with an empty type", "stream", lambda tx: tx.publish("/1", ANY, 1)),
    *((f"kind: {n}", "kind", lambda tx, b=b: tx.publish("a/1", b, 1))
      for n, b in [*BAD_TEXT[:5], ("300 characters", "k" * 300), ("ours", "postroad.noop"), ("built in", OUTCOME)]),
    *((f"key: {prefix}", "key", lambda tx, p=prefix: tx.publish("a/1", ANY, 1, key=f"{p}1"))
      for prefix in ("evt:", "out:", "postroad.")),
    ("body of another type", "body", lambda tx: tx.send(LOOSE_SMS, {"text": 1})),
    ("no body where one is needed", "body", lambda tx: tx.send(SMS)),
    ("origin: NUL", "origin", lambda tx: tx.send(ANY, 1, origin={"by": "\0"})),
    *((f"origin: {b!r}", "origin", lambda tx, b=b: tx.send(ANY, 1, origin=b))
      for b in (None, 5, "ab", [1], {"by": 5}, {5: "by"})),
    ("at: beyond the year 9999", "at", lambda tx: tx.send(ANY, 1, at=datetime.max.replace(tzinfo=WEST))),
    ("timer at: before the year 1", "at", lambda tx: tx.set_timer("k", at=YEAR_1, stream="a/1")),
    ("after: 5,000 digits", "after", lambda tx: tx.send(ANY, 1, after=10**5_000)),
    ("write: no function", "fn", lambda tx: tx.write(5)),  # type: ignore[arg-type]
    ("origin: 5 kB", "origin", lambda tx: tx.send(ANY, 1, origin={"by": "x" * 5_000})),
    ("on_conflict", "on_conflict", lambda tx: tx.send(ANY, 1, on_conflict="ignore")),  # type: ignore[arg-type]
]  # fmt: skip


@pytest.mark.parametrize(("field", "verb"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_the_verb_refuses_and_names_the_field(post: Postroad, field: str, verb: Verb) -> None:
    """The verb itself refuses what cannot be stored and names the field; the rest of the block stands."""
    before = waiting(post)
    with post.begin() as tx:
        kept = tx.publish("a/kept", ANY, 1)
        with pytest.raises(InvalidInput, match=rf"\b{field}\b") as refused:
            verb(tx)
    assert str(refused.value.about["field"]).startswith(field)
    assert len(str(refused.value)) < 500
    assert kept.created
    assert waiting(post) == before + 1


@pytest.mark.parametrize("kind", ["nobody_s", Kind("nobody_s", Any)])
def test_a_kind_that_nobody_declares_is_refused(post: Postroad, kind: Kind[Any] | str) -> None:
    """A kind sent without a sender, transport, `kinds` or `elsewhere` in this app is refused by name."""
    with post.begin() as tx:
        with pytest.raises(UnknownKind, match="nobody_s"):
            tx.send(kind, 1)
        tx.publish("a/1", kind, 1)


DECLARATIONS: list[tuple[str, str, Callable[[Handlers], object]]] = [
    ("kind: empty", "kind", lambda _: Kind("", Any)),
    ("kind: spaces", "kind", lambda _: Kind("  ", Any)),
    ("kind: NUL", "kind", lambda _: Kind("a\0", Any)),
    ("kind: surrogate", "kind", lambda _: Kind(SURROGATE, Any)),
    ("kind: prefix", "kind", lambda _: Kind("out:x", Any)),
    ("version: 0", "version", lambda _: Kind("a", Any, version=0)),
    ("alias: empty", "aliases", lambda _: Kind("a", Any, aliases=[""])),
    ("attempts: 0", "attempts", lambda _: Retry(attempts=0)),
    ("attempts: -1", "attempts", lambda _: Retry(attempts=-1)),
    ("version: 2**31", "version", lambda _: Kind("a", Any, version=2**31)),
    ("version: text", "version", lambda _: Kind("a", Any, version="1")),  # type: ignore[arg-type]
    ("body: a number", "body", lambda _: Kind("a", 5)),  # type: ignore[arg-type]
    ("body: a name", "body", lambda _: Kind("a", "Nothing")),  # type: ignore[arg-type]
    *((f"aliases: {b!r}", "aliases", lambda _, b=b: Kind("a", Any, aliases=b)) for b in ("abc", 5, [7], None)),
    *(
        (f"upgrade: {b!r}", "upgrade", lambda _, b=b: Kind("a", Any, version=3, upgrade=b))
        for b in (5, "ab", [print], {"1": print}, {1: 5}, {0: print}, {3: print}, {True: print})
    ),
    ("fold", "fold", lambda _: Fold("", int, max)),
    ("fold: start", "start", lambda _: Fold("a", 0, max)),  # type: ignore[arg-type, type-var]
    ("fold: step", "step", lambda _: Fold("a", int, 0)),  # type: ignore[arg-type]
    ("fold: version", "version", lambda _: Fold("a", int, max, version=0)),
    ("attempts: 2**31", "attempts", lambda _: Retry(attempts=2**31)),
    ("attempts: the largest", "attempts", lambda _: Retry(attempts=sys.maxsize)),
    ("attempts: 5,000 digits", "attempts", lambda _: Retry(attempts=10**5_000)),
    ("jitter", "jitter", lambda _: Retry(jitter="no")),  # type: ignore[arg-type]
    *((f"retry: {b!r}", "retry", lambda h, b=b: h.sender(SMS, retry=b)(print)) for b in (None, 5, "QUICK", Retry)),
    ("concurrency: 10,001", "concurrency", lambda h: h.sender(SMS, concurrency=10_001)(print)),
    ("turn concurrency: 10,001", "concurrency", lambda h: h.turn("a", concurrency=10_001)(print)),
    ("turn attempts: 2**31", "attempts", lambda h: h.turn("a", attempts=2**31)(print)),
    ("on_dead", "on_dead", lambda h: h.sender(SMS, on_dead="bogus")(print)),  # type: ignore[arg-type]
    ("dedup_window", "dedup_window", lambda h: h.sender(SMS, dedup_window="x")(print)),  # type: ignore[arg-type]
    ("debounce_max", "debounce_max", lambda h: h.turn("a", debounce_max="x")(print)),  # type: ignore[arg-type]
    ("turn lease", "lease", lambda h: h.turn("a", lease=0)(print)),
    ("tool version", "version", lambda h: h.tool(effect="read", version=2**31)),
    *((f"include: {b!r}", "handlers", lambda h, b=b: h.include(b)) for b in (5, None, "", ":x", ".x", "os:path")),
    ("kinds", "kind", lambda h: h.kinds(5)),  # type: ignore[arg-type]
    ("elsewhere", "kind", lambda h: h.elsewhere(None)),  # type: ignore[arg-type]
    ("filter of no kind", "kind", lambda h: h.filter("a", 5)),  # type: ignore[arg-type]
    ("filter of no type", "stream_type", lambda h: h.filter("", SMS)),
    ("recorded", "stream_type", lambda h: h.recorded(5)),  # type: ignore[arg-type]
    ("attempts: True", "attempts", lambda _: Retry(attempts=True)),
    ("budget: negative", "budget", lambda _: Retry(budget=-1)),
    ("first: NaN", "first", lambda _: Retry(first=math.nan)),
    ("cap: endless", "cap", lambda _: Retry(cap=math.inf)),
    ("lease: timeout", "lease", lambda h: h.sender(SMS, timeout=10, lease=10)(print)),
    ("lease: timeout + margin", "lease", lambda h: h.sender(SMS, timeout=10, lease=11.5)(print)),
    ("timeout: 0", "timeout", lambda h: h.sender(SMS, timeout=0)(print)),
    ("concurrency: 0", "concurrency", lambda h: h.sender(SMS, concurrency=0)(print)),
    ("on_failure", "on_failure", lambda h: h.sender(SMS, on_failure="ignore")(print)),  # type: ignore[arg-type]
    ("on_unknown", "on_unknown", lambda h: h.sender(SMS, on_unknown="drop")(print)),  # type: ignore[arg-type]
    ("sender of no kind", "kind", lambda h: h.sender("")(print)),
    ("stream type: empty", "stream_type", lambda h: h.turn("")(print)),
    ("stream type: a stream", "stream_type", lambda h: h.turn("a/1")(print)),
    ("stream type: NUL", "stream_type", lambda h: h.recorded("a\0")),
    ("turn attempts: 0", "attempts", lambda h: h.turn("a", attempts=0)(print)),
    ("turn timeout: 0", "timeout", lambda h: h.turn("a", timeout=0)(print)),
    ("debounce: negative", "debounce", lambda h: h.turn("a", debounce=-1)(print)),
    ("effect", "effect", lambda h: h.tool(effect="maybe")(print)),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("field", "declare"), [d[1:] for d in DECLARATIONS], ids=[d[0] for d in DECLARATIONS])
def test_a_declaration_refuses_and_names_the_field(field: str, declare: Callable[[Handlers], object]) -> None:
    """A declaration that cannot work is refused where it is made, before anything runs."""
    with pytest.raises(InvalidInput, match=rf"\b{field}\b") as refused:
        declare(Handlers())
    assert refused.value.about["field"] == field


def test_a_lease_just_above_its_margin_is_accepted() -> None:
    """The bound of the lease is timeout + 1.5 s, exclusive."""
    Handlers().sender(SMS, timeout=10, lease=11.6)(print)


def test_reading_refuses_what_it_cannot_read(post: Postroad) -> None:
    """`read` names the argument that is wrong."""
    anything: Any = post
    reads: list[tuple[str, Callable[[], object]]] = [
        ("stream", lambda: post.read("nothing")),
        ("stream", lambda: anything.read(5)),
        *[("after", lambda b=b: anything.read("a/1", after=b)) for b in (-1, "x", 2**63, None)],
        *[("limit", lambda b=b: anything.read("a/1", limit=b)) for b in (0, -5, True, 10_001, 10**5_000)],
        *[("limit", lambda b=b: anything.dispatches.list(limit=b)) for b in (0, -5, "x", None, 10_001, 2**70)],
        *[("status", lambda b=b: anything.dispatches.list(status=b)) for b in ("x", 5, "", "a\0b", ["pending"])],
        *[("kind", lambda b=b: anything.dispatches.list(kind=b)) for b in (5, "", "a\0b", SURROGATE)],
        *[("to", lambda b=b: anything.dispatches.list(to=b)) for b in (5, "a\0b", SURROGATE)],
        *[("id", lambda b=b: anything.dispatches.get(b)) for b in (5, None, "\0", SURROGATE, "", "k" * 600)],
        ("accepted", lambda: anything.position(5)),
        ("fn", lambda: anything.observe(5)),
        ("pump_interval", lambda: anything.runtime(pump_interval="x")),
    ]
    for field, read in reads:
        with pytest.raises(InvalidInput, match=rf"\b{field}\b") as refused:
            read()
        assert str(refused.value).startswith("This value is not accepted. ")


def test_an_operator_may_ask_for_each_status(post: Postroad) -> None:
    """The six statuses are taken as they are; an empty destination means those that have none, never all of them."""
    with post.begin() as tx:
        tx.send(ANY, 1, to="here")
    assert post.dispatches.list(status="pending", to="here")
    assert post.dispatches.list(status="pending", to="") == []
    for status in ("delivering", "delivered", "acked", "dead_letter", "expired"):
        assert all(found.status == status for found in post.dispatches.list(status=status))


def test_a_turn_refuses_what_it_cannot_read(url: tuple[str, str | None]) -> None:
    """`log` and `fold` name the argument that is wrong, and the turn goes on."""
    stream_type, refused = f"asking_{secrets.token_hex(4)}", list[object]()
    with contextlib.closing(Postroad(url[0], schema=url[1], migrate=True)) as post:

        @post.turn(stream_type)
        def ask(turn: Turn) -> None:
            anything: Any = turn
            for bad in (-1, 10_001, "x", True, None):
                with pytest.raises(InvalidInput) as error:
                    anything.log(last=bad)
                refused.append(error.value.about["field"])
            with pytest.raises(InvalidInput, match="fold"):
                anything.fold(5)
            with pytest.raises(InvalidInput, match="stream"):
                anything.set_timer("k", after=1, stream=5)

        with post.begin() as tx:
            tx.publish(f"{stream_type}/1", ANY, 1)
        assert post.drain().turns == 1
        assert [entry.kind for entry in post.read(f"{stream_type}/1")] == ["any"]
    assert refused == ["last"] * 5


APPS: list[tuple[str, dict[str, Any]]] = [
    *(("database", {"database": b}) for b in ("", "foo", 5, [], "sqlite+foo:///x", "mysql://localhost/x")),
    *(("database", {"database": b}) for b in ("postgresql://u:hush@h:abc/x", "postgresql://u:hush@h:99999/x")),
    ("schema", {"schema": 5}),
    ("schema", {"schema": ""}),
    ("migrate", {"migrate": "yes"}),
    ("lifespan", {"lifespan": 5}),
]


@pytest.mark.parametrize(("field", "given"), APPS, ids=[repr(given) for _, given in APPS])
def test_an_app_refuses_its_settings(field: str, given: dict[str, Any]) -> None:
    """What cannot be an app's database or setting is refused where the app is made; no password is shown."""
    with pytest.raises(InvalidInput, match=rf"\b{field}\b") as refused:
        Postroad(**given)
    assert "hush" not in str(refused.value)
    assert refused.value.__cause__ is None


@pytest.mark.parametrize("option", ["nonsense=1", "connect_timeout=1&autocommit=1", "timeout=abc", "host=h:abc"])
def test_an_option_that_no_driver_takes_is_refused(url: tuple[str, str | None], option: str) -> None:
    """An option of the URL that the driver does not know, or a value of the wrong type, is refused on first use."""
    if url[0].startswith("sqlite") and option != "timeout=abc":
        pytest.skip("SQLite's driver takes any")
    with pytest.raises(InvalidInput, match="database"):
        Postroad(f"{url[0]}{'&' if '?' in url[0] else '?'}{option}").check_schema()


HARNESSES: list[tuple[str, Callable[[Postroad], object]]] = [
    ("post", lambda _: Harness(5)),  # type: ignore[arg-type]
    *(("start", lambda post, b=b: Harness(post, start=b)) for b in ("soon", "2026-01-01T00:00", 5, NAIVE)),
    ("senders", lambda post: Harness(post, senders="no")),  # type: ignore[arg-type]
    *(("seed", lambda post, b=b: Harness(post, seed=b)) for b in ("x", -1, None)),
    ("database", lambda post: Harness(post, database="foo").__enter__()),
    ("by", lambda post: Harness(post).clock.jump("x")),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("field", "make"), HARNESSES)
def test_a_harness_refuses_its_settings(field: str, make: Callable[[Postroad], object]) -> None:
    """A harness names the setting that is wrong."""
    with pytest.raises(InvalidInput, match=rf"\b{field}\b"):
        make(Postroad())


def test_a_harness_refuses_bad_questions() -> None:
    """What a test asks of its harness is checked as well."""
    post = Postroad()
    post.sender(SMS)(print)
    with Harness(post) as harness:
        anything: Any = harness
        asked: list[tuple[str, Callable[[], object]]] = [
            ("by", lambda: anything.advance("x")),
            ("kind", lambda: anything.sent(5)),
            ("kind", lambda: anything.fail(5, ValueError())),
            ("error", lambda: anything.fail(SMS, 5)),
            ("times", lambda: anything.fail(SMS, ValueError(), times=-1)),
            ("stream", lambda: anything.entries("x")),
        ]
        for field, ask in asked:
            with pytest.raises(InvalidInput, match=rf"\b{field}\b"):
                ask()


def test_the_largest_numbers_are_stored(url: tuple[str, str | None]) -> None:
    """The largest version and attempts that are accepted fit both databases."""
    largest: Kind[Any] = Kind(f"largest_{secrets.token_hex(4)}", Any, version=2**31 - 1)
    with contextlib.closing(Postroad(url[0], schema=url[1], migrate=True)) as post:
        post.sender(largest, retry=Retry(attempts=1_000_000), concurrency=10_000)(lambda d: None)
        post.recorded(largest.name)
        with post.begin() as tx:
            sent = tx.send(largest, 1, at=datetime.min.replace(tzinfo=UTC))
            later = tx.send(largest, 1, at=datetime.max.replace(tzinfo=UTC))
            tx.publish(f"{largest.name}/1", largest, 1)
        assert post.drain().delivered == 1
        found, waits = post.dispatches.get(sent.id), post.dispatches.get(later.id)
    assert found is not None
    assert found.max_attempts == 1_000_000
    assert waits is not None
    assert waits.due_at == datetime.max.replace(tzinfo=UTC)


def test_an_async_engine_is_refused_with_the_cure() -> None:
    """An AsyncEngine as the app's database is refused, in words that say what to pass."""
    for made in ("sqlite+aiosqlite:///x.db", "postgresql+psycopg://localhost/x"):
        with pytest.raises(Refused, match="AsyncEngine"):
            Postroad(create_async_engine(made))  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["sqlite://", "sqlite:///:memory:"])
def test_a_database_that_cannot_hold_our_rows_is_refused(given: str) -> None:
    """A SQLite database in memory is refused on first use."""
    with pytest.raises(InvalidInput, match="database"):
        Postroad(given).check_schema()


def enter(opening: Any) -> None:
    with opening as tx:
        tx.send(ANY, 1)


def aenter(opening: Any) -> None:
    async def inside() -> None:
        async with opening as tx:
            tx.send(ANY, 1)

    asyncio.run(inside())


def test_join_refuses_what_is_no_open_transaction(post: Postroad) -> None:
    """Engines, autocommit connections, strangers and the wrong colour of `with` are refused; nothing is written."""
    before = waiting(post)
    engine = post.database.engine
    for given in (engine, object(), "a connection"):
        with pytest.raises(NotInTransaction, match=r"Pass|use"):
            enter(post.join(given))
    with pytest.raises(InvalidInput, match="connection"):
        post.join(None)
    with engine.connect() as conn, pytest.raises(NotInTransaction, match="autocommit"):
        enter(post.join(conn.execution_options(isolation_level="AUTOCOMMIT")))
    with engine.begin() as conn, pytest.raises(NotInTransaction, match="with"):
        aenter(post.join(conn))
    assert waiting(post) == before


def test_join_refuses_asynchronous_things_in_the_wrong_place(post: Postroad) -> None:
    """An AsyncEngine, an AsyncConnection under `with` and an autocommit AsyncConnection are refused."""
    before = waiting(post)
    engine = post.database.engine
    made = create_async_engine(engine.url.set(drivername="sqlite+aiosqlite") if post.database.is_sqlite else engine.url)
    if post.database.is_sqlite:
        sqlite.configure(made.sync_engine)

    async def inside() -> None:
        with pytest.raises(NotInTransaction, match="not an engine"):
            async with post.join(made) as tx:
                tx.send(ANY, 1)
        async with made.begin() as conn:
            with pytest.raises(NotInTransaction, match="async with"):
                enter(post.join(conn))
        async with made.connect() as conn:
            auto = await conn.execution_options(isolation_level="AUTOCOMMIT")
            with pytest.raises(NotInTransaction, match="autocommit"):
                async with post.join(auto) as tx:
                    tx.send(ANY, 1)
        await made.dispose()

    asyncio.run(inside())
    assert waiting(post) == before


def test_a_connection_to_another_database_is_refused(post: Postroad, tmp_path: Path) -> None:
    """A transaction of another database than the app's is refused, and no table of ours is made there."""
    other = sqlite.configure(create_engine(f"sqlite:///{tmp_path / 'other.db'}"))
    with other.begin() as conn:
        with pytest.raises(Refused, match="database"):
            enter(post.join(conn))
        assert conn.exec_driver_sql("select count(*) from sqlite_master").scalar_one() == 0
    other.dispose()


def test_a_connection_to_memory_is_refused(post: Postroad) -> None:
    """A transaction of a SQLite database in memory is refused: it cannot be the app's."""
    said = r"in memory|:memory:" if post.database.is_sqlite else "same database"
    for engine in (create_engine("sqlite://"), create_engine("sqlite:///:memory:")):
        with engine.begin() as conn:
            with pytest.raises(Refused, match=said):
                enter(post.join(conn))
            assert conn.exec_driver_sql("select count(*) from sqlite_master").scalar_one() == 0
        engine.dispose()


@pytest.mark.parametrize("longest", ["k" * 512, EMOJI * 128, "ключ" * 64])
def test_the_longest_keys_are_kept_exactly(post: Postroad, longest: str) -> None:
    """The limit of a key is 512 bytes, whatever its characters, for dispatches, events and timers."""
    with post.begin() as tx:
        sent = tx.send(ANY, 1, key=longest)
        published = tx.publish("a/keys", ANY, 1, key=longest)
        tx.set_timer(longest, after=A_DAY, stream="a/keys")
    found = post.dispatches.get(sent.id)
    assert found is not None
    assert found.key == longest
    assert published.id == longest


@pytest.mark.parametrize(
    "name", ["'; drop table postroad_log; --", '"quoted" %s :x ?', "with spaces", f"{EMOJI}/{EMOJI}", "\\ \t é", "{p}"]
)
def test_odd_stream_names_are_only_names(post: Postroad, name: str) -> None:
    """Quotes, SQL, marks, spaces and emoji in a stream's name or key change nothing but the name."""
    with post.begin() as tx:
        tx.publish(f"a/{name}", ANY, {name: name}, key=name)
    post.drain()
    (entry,) = post.read(f"a/{name}")
    assert (entry.stream, entry.key, entry.data) == (f"a/{name}", name, {name: name})
    assert post.read("a/nothing of the kind") == []


def test_a_conflict_is_told_alike(post: Postroad) -> None:
    """A key that is taken by other content is refused on leaving the block, naming the key; nothing is written."""
    with post.begin() as tx:
        tx.send(ANY, 1, key="taken")
        tx.publish("a/taken", ANY, 1, key="taken")
        tx.set_timer("taken", after=A_DAY, stream="a/taken")
    before = waiting(post)
    again: list[tuple[type[Refused], Verb]] = [
        (KeyConflict, lambda tx: tx.send(ANY, 2, key="taken")),
        (KeyConflict, lambda tx: tx.send(ANY, 1, to="elsewhere", key="taken")),
        (KeyConflict, lambda tx: tx.publish("a/taken", ANY, 2, key="taken")),
        (TimerConflict, lambda tx: tx.set_timer("taken", after=A_DAY, data=2, stream="a/taken")),
    ]
    for error, verb in again:
        opening = post.begin()
        verb(opening.__enter__())
        with pytest.raises(error, match="taken"):
            opening.__exit__(None, None, None)
    assert waiting(post) == before


class BrokenError(Exception):
    """One whose text cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    "error",
    [
        ValueError("NUL \0 in it"),
        ValueError(f"half an emoji {SURROGATE}"),
        ValueError("x" * 5_000_000),
        ValueError(),
        BrokenError(),
    ],
    ids=["NUL", "surrogate", "5 MB", "no text", "a broken text"],
)
def test_any_error_text_of_a_sender_is_stored_safely(url: tuple[str, str | None], error: Exception) -> None:
    """A sender's error is kept within 2,000 characters, without NUL or surrogates, whatever its text."""
    name = f"failing_{secrets.token_hex(4)}"
    with contextlib.closing(Postroad(url[0], schema=url[1], migrate=True)) as post:

        @post.sender(name, retry=Retry(attempts=1))
        def fail(d: Dispatch[Any]) -> None:
            raise error

        with post.begin() as tx:
            sent = tx.send(name, {})
        assert post.drain().dead_letter == 1
        found = post.dispatches.get(sent.id)
    assert found is not None
    assert found.status == "dead_letter"
    assert found.last_error is not None
    assert found.last_error.startswith(type(error).__name__)
    assert len(found.last_error) <= 2_000
    assert "\0" not in found.last_error
    found.last_error.encode()


def test_any_error_text_of_a_turn_is_stored_safely(
    url: tuple[str, str | None], caplog: pytest.LogCaptureFixture
) -> None:
    """A handler's error text of 5 MB with NUL in it is bounded in entry and log; the event is buried, visibly."""
    stream_type = f"failing_{secrets.token_hex(4)}"
    with contextlib.closing(Postroad(url[0], schema=url[1], migrate=True)) as post:

        @post.turn(stream_type, attempts=1)
        def fail(turn: Turn) -> None:
            raise ValueError(f"{SURROGATE}\0" * 2_500_000)

        with post.begin() as tx:
            tx.publish(f"{stream_type}/1", ANY, 1)
        post.drain()
        (entry,) = post.read(f"{stream_type}/1")
    assert entry.kind == "postroad.failed"
    assert len(entry.data["error"]) <= 2_000
    assert "\0" not in entry.data["error"]
    assert "in fail\n" in caplog.text  # where it came from
    assert len(caplog.text) < 10_000
    caplog.text.encode()
