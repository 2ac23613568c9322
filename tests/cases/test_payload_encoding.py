"""Text that one of the databases, or JSON, would not take: refused at the door or made safe, never found out later."""

import json
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import text
from typer.testing import CliRunner

from postroad import OUTCOME, Dispatch, GiveUp, InvalidInput, Kind, Postroad, Receipt, Retry, Turn
from postroad.store import moments, runs
from postroad.store.database import Database
from postroad.surfaces.cli import app as cli
from postroad.testing import Harness
from tests.cases.apps import OpenApp
from tests.engine.conftest import Open

NOTE = Kind("note", dict[str, int])
ANY: Kind[Any] = Kind("any", Any)
ODD = {
    "NUL": "be\0fore",
    "half of a pair": "\ud83c",
    "half of a pair and more": "\udf78x",
    "a pair in two halves": "\ud83c" + "-" + "\udf78",
    "long": "x" * 50_000,
    "a pair at the cut": "x" * 1_990 + "🎉" * 20,
}


@pytest.mark.parametrize("said", ODD.values(), ids=ODD)
@pytest.mark.parametrize("how", [ValueError, GiveUp], ids=lambda how: how.__name__)
def test_one_odd_error_text_settles_with_its_healthy_neighbours(
    harness: Open, how: Callable[[str], Exception], said: str
) -> None:
    """One send of ten fails with a text that a database would refuse: it ends as it should, and so do the nine."""
    post = Postroad()

    @post.sender("sms", concurrency=10, retry=Retry(attempts=2, first=1, jitter=False))
    def send(d: Dispatch[Any]) -> Receipt | None:
        if d.key == "m5":
            raise how(said)
        return Receipt(said, {said: said, "n": math.nan}) if d.key == "m6" else None

    h = harness(post, senders="run")
    with post.begin() as tx:
        for n in range(10):
            tx.send("sms", {}, key=f"m{n}")
    quiet(h)
    statuses = {row.key: row.status for row in post.dispatches.list()}
    assert statuses == {f"m{n}": "dead_letter" if n == 5 else "delivered" for n in range(10)}
    row = post.dispatches.get("m5")
    assert row is not None
    assert row.last_error
    assert len(row.last_error) <= 2_000
    assert post.database.read(moments.waiting) == 0


@pytest.mark.parametrize("said", ODD.values(), ids=ODD)
def test_one_odd_error_text_of_a_turn_is_recorded(harness: Open, said: str) -> None:
    """A turn that fails with such a text goes to its visible end, and the runs and the alert say so."""
    post = Postroad()

    @post.turn("chat", attempts=2)
    def chat(t: Turn) -> None:
        raise ValueError(said)

    h = harness(post)
    with post.begin() as tx:
        tx.publish("chat/1", NOTE, {"n": 1}, key="e")
    quiet(h, 600)
    assert [e.kind for e in h.entries("chat/1")] == ["postroad.failed"]
    assert [str(r.end) for r in post.database.read(runs.of_stream, "chat/1")] == ["failed", "failed"]


@pytest.mark.parametrize("said", ODD.values(), ids=ODD)
def test_an_odd_reason_of_a_filter_holds_up_nobody(harness: Open, said: str) -> None:
    """A filter whose reason cannot be stored as it is neither stops the worker nor its stream: it is made safe."""
    post = Postroad()
    decided: list[str] = []
    post.turn("chat")(lambda t: decided.extend(e.key for e in t.events))
    post.filter("chat", NOTE)(lambda e: said if e.key == "odd" else None)
    h = harness(post)
    with post.begin() as tx:
        tx.publish("chat/1", NOTE, {"n": 1}, key="odd")
        tx.publish("chat/1", NOTE, {"n": 1}, key="after")
        tx.publish("chat/2", NOTE, {"n": 1}, key="other")
    h.drain()
    assert sorted(decided) == ["after", "other"]
    (noop,) = [e for e in h.entries("chat/1") if e.kind == "postroad.noop"]
    assert noop.data["event"] == "odd"
    assert len(noop.data["reason"]) <= 2_000


def test_a_filter_that_raises_holds_up_nobody(harness: Open) -> None:
    """A filter that fails has answered nothing: the event is decided, and every other stream goes on."""
    post = Postroad()
    decided: list[str] = []
    post.turn("chat")(lambda t: decided.extend(e.key for e in t.events))
    post.filter("chat", NOTE)(lambda e: str(1 / e.data["n"])[:0])
    h = harness(post)
    with post.begin() as tx:
        tx.publish("chat/1", NOTE, {"n": 0}, key="bad")
        tx.publish("chat/1", NOTE, {"n": 1}, key="after")
        tx.publish("chat/2", NOTE, {"n": 1}, key="other")
    h.drain()
    assert sorted(decided) == ["after", "bad", "other"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, float("1e309")])
def test_what_json_has_no_number_for_is_refused_with_its_path(harness: Open, value: float) -> None:
    """NaN and infinities are refused where they are given, by every verb that takes data, naming the path."""
    post = Postroad()
    post.kinds(ANY)
    post.recorded("chat")
    h = harness(post)
    verbs: list[Callable[[Any, Any], object]] = [
        lambda tx, data: tx.publish("chat/1", ANY, data),
        lambda tx, data: tx.send(ANY, data),
        lambda tx, data: tx.set_timer("t", after=1, data=data, stream="chat/1"),
    ]
    with post.begin() as tx:
        for verb in verbs:
            with pytest.raises(InvalidInput, match=r"\.a\[1\]\.b is (nan|-?inf)"):
                verb(tx, {"a": [1, {"b": value}]})
    assert h.drain().waiting == 0


def test_what_the_command_line_prints_is_strict_json(place: dict[str, Any]) -> None:
    """Whatever is stored and whatever is counted, no NaN and no Infinity is printed."""
    post = Postroad()

    @post.sender(ANY)
    def send(d: Dispatch[Any]) -> None:
        raise GiveUp('NaN Infinity "\0" \ud83c')

    @post.turn("chat")
    def chat(t: Turn) -> None:
        raise GiveUp("\ud83c NaN")

    with Harness(post, senders="run", **place) as h:
        with post.begin() as tx:
            tx.send(ANY, {"n": 1e308, "s": "NaN"}, key="k")
            tx.publish("chat/1", ANY, {"n": -1e308}, key="e")
        h.drain()
    options = ["--database", place["database"], *(["--schema", place["schema"]] if "schema" in place else [])]
    for command in (["status"], ["dispatch", "ls"], ["dispatch", "show", "k"], ["stream", "show", "chat/1"]):
        done = CliRunner().invoke(cli, [*command, "--json", *options])
        assert done.exit_code == 0, done.output
        json.loads(done.stdout, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_a_database_error_shows_no_payload(open_app: OpenApp) -> None:
    """What the database refuses is told and stored without the values that it was given."""
    post = open_app()

    @post.turn("chat", attempts=1)
    def chat(t: Turn) -> None:
        t.write(lambda conn: conn.execute(text("INSERT INTO nowhere VALUES (:given)"), {"given": "s3cret"}))

    with post.begin() as tx:
        tx.publish("chat/1", NOTE, {"n": 1})
    post.drain()
    (entry,) = post.read("chat/1")
    assert "nowhere" in entry.data["error"]
    assert "s3cret" not in entry.raw


DRAW = random.Random(97)
ASCII = "abcdefghijklmnopqrstuvwxyz0123456789"
EMOJI = "😀😁😂🤣😃😄😅😆😉😊"


@pytest.mark.parametrize("length", [513, 2_000, 3_000, 10_000])
@pytest.mark.parametrize("letters", [ASCII, EMOJI], ids=["ascii", "emoji"])
def test_long_names_are_refused_before_a_transaction_breaks(harness: Open, letters: str, length: int) -> None:
    """A key or stream of more than 512 bytes never reaches a unique index: the verb refuses it, the rest commits."""
    post = Postroad()
    post.kinds(ANY)
    post.recorded("chat")
    harness(post)
    long = "".join(DRAW.choices(letters, k=length))
    with post.database.engine.begin() as conn, post.join(conn) as tx:
        for verb in (
            lambda: tx.send(ANY, {}, key=long),
            lambda: tx.publish("chat/1", ANY, {}, key=long),
            lambda: tx.publish(f"chat/{long}", ANY, {}),
            lambda: tx.set_timer(long, after=1, stream="chat/1"),
            lambda: tx.withdraw(long),
        ):
            with pytest.raises(InvalidInput, match="is longer than 512 bytes"):
                verb()
        tx.send(ANY, {}, key="fine")
    assert [row.key for row in post.dispatches.list()] == ["fine"]


def test_the_longest_names_go_all_the_way(harness: Open) -> None:
    """Names of exactly 512 random bytes pass through every unique index: events, outcomes, timers, generations."""
    post = Postroad()
    post.sender(ANY)(lambda d: None)
    stream = "chat/" + "".join(DRAW.choices(ASCII, k=507))
    key = "".join(DRAW.choices(EMOJI, k=128))

    @post.turn("chat")
    def chat(t: Turn) -> None:
        if t.events[0].key == key:
            t.send(ANY, {}, key=key)
            t.set_timer(key, after=1)
            t.set_timer(key[:-1], after=1)
        elif any(e.key == f"evt:{key}" for e in t.events):
            t.rearm_timer(key, after=1)

    post.filter("chat", OUTCOME)(lambda e: "sent")
    h = harness(post)
    with post.begin() as tx:
        tx.publish(stream, ANY, {}, key=key)
    h.advance(10)
    keys = {e.key for e in h.entries(stream)}
    assert keys >= {key, f"out:{key}:delivered", f"evt:{key}", f"evt:{key}#1", f"evt:{key[:-1]}"}


@pytest.mark.parametrize(
    "schema", ["Ünï-Cödé; --", "with spaces", "MiXeD'd", "select", "1st", "x" * 63, "é" * 31, "🎉"]
)
def test_any_schemas_name_is_quoted(postgres_url: str, schema: str) -> None:
    """A Postgres schema's name is only quoted; wake-ups and locks carry no part of it."""
    post = Postroad(postgres_url, schema=schema, migrate=True)
    post.sender(ANY)(lambda d: None)
    post.recorded("chat")
    try:
        with post.begin() as tx:
            tx.send(ANY, {}, key="k")
            tx.publish("chat/1", ANY, {})
        done = post.drain()
        assert (done.delivered, done.turns) == (1, 1)
        post.close()
        assert len(post.dispatches.list()) == 1, "the next process finds the same tables"
    finally:
        with post.database.engine.begin() as conn:
            conn.exec_driver_sql(f'DROP SCHEMA "{schema}" CASCADE')
        post.close()


@pytest.mark.parametrize(
    "schema", ["x" * 64, "é" * 32, "nul\0", "half\ud83c", 'quo"te', " ", "100%s", "a :b", "{p}", "back\\slash"]
)
def test_a_schemas_name_that_could_not_be_used_is_refused(schema: str) -> None:
    """One that Postgres would cut, or that means something to the driver, is refused where it is given."""
    with pytest.raises(InvalidInput, match="schema"):
        Postroad("postgresql://nowhere", schema=schema)
    with pytest.raises(InvalidInput, match="schema"):
        Database("postgresql://nowhere", schema=schema)


def quiet(h: Harness, seconds: float = 60) -> None:
    """Let time pass; planned failures that are no errors of ours come out of the harness and are left aside."""
    target = h.clock.wall() + round(seconds * 1_000_000)
    while h.clock.wall() < target:
        try:
            h.advance((target - h.clock.wall()) / 1_000_000)
        except ValueError:
            continue
