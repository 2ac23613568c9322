"""What a turn does with its events, whatever its handler does."""

from typing import Any

import pytest
from sqlalchemy import Connection, text
from sqlalchemy.exc import IntegrityError

from postroad import (
    OUTCOME,
    TIMER_FIRED,
    Dispatch,
    Event,
    Fold,
    GiveUp,
    InvalidInput,
    KeyConflict,
    Kind,
    NestedTransaction,
    Postroad,
    RetryLater,
    Turn,
)
from postroad.store import alerts, runs
from postroad.testing import Harness
from tests.engine.conftest import Open

NOTE = Kind("note", dict[str, int])
MAIL = Kind("mail", dict[str, str])


class Lazy:
    """Makes a coroutine that nobody awaits."""

    async def made(self) -> None: ...


def app(**turn: Any) -> tuple[Postroad, list[list[str]]]:
    """An app whose handler records which events it saw and calls what the test put into `state`."""
    post = Postroad()
    seen: list[list[str]] = []

    @post.sender(MAIL)
    def mail(d: Dispatch[dict[str, str]]) -> None: ...

    @post.turn("chat", **turn)
    def chat(t: Turn) -> None:
        seen.append([e.key for e in t.events])
        if post.state is not None:
            post.state(t)

    return post, seen


def publish(post: Postroad, *keys: str, stream: str = "chat/1") -> None:
    with post.begin() as tx:
        for n, key in enumerate(keys):
            tx.publish(stream, NOTE, {"n": n}, key=key)


def kinds(h: Harness, stream: str = "chat/1") -> list[str]:
    return [e.kind for e in h.entries(stream)]


def ends(h: Harness, stream: str = "chat/1") -> list[str]:
    return [str(r.end) for r in reversed(h.post.database.read(runs.of_stream, stream))]


def raised(h: Harness) -> list[str]:
    return [a.code for a in h.post.database.read(alerts.list_)]


def test_a_set_is_decided_once_in_order(harness: Open) -> None:
    """All waiting events of a stream are one turn, oldest first, and stand in the log in that order."""
    post, seen = app()
    h = harness(post)
    publish(post, "a", "b", "c")
    h.drain()
    assert seen == [["a", "b", "c"]]
    assert [(e.seq, e.key) for e in h.entries("chat/1")] == [(1, "a"), (2, "b"), (3, "c")]


def test_a_failing_turn_keeps_its_set_and_backs_off(harness: Open) -> None:
    """A turn that is tried again gets exactly the events it had, whatever came meanwhile."""
    post, seen = app()
    h = harness(post)
    fails = iter([RetryLater("model is down", after=10)])

    def decide(t: Turn) -> None:
        for error in fails:
            raise error

    post.state = decide
    publish(post, "a")
    h.drain()
    publish(post, "b")
    h.drain()
    assert seen == [["a"]]
    h.advance(10)
    assert seen == [["a"], ["a"], ["b"]]
    assert ends(h) == ["failed", "committed", "committed"]


def test_a_poisoned_event_dies_alone(harness: Open) -> None:
    """At the cap the set is split, the poisoned event goes dead with a visible entry and an alert, the rest lands."""
    post, _ = app(attempts=2)
    h = harness(post)

    def decide(t: Turn) -> None:
        if any(e.key == "bad" for e in t.events):
            raise RetryLater("poison")

    post.state = decide
    publish(post, "a", "bad", "c")
    h.advance(3600)
    entries = h.entries("chat/1")
    assert [e.key for e in entries if e.kind == "note"] == ["a", "c"]
    failed = next(e for e in entries if e.kind == "postroad.failed")
    assert failed.data["events"] == ["bad"]
    assert failed.data["reason"] == "turn.dead.max_attempts"
    assert "turn.dead" in raised(h)
    with pytest.raises(KeyConflict), post.begin() as tx:
        tx.publish("chat/1", NOTE, {"n": 99}, key="bad")


def test_give_up_needs_no_further_attempt(harness: Open) -> None:
    """GiveUp sends a single event to the dead at once."""
    post, seen = app()
    h = harness(post)
    post.state = lambda t: (_ for _ in ()).throw(GiveUp("never"))
    publish(post, "a")
    h.drain()
    assert len(seen) == 1
    assert kinds(h) == ["postroad.failed"]


def test_an_unplanned_exception_comes_out_of_drain(harness: Open) -> None:
    """A harness raises again what a handler did not raise on purpose, and the turn has backed off."""
    post, _ = app()
    h = harness(post)
    post.state = lambda t: 1 / 0
    publish(post, "a")
    with pytest.raises(ZeroDivisionError):
        h.drain()
    assert ends(h) == ["failed"]


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt(), GeneratorExit(), BaseException("own")])
def test_any_exception_is_the_handlers_failure(harness: Open, error: BaseException) -> None:
    """SystemExit and its like fail the attempt with their class's name and end no loop."""
    post, _ = app(attempts=1)
    h = harness(post)
    post.state = lambda t: (_ for _ in ()).throw(error)
    publish(post, "a")
    with pytest.raises(type(error)):
        h.drain()
    assert h.entries("chat/1")[0].data["error"].startswith(type(error).__name__)


def test_an_exception_that_cannot_be_printed_is_recorded(harness: Open) -> None:
    """An exception whose own text raises is recorded by its class."""

    class Odd(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    post, _ = app(attempts=1)
    h = harness(post)
    post.state = lambda t: (_ for _ in ()).throw(Odd())
    publish(post, "a")
    with pytest.raises(Odd):
        h.drain()
    assert h.entries("chat/1")[0].data["error"].startswith("Odd")


def test_a_handler_must_return_none(harness: Open) -> None:
    """What a handler returns by mistake is a failure, not a decision."""
    post = Postroad()

    @post.turn("chat", attempts=1)
    def chat(t: Turn) -> bool:
        return True

    h = harness(post)
    publish(post, "a")
    h.drain()
    assert kinds(h) == ["postroad.failed"]


def test_filtered_prefix_lands_without_the_handler(harness: Open) -> None:
    """Events that need no decision are two entries each and call no handler; later ones ride in the turn's commit."""
    post, seen = app()
    post.filter("chat", NOTE)(lambda e: "even" if e.data["n"] % 2 == 0 else None)
    h = harness(post)
    publish(post, "a", "b", "c")
    h.drain()
    assert seen == [["b"]]
    assert [(e.kind, e.key) for e in h.entries("chat/1")] == [
        ("note", "a"),
        ("postroad.noop", "postroad.noop:a"),
        ("note", "b"),
        ("note", "c"),
        ("postroad.noop", "postroad.noop:c"),
    ]


def test_recorded_streams_run_no_code(harness: Open) -> None:
    """Events of a recorded type become entries."""
    post = Postroad()
    post.recorded("audit")
    h = harness(post)
    publish(post, "a", "b", stream="audit/1")
    h.drain()
    assert kinds(h, "audit/1") == ["note", "note"]


def test_one_commit_holds_the_whole_decision(harness: Open) -> None:
    """Entries, dispatches, timers, publishes and the user's rows stand together or not at all."""
    post, _ = app(attempts=1)
    h = harness(post)

    def decide(t: Turn) -> None:
        t.record("thought", {"x": 1})
        t.send(MAIL, {"a": "b"}, to="x", key="k1")
        t.set_timer("t1", after=60)
        t.publish("audit/1", NOTE, {"n": 1})

        def boom(conn: Connection) -> None:
            raise RuntimeError("the user's table is gone")

        t.write(boom)

    post.state = decide
    publish(post, "a")
    with pytest.raises(RuntimeError):
        h.drain()
    assert kinds(h) == ["postroad.failed"]
    assert post.dispatches.list() == []
    assert h.advance(120).timers == 0
    assert post.read("audit/1") == []


def test_a_swallowed_integrity_error_is_no_commit(harness: Open) -> None:
    """A `write` that hides its own IntegrityError never leads to a false `committed`."""
    post, _ = app(attempts=1)
    h = harness(post)
    with post.begin() as tx:
        tx.write(lambda conn: conn.execute(text("create table mine_rows (id integer primary key)")))
        tx.write(lambda conn: conn.execute(text("insert into mine_rows values (1)")))

    def hide(conn: Connection) -> None:
        try:
            conn.execute(text("insert into mine_rows values (1)"))
        except IntegrityError:
            return

    def decide(t: Turn) -> None:
        t.record("thought", {"x": 1})
        t.write(hide)

    post.state = decide
    publish(post, "a")
    try:
        if post.database.is_sqlite:
            h.drain()  # the statement alone was undone: all else stands
            assert kinds(h) == ["note", "thought"]
        else:
            h.drain()
            assert kinds(h) == ["postroad.failed"]
    finally:
        with post.begin() as tx:
            tx.write(lambda conn: conn.execute(text("drop table mine_rows")))


def test_a_duplicate_key_is_replaced_by_another_decision(harness: Open) -> None:
    """`on_duplicate` decides instead, without the handler, and the event lands."""
    post, seen = app(on_duplicate=lambda t, key: t.send(MAIL, {"dup": key}, key=f"{t.events[0].key}/task") and None)
    h = harness(post)
    with post.begin() as tx:
        tx.send(MAIL, {"a": "b"}, key="taken")
    post.filter("chat", OUTCOME)(lambda e: "sent")
    post.state = lambda t: t.send(MAIL, {"c": "d"}, key="taken") and None
    publish(post, "a")
    h.drain()
    assert seen == [["a"]]
    assert {d.key for d in post.dispatches.list()} == {"taken", "a/task"}
    assert ends(h) == ["committed", "committed"]


def test_a_duplicate_key_without_a_replacement_is_visible(harness: Open) -> None:
    """Without `on_duplicate` the events land beside a failed entry, and an alert is raised."""
    post, _ = app()
    h = harness(post)
    with post.begin() as tx:
        tx.send(MAIL, {"a": "b"}, key="taken")
    post.state = lambda t: t.send(MAIL, {"c": "d"}, key="taken") and None
    publish(post, "a")
    h.drain()
    assert kinds(h) == ["note", "postroad.failed"]
    assert "turn.duplicate_key" in raised(h)


def test_keys_derive_from_the_turn(harness: Open) -> None:
    """What a turn sends without a key has the same key on every attempt."""
    post, _ = app()
    h = harness(post)
    keys: list[str] = []
    post.filter("chat", OUTCOME)(lambda e: "sent")

    def decide(t: Turn) -> None:
        t.send(MAIL, {"a": "b"})
        keys.append(t._records.sends[0].key)
        if t.attempt == 1:
            raise RetryLater("once")

    post.state = decide
    publish(post, "a")
    h.advance(60)
    assert len(keys) == 2
    assert keys[0] == keys[1] == post.dispatches.list()[0].key


def test_timers_come_back_as_events(harness: Open) -> None:
    """A timer's firing is an event of its stream with the timer's data, neither early nor twice."""
    post, _ = app()
    h = harness(post)
    fired: list[Any] = []

    def decide(t: Turn) -> None:
        for e in t.events:
            data = TIMER_FIRED.of(e)
            if data is None:
                t.set_timer("tmr:1", after=60, data={"step": 1})
            else:
                fired.append((t.now, e.key, data))

    post.state = decide
    publish(post, "a")
    h.advance(59)
    assert fired == []
    h.advance(1)
    h.advance(3600)
    assert [(key, data) for _, key, data in fired] == [("evt:tmr:1", {"step": 1})]


def test_a_rearmed_timer_is_an_event_of_its_own(harness: Open) -> None:
    """Each generation of a timer fires under an id of its own."""
    post, _ = app()
    h = harness(post)
    with post.begin() as tx:
        tx.set_timer("t", stream="chat/1", after=1)
    h.advance(1)
    with post.begin() as tx:
        tx.rearm_timer("t", stream="chat/1", after=1)
    h.advance(1)
    assert [e.key for e in h.entries("chat/1")] == ["evt:t", "evt:t#1"]


def test_failed_outcomes_of_alert_kinds_need_no_decision(harness: Open) -> None:
    """A dead dispatch of an alert kind is an alert and two entries, and the handler is not called."""
    post = Postroad()
    seen: list[str] = []

    @post.sender("hero", on_failure="alert")
    def hero(d: Dispatch[Any]) -> None: ...

    @post.turn("chat")
    def chat(t: Turn) -> None:
        seen.extend(e.kind for e in t.events)
        if OUTCOME.of(t.events[0]) is None:
            t.send("hero", {}, key="h1")

    h = harness(post)
    h.fail("hero", GiveUp("tool is down"))
    publish(post, "a")
    h.drain()
    assert seen == ["note"]
    assert kinds(h) == ["note", "postroad.outcome", "postroad.noop"]
    assert "dispatch.dead_letter" in raised(h)


def test_failed_outcomes_of_event_kinds_are_decided_on(harness: Open) -> None:
    """A dead dispatch of an event kind comes back with its reason and error, and raises no alert."""
    post, _ = app()
    h = harness(post)
    outcomes: list[Any] = []

    def decide(t: Turn) -> None:
        for e in t.events:
            if (o := OUTCOME.of(e)) is not None:
                outcomes.append((e.key, o.status, o.reason, o.error))
            else:
                t.send(MAIL, {}, key="m1")

    post.state = decide
    h.fail(MAIL, GiveUp("no such address"))
    publish(post, "a")
    h.drain()
    assert outcomes == [
        (
            "out:m1:dead_letter",
            "dead_letter",
            "dispatch.dead_letter.permanent",
            "no such address",
        )
    ]
    assert raised(h) == []


def test_folds_grow_with_the_log(harness: Open) -> None:
    """A fold seen by a turn holds the whole log before it, from memory or not."""
    post, _ = app()
    h = harness(post)
    count: Fold[int] = Fold("count", int, lambda n, e: n + 1)
    states: list[int] = []
    post.state = lambda t: states.append(t.fold(count))
    for key in "abc":
        publish(post, key)
        h.drain()
    assert states == [0, 1, 2]


def test_a_transaction_inside_a_transaction_is_refused(harness: Open) -> None:
    """`begin` inside `write` is refused instead of waiting for itself."""
    post, _ = app()
    harness(post)

    def nested(conn: Connection) -> None:
        with post.begin() as tx:
            tx.publish("chat/2", NOTE, {"n": 1})

    with pytest.raises(NestedTransaction), post.begin() as tx:
        tx.write(nested)


def test_a_kind_of_an_older_version_is_upgraded(harness: Open) -> None:
    """Events, entries and dispatches written by older code reach newer code in today's form."""
    old, new = Kind("v", dict[str, int]), Kind("v", dict[str, int], version=2, upgrade={1: lambda d: {"y": d["x"]}})
    post = Postroad()
    seen: list[Any] = []
    post.sender(new)(lambda d: None)

    @post.turn("chat")
    def chat(t: Turn) -> None:
        seen.extend(new.of(e) for e in t.events if e.kind == "v")

    h = harness(post)
    with post.begin() as tx:
        tx.publish("chat/1", old, {"x": 1})
        tx.send(old, {"x": 2}, key="k")
    h.drain()
    assert seen == [{"y": 1}]
    assert [d.body for d in h.sent(new)] == [{"y": 2}]


def test_events_of_the_past_are_not_processed_twice(harness: Open) -> None:
    """Publishing what has landed already is accepted and changes nothing."""
    post, seen = app()
    h = harness(post)
    publish(post, "a")
    h.drain()
    publish(post, "a")
    h.drain()
    assert seen == [["a"]]


def test_debounce_waits_for_quiet_with_a_maximum(harness: Open) -> None:
    """Events that come close together are one turn; a stream that is never quiet is taken at the maximum."""
    post, seen = app(debounce=2, debounce_max=5)
    h = harness(post)
    for n in range(8):
        publish(post, f"e{n}")
        h.advance(1)
    h.advance(10)
    assert len(seen) == 2
    assert [key for keys in seen for key in keys] == [f"e{n}" for n in range(8)]


def test_turns_refuse_what_is_ours(harness: Open) -> None:
    """Kinds, keys and streams that are ours or malformed are refused at the verb."""
    post, _ = app()
    harness(post)
    with post.begin() as tx:
        for bad in ("evt:x", "out:x", "postroad.x", "", " ", "a\0b", "\ud83c"):
            with pytest.raises(InvalidInput):
                tx.publish("chat/1", NOTE, {"n": 1}, key=bad)
        for stream in ("chat", "chat/", "/1", "", "a\0/1"):
            with pytest.raises(InvalidInput):
                tx.publish(stream, NOTE, {"n": 1})


def test_the_log_is_read_in_pages(harness: Open) -> None:
    """`read` gives the entries above a seq, at most `limit`."""
    post, _ = app()
    h = harness(post)
    publish(post, *"abcde")
    h.drain()
    assert [e.seq for e in post.read("chat/1", after=1, limit=2)] == [2, 3]
    with pytest.raises(InvalidInput):
        post.read("chat/1", limit=0)


def test_position_says_how_many_stand_before(harness: Open) -> None:
    """An accepted event knows how many of its stream wait before it, and None once it has landed."""
    post, _ = app()
    h = harness(post)
    with post.begin() as tx:
        first, second = (tx.publish("chat/1", NOTE, {"n": n}) for n in (1, 2))
    assert [post.position(first), post.position(second)] == [0, 1]
    h.drain()
    assert [post.position(first), post.position(second)] == [None, None]
    with post.begin() as tx:
        again = tx.publish("chat/1", NOTE, {"n": 1}, key=first.id)
    assert not again.created
    assert post.position(again) is None


def test_filters_are_asked_once_per_event(harness: Open) -> None:
    """A set is filtered once in a run, whether its beginning is answered or not."""
    post, seen = app()
    asked: list[str] = []

    def odd(event: Event) -> str | None:
        asked.append(event.key)
        return "odd" if event.data["n"] % 2 else None

    post.filter("chat", NOTE)(odd)
    h = harness(post)
    publish(post, "a", "b", "c")
    h.drain()
    assert asked == ["a", "b", "c"]
    assert seen == [["a", "c"]]


@pytest.mark.parametrize("answer", [True, 1, "", ["why"], Lazy()], ids=["true", "int", "empty", "list", "coroutine"])
def test_a_filter_answers_with_a_text_or_none(harness: Open, answer: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Any other answer is logged, and the event is decided on."""
    post, seen = app()
    post.filter("chat", NOTE)(lambda e: answer.made() if isinstance(answer, Lazy) else answer)
    h = harness(post)
    publish(post, "a")
    h.drain()
    assert seen == [["a"]]
    assert kinds(h) == ["note"]
    assert "a filter failed on a" in caplog.text


def test_the_same_said_twice_in_a_turn_is_said_once(harness: Open) -> None:
    """Same key and content twice is one dispatch, as in `begin`; other content is a duplicate key."""
    post, _ = app()
    accepted: list[Any] = []

    def twice(t: Turn) -> None:
        if t.events[0].kind == "note":
            accepted.extend(t.send(MAIL, {"a": "b"}, to="x", key="k1") for _ in range(2))

    post.state = twice
    h = harness(post)
    publish(post, "a")
    h.drain()
    assert kinds(h) == ["note", "postroad.outcome"]
    assert [(one.id == accepted[0].id, one.created) for one in accepted] == [(True, True), (True, False)]
    assert len(h.sent(MAIL)) == 1
    post.state = lambda t: [t.send(MAIL, {"a": text}, key="k2") for text in "bc"] and None
    publish(post, "b")
    h.drain()
    assert raised(h) == ["turn.duplicate_key"]
    assert len(h.sent(MAIL)) == 1


def test_a_replacement_around_an_async_function_fails(harness: Open) -> None:
    """An `on_duplicate` that returns a coroutine decided nothing: the attempt fails and says why."""
    post, _ = app(attempts=1, on_duplicate=lambda t, key: Lazy().made())
    post.state = lambda t: t.send(MAIL, {}, key="taken") and None
    h = harness(post)
    with post.begin() as tx:
        tx.send(MAIL, {"first": ""}, key="taken")
    publish(post, "a")
    h.drain()
    (entry,) = h.entries("chat/1")
    assert (entry.kind, "async" in entry.data["error"]) == ("postroad.failed", True)
