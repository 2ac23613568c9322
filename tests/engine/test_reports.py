"""Reports in an app: they land between turns, wake nobody unless asked to, and no turn waits for one."""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine, text

from postroad import (
    REPORT,
    DatabaseBusy,
    Event,
    Handlers,
    InvalidInput,
    KeyConflict,
    Kind,
    NestedTransaction,
    Postroad,
    Refused,
    Report,
    RetryLater,
    SourceRefused,
    StreamDeleted,
    Turn,
    sqlite,
)
from postroad.engine.worker import claim_all
from postroad.store import alerts, dialects, inbox, runs, stream_views
from postroad.testing import Harness
from tests.engine.conftest import Open

NOTE = Kind("note", dict[str, int])
CHAT = "chat/1"


class App:
    """A chat whose handler notes which sets it was given, and does as it is told."""

    def __init__(self, **turn: Any) -> None:
        self.post = Postroad()
        self.sets: list[list[str]] = []
        self.decide: Any = lambda turn: None

        @self.post.turn("chat", **turn)
        def chat(turn: Turn) -> None:
            self.sets.append([event.key for event in turn.events])
            self.decide(turn)
            turn.record("reply", {})

    def publish(self, *keys: str) -> None:
        with self.post.begin() as tx:
            for key in keys:
                tx.publish(CHAT, NOTE, {}, key=key)

    def report(self, *keys: str) -> None:
        for key in keys:
            assert self.post.report(CHAT, key, key=key) is None


def keys(h: Harness) -> list[str]:
    """The log: replies as such, all else by key."""
    return [entry.kind if entry.kind == "reply" else entry.key for entry in h.entries(CHAT)]


def test_they_land_between_turns(harness: Open) -> None:
    """m1, r, m2 are a turn, a report and a turn; several reports in a row land in one commit, and no code runs."""
    app = App()
    h = harness(app.post)
    app.publish("m1")
    app.report("r1", "r2", "r3")
    app.publish("m2", "m3")
    app.report("r4")
    h.drain()
    assert app.sets == [["m1"], ["m2", "m3"]]
    assert keys(h) == ["m1", "reply", "r1", "r2", "r3", "m2", "m3", "reply", "r4"]
    assert len(h.post.database.read(runs.of_stream, CHAT)) == 4


def test_the_entry_is_typed(harness: Open) -> None:
    """The landed entry is returned by whoever asks for it later, and its kind knows its fields."""
    app = App()
    h = harness(app.post)
    app.publish("m1")
    assert app.post.report(CHAT, {"disk": "full"}, key="cron:backup:1") is None
    h.drain()
    entry = app.post.report(CHAT, "something else", key="cron:backup:1")
    assert entry is not None
    assert entry.seq == 3
    reply = h.entries(CHAT)[1].key
    assert REPORT.of(entry) == Report(data={"disk": "full"}, turn_kind="cron", parent=reply)
    assert entry.data == {
        "data": {"disk": "full"}, "role": "assistant", "source": None, "origin_surface": "scheduled-task", "tools": [],
        "turn_kind": "cron", "parent": reply,
    }  # fmt: skip


def test_a_report_from_inside_a_transaction_says_what_to_do(harness: Open) -> None:
    """In `write` and in a `stream_owner` nothing else is opened: the error says so of any verb, and what to do."""
    post = Postroad()
    post.recorded("room", "src")
    said: list[str] = []
    verbs: list[Callable[[], object]] = [
        lambda: post.report("room/1", "x", key="k"), lambda: post.read("room/1"), lambda: post.streams.list(),
    ]  # fmt: skip

    def inside(conn: Connection) -> None:
        for verb in verbs:
            with pytest.raises(NestedTransaction) as caught:
                verb()
            said.append(str(caught.value))

    def joins(conn: Connection) -> None:
        with post.join(conn) as tx:
            tx.publish("room/1", NOTE, {}, key="joined")

    @post.stream_owner
    def owner(conn: Connection, stream: str) -> str:
        inside(conn)
        return "ann"

    @post.turn("chat")
    def chat(turn: Turn) -> None:
        turn.write(inside)
        turn.write(joins)
        post.report("room/1", "x", key="from the handler")

    h = harness(post)
    with post.begin() as tx:
        tx.publish(CHAT, NOTE, {}, key="m1")
        tx.publish("src/1", NOTE, {}, key="m1")
    h.drain()
    assert post.report("room/1", "x", key="after", source="src/1", owner="ann") is None
    assert len(said) == 2 * len(verbs)
    for one in said:
        assert "called from inside a transaction" in one
        assert "post.join(connection)" in one
        assert "such as post.report or post.read, is called after the transaction, or by the turn's handler" in one
    h.drain()
    assert sorted(entry.key for entry in post.read("room/1")) == ["after", "from the handler", "joined"]


def test_a_report_beside_one_s_own_write_lock_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite has one writer: who reports while it is the writer itself hears that this is for afterwards."""
    monkeypatch.setattr(dialects, "BUSY_MILLISECONDS", 20)
    engine = sqlite.configure(create_engine(f"sqlite:///{tmp_path / 'own.db'}"))
    post = Postroad(engine)
    post.recorded("room")
    post.check_schema()
    with engine.begin(), pytest.raises(DatabaseBusy, match=r"such as post\.report, is called after that transaction"):
        post.report("room/1", "x", key="k")
    assert post.report("room/1", "x", key="k") is None
    post.close()
    engine.dispose()


def test_a_turn_does_not_wait(harness: Open) -> None:
    """What a handler reports, to itself or to others, is accepted at once and lands behind it, sync and async."""
    post = Postroad()
    answers: list[object] = []

    @post.turn("chat")
    def chat(turn: Turn) -> None:
        answers.append(post.report(turn.stream, "to myself", key="r1", wait=600))
        answers.append(post.report("room/1", "to another", key="r1", wait=None))

    @post.turn("room")
    async def room(turn: Turn) -> None:
        answers.append(await asyncio.gather(post.areport(CHAT, "from a task", key="r2", wait=600)))

    h = harness(post)
    with post.begin() as tx:
        tx.publish(CHAT, NOTE, {}, key="m1")
        tx.publish("room/1", NOTE, {}, key="m1")
    h.drain()
    assert answers == [None, None, [None]]
    assert keys(h) == ["m1", "r1", "r2"]


def test_a_handler_may_ask_to_be_woken(harness: Open) -> None:
    """Then reports are events to decide on, in turns of their own, and land with the decision."""
    app = App(wake_on_report=True)
    h = harness(app.post)
    app.publish("m1")
    app.report("r1", "r2")
    app.publish("m2")
    h.drain()
    assert app.sets == [["m1"], ["r1", "r2"], ["m2"]]
    assert keys(h) == ["m1", "reply", "r1", "r2", "reply", "m2", "reply"]


def test_a_filter_says_which_reports_wake(harness: Open) -> None:
    """One that it has a reason for lands without a turn, with a noop that says why."""
    app = App(wake_on_report=True)

    @app.post.filter("chat", REPORT)
    def routine(event: Event) -> str | None:
        said = REPORT.of(event)
        return "routine" if said is not None and said.data == "r1" else None

    h = harness(app.post)
    app.report("r1", "r2")
    h.drain()
    assert app.sets == [["r2"]]
    assert keys(h) == ["r1", "postroad.noop:r1", "r2", "reply"]


def test_what_wakes_a_failing_handler_is_not_buried(harness: Open) -> None:
    """At its last attempt a report lands all the same, with an entry on the failure and an alert; messages go dead."""
    app = App(wake_on_report=True, attempts=2)

    def fail(turn: Turn) -> None:
        raise RetryLater("the model is down", after=1)

    app.decide = fail
    h = harness(app.post)
    app.report("r1", "r2")
    app.publish("m1")
    h.advance(600)
    assert [entry.key for entry in h.entries(CHAT) if entry.kind == REPORT.name] == ["r1", "r2"]
    assert [entry.kind for entry in h.entries(CHAT)].count("postroad.failed") == 3
    assert [event.event_id for event in h.post.database.read(stream_views.dead, CHAT, limit=9)] == ["m1"]
    assert len(h.post.database.read(alerts.list_)) == 3


def test_a_report_waits_behind_a_turn_that_fails(harness: Open) -> None:
    """It does not overtake what backs off, and lands once that has come to its end."""
    app = App(attempts=3)

    def fail(turn: Turn) -> None:
        if turn.attempt < 3:
            raise RetryLater("the model is down", after=60)

    app.decide = fail
    h = harness(app.post)
    app.publish("m1")
    app.report("r1")
    h.drain()
    assert keys(h) == []
    h.advance(600)
    assert keys(h) == ["m1", "reply", "r1"]


def test_a_report_waits_behind_a_parked_turn(harness: Open) -> None:
    """A person's word on the turn lets both go, in their order."""
    app = App(when_interrupted="park", attempts=1)
    post = app.post

    @post.tool(effect="unsafe")
    async def charge() -> None:
        """Take the money."""

    @post.turn("shop", when_interrupted="park")
    async def shop(turn: Turn) -> None:
        await turn.call(charge)
        raise RetryLater("the model is down")

    h = harness(post)
    with post.begin() as tx:
        tx.publish("shop/1", NOTE, {}, key="m1")
    assert post.report("shop/1", "hi", key="r1") is None
    h.drain()
    assert h.entries("shop/1") == []
    post.streams.resolve("shop/1", "discard", actor="ann", reason="seen to")
    h.drain()
    assert [entry.key for entry in h.entries("shop/1") if not entry.key.startswith("postroad.")] == ["m1", "r1"]


def test_stopping_withdraws_turns_and_no_report(harness: Open) -> None:
    """What people wrote before the stop goes, also beside a turn that backs off; every report lands."""
    app = App()

    def fail(turn: Turn) -> None:
        if turn.events[0].key == "m1":
            raise RetryLater("the model is down", after=600)

    app.decide = fail
    h = harness(app.post)
    app.publish("m1")
    h.drain()
    app.report("r1")
    app.publish("m2")
    app.report("r2")
    with app.post.begin() as tx:
        tx.stop_stream(CHAT)
    app.report("r3")
    app.publish("m3")
    h.drain()
    assert app.sets == [["m1"], ["m3"]]
    assert [key for key in keys(h) if key[0] in "rm"] == ["m1", "r1", "r2", "r3", "m3", "reply"]
    dead = h.post.database.read(stream_views.dead, CHAT, limit=9)
    assert [(event.event_id, event.reason) for event in dead] == [("m2", "turn.withdrawn")]


def test_a_deleted_stream_takes_none(harness: Open) -> None:
    """What waits there is dropped, visibly; what comes later is refused, also what had landed before."""
    app = App()
    h = harness(app.post)
    app.report("r1")
    h.drain()
    app.report("r2")
    with app.post.begin() as tx:
        tx.delete_stream(CHAT)
    h.drain()
    for key in ("r1", "r2", "r3"):
        with pytest.raises(StreamDeleted):
            app.post.report(CHAT, "x", key=key, wait=600)
    dead = h.post.database.read(stream_views.dead, CHAT, limit=9)
    assert [(event.event_id, event.reason) for event in dead] == [("r2", "stream_deleted")]


def test_a_turn_sees_what_was_reported_since_the_last_one(harness: Open) -> None:
    """However many reports have landed between two turns, a short window of the log holds all of them."""
    app = App()
    seen: list[list[str]] = []
    app.decide = lambda turn: seen.append([e.key for e in turn.log(last=1) if e.kind == REPORT.name])
    h = harness(app.post)
    app.publish("m1")
    h.drain()
    many = [f"r{n}" for n in range(20)]
    app.report(*many)
    h.drain()
    app.publish("m2")
    h.drain()
    assert seen == [[], many]


def test_a_set_of_reports_that_nobody_committed(harness: Open) -> None:
    """It lands when its lease is over, without a handler, whatever the number of its attempts."""
    app = App(attempts=1)
    h = harness(app.post)
    database = app.post.database
    app.report("r1")
    decider = app.post._registry.deciders["chat"]
    for token in "ab":
        database.transact(claim_all, [(decider, 9, "", True)], token=token, asked=h.clock.wall())
        h.clock.advance(decider.lease)
    app.publish("m1")
    h.drain()
    assert app.sets == [["m1"]]
    assert keys(h) == ["r1", "m1", "reply"]


def test_a_recorded_stream_takes_reports_like_all_else(harness: Open) -> None:
    """Where no code runs at all, messages and reports land in their order."""
    post = Postroad()
    post.recorded("chat")
    h = harness(post)
    with post.begin() as tx:
        tx.publish(CHAT, NOTE, {}, key="m1")
    post.report(CHAT, "x", key="r1")
    with post.begin() as tx:
        tx.publish(CHAT, NOTE, {}, key="m2")
    h.drain()
    assert keys(h) == ["m1", "r1", "m2"]


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"stream": "chat"}, "stream"),
        ({"key": ""}, "key"),
        ({"key": "evt:x"}, "key"),
        ({"key": "postroad.x"}, "key"),
        ({"data": "\0"}, "data"),
        ({"data": float("nan")}, "data"),
        ({"data": "x" * 300_000}, "data"),
        ({"wait": -1}, "wait"),
        ({"wait": "5"}, "wait"),
        ({"source": "here"}, "source"),
        ({"owner": ""}, "owner"),
        ({"owner": "ann"}, "owner"),
        ({"on_conflict": "replace"}, "on_conflict"),
    ],
)
def test_what_cannot_be_is_refused_at_the_door(harness: Open, wrong: dict[str, Any], field: str) -> None:
    """The error names the field, sync and async alike, and nothing is stored."""
    app = App()
    h = harness(app.post)
    given = {"stream": CHAT, "data": "x", "key": "k", **wrong}
    with pytest.raises(InvalidInput) as refused:
        app.post.report(**given)
    assert refused.value.about["field"] == field
    with pytest.raises(InvalidInput):
        asyncio.run(app.post.areport(**given))
    assert h.post.database.read(inbox.waiting, CHAT) == 0


def test_a_source_that_is_refused_stores_nothing(harness: Open) -> None:
    """Missing, deleted or another's: nothing is stored, whatever had been reported under the key before."""
    app = App()
    h = harness(app.post)
    app.publish("m1")
    with app.post.begin() as tx:
        tx.publish("chat/ann/7", NOTE, {}, key="m1")
    h.drain()
    with app.post.begin() as tx:
        tx.delete_stream("chat/gone")
    for source, owner in (("chat/2", None), ("chat/gone", None), ("chat/ann/7", "bob"), ("chat/1", "ann")):
        with pytest.raises(SourceRefused):
            app.post.report(CHAT, "x", key="k", source=source, owner=owner)
    assert h.post.database.read(inbox.waiting, CHAT) == 0
    assert app.post.report(CHAT, "x", key="k", source="chat/ann/7", owner="ann") is None
    h.drain()
    (entry,) = [one for one in h.entries(CHAT) if one.key == "k"]
    assert entry.data["source"] == "chat/ann/7"
    with pytest.raises(SourceRefused):
        app.post.report(CHAT, "x", key="k", source="chat/ann/7", owner="bob")


def test_the_application_says_whose_a_stream_is(harness: Open) -> None:
    """By its own tables, in the transaction that accepts the report; its error is the caller's, and all is undone."""
    app = App()

    @app.post.stream_owner
    def owner(conn: Connection, stream: str) -> str | None:
        if stream == "chat/broken":
            conn.execute(text("SELECT 1"))
            raise ValueError("no such table")
        return {"chat/7": "ann"}.get(stream)

    h = harness(app.post)
    assert app.post.report(CHAT, "x", key="k", source="chat/7", owner="ann") is None
    assert asyncio.run(app.post.areport(CHAT, "x", key="k2", source="chat/7")) is None
    for source in ("chat/8", "chat/broken"):
        with pytest.raises((SourceRefused, ValueError)):
            app.post.report(CHAT, "x", key="k3", source=source, owner="ann")
    with pytest.raises(SourceRefused):
        asyncio.run(app.post.areport(CHAT, "x", key="k3", source="chat/7", owner="bob"))
    h.drain()
    assert keys(h) == ["k", "k2"]


def test_an_owner_is_a_name(harness: Open) -> None:
    """An application that answers with an id of its own is told so, instead of finding that nothing is anybody's."""
    app = App()

    @app.post.stream_owner
    def owner(conn: Connection, stream: str) -> Any:
        return 7

    h = harness(app.post)
    with pytest.raises(InvalidInput, match="stream_owner has said 7 of chat/7: it must be a text or None"):
        app.post.report(CHAT, "x", key="k", source="chat/7", owner="7")
    assert h.post.database.read(inbox.waiting, CHAT) == 0


def test_an_owner_is_declared_once() -> None:
    """Two that say whose streams are would contradict each other; an async one would never be awaited."""
    post, handlers = Postroad(), Handlers()
    handlers.stream_owner(lambda conn, stream: None)
    post.include(handlers)
    with pytest.raises(Refused):
        post.stream_owner(lambda conn, stream: None)

    async def later(conn: Connection, stream: str) -> None:
        """It would answer when nobody listens any more."""

    with pytest.raises(InvalidInput):
        Handlers().stream_owner(later)  # type: ignore[arg-type]


def test_other_words_are_refused_if_they_matter(harness: Open) -> None:
    """`on_conflict="error"` names the key, while the first one waits and after it has landed; by default it stands."""
    app = App()
    h = harness(app.post)
    app.report("k")
    for _ in range(2):
        with pytest.raises(KeyConflict) as refused:
            app.post.report(CHAT, "other", key="k", on_conflict="error")
        assert refused.value.key == "k"
        app.post.report(CHAT, "k", key="k", on_conflict="error")
        app.post.report(CHAT, "other", key="k")
        h.drain()
    assert [entry.data["data"] for entry in h.entries(CHAT)] == ["k"]


def test_a_wait_is_a_span(harness: Open) -> None:
    """A timedelta is one too; where nobody else can land it, a test's own thread waits for nothing."""
    app = App()
    harness(app.post)
    assert app.post.report(CHAT, "x", key="k", wait=timedelta(days=1)) is None
