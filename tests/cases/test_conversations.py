"""The field checklist of an outbox before an agent, line by line, over conversations with the user's own tables."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Connection, text

from postroad import GiveUp, KeyConflict, Kind, Postroad, RetryLater, Turn
from postroad.store import alerts, operations, queues, runs
from postroad.testing import Harness
from tests.cases.apps import OpenApp, idle, until
from tests.engine.conftest import Open

MESSAGE = Kind("message", dict[str, str])
REPLY = Kind("reply", dict[str, str])
OWN = (
    "CREATE TABLE {p}messages (id TEXT PRIMARY KEY, chat TEXT NOT NULL, said TEXT NOT NULL)",
    "CREATE TABLE {p}chats (id TEXT PRIMARY KEY, unread INTEGER NOT NULL)",
)
Answer = Callable[[Turn], None]


class Chats:
    """Conversations beside the user's own tables, as a chat server has them; `answer` is what its handler does."""

    def __init__(self, post: Postroad, schema: str | None, **turn: Any) -> None:
        self.post = post
        self._prefix = f'"{schema}".' if schema else ""
        self.answer: Answer = self.reply
        self.turns: list[tuple[str, list[str]]] = []
        self.mailed: list[str] = []

        @post.tool(effect="unsafe")
        async def mail(to: str) -> str:
            self.mailed.append(to)
            return "sent"

        @post.tool(effect="read")
        async def look(at: str) -> str:
            return at

        self.mail, self.look = mail, look

        @post.turn("chat", **turn)
        def chat(turn: Turn) -> None:
            self.turns.append((turn.id, [event.key for event in turn.events]))
            self.answer(turn)

    def make(self) -> None:
        """The user's tables."""
        with self.post.begin() as tx:
            for statement in OWN:
                tx.write(self._written(statement))

    def _written(self, statement: str, **values: object) -> Callable[[Connection], object]:
        return lambda conn: conn.execute(text(statement.format(p=self._prefix)), values)

    def say(self, key: str, said: str, chat: str = "1") -> None:
        """A client's message: their row and the event that carries only its id, in one transaction."""
        with self.post.begin() as tx:
            tx.publish(f"chat/{chat}", MESSAGE, {"id": key}, key=key)
            insert = "INSERT INTO {p}messages (id, chat, said) VALUES (:id, :chat, :said) ON CONFLICT (id) DO NOTHING"
            tx.write(self._written(insert, id=key, chat=chat, said=said))

    def reply(self, turn: Turn) -> None:
        """Record a reply, and the user's own row with it."""
        turn.record(REPLY, {"to": turn.events[-1].key})
        count = (
            "INSERT INTO {p}chats (id, unread) VALUES (:id, 1) "
            "ON CONFLICT (id) DO UPDATE SET unread = {p}chats.unread + 1"
        )
        turn.write(self._written(count.replace("{p}chats.unread", "chats.unread"), id=turn.subject))

    def rows(self, table: str) -> list[Any]:
        """What stands in one of the user's tables."""
        select = text(f"SELECT * FROM {self._prefix}{table} ORDER BY id")
        return self.post.database.read(lambda conn: [tuple(row) for row in conn.execute(select)])

    def kinds(self, chat: str = "1") -> list[str]:
        """The kinds in a conversation's log."""
        return [entry.kind for entry in self.post.read(f"chat/{chat}")]


@pytest.fixture
def chats(harness: Open, place: dict[str, Any]) -> tuple[Chats, Harness]:
    """Conversations in virtual time."""
    made = Chats(Postroad(), place.get("schema"), attempts=2)
    h = harness(made.post)
    made.make()
    return made, h


Scene = tuple[Chats, Harness]


def test_a_state_change_and_its_trigger_share_a_transaction(chats: Scene) -> None:
    """A message whose own row cannot be written wakes no turn; one that is written does."""
    made, h = chats

    def broken(conn: Connection) -> None:
        raise ValueError("the user's own rule")

    with pytest.raises(ValueError, match="own rule"), made.post.begin() as tx:
        tx.publish("chat/1", MESSAGE, {"id": "a"}, key="a")
        tx.write(broken)
    h.drain()
    assert made.turns == []
    made.say("a", "hello")
    h.drain()
    assert [keys for _, keys in made.turns] == [["a"]]


def test_a_stable_request_id_makes_one_trigger(chats: Scene) -> None:
    """A client that sends a message again, before or after its turn, has one turn; other content is a conflict."""
    made, h = chats
    made.say("a", "hello")
    made.say("a", "hello")
    h.drain()
    made.say("a", "hello")
    h.drain()
    assert [keys for _, keys in made.turns] == [["a"]]
    assert made.rows("messages") == [("a", "1", "hello")]
    with pytest.raises(KeyConflict), made.post.begin() as tx:
        tx.publish("chat/1", MESSAGE, {"id": "b"}, key="a")


def test_content_is_stored_once(chats: Scene) -> None:
    """With the user's own table the event carries only the id; it is in the inbox or in the log, never in both."""
    made, h = chats
    made.say("a", "hello")
    (row,) = made.post.streams.list()
    assert [event.key for event in row.waiting] == ["a"]
    assert made.kinds() == []
    h.drain()
    (row,) = made.post.streams.list()
    assert row.waiting == ()
    assert made.post.read("chat/1")[0].raw == '{"id":"a"}'


def test_a_claim_defines_its_turn(chats: Scene) -> None:
    """What comes while a turn runs is not part of it; a retried turn keeps its events and its id."""
    made, h = chats
    fails = [True]

    def answer(turn: Turn) -> None:
        if fails:
            fails.pop()
            made.say("late", "and another thing")
            raise RetryLater("model is down", after=1)
        made.reply(turn)

    made.answer = answer
    made.say("a", "hello")
    made.say("b", "there")
    h.advance(60)
    assert [keys for _, keys in made.turns] == [["a", "b"], ["a", "b"], ["late"]]
    assert made.turns[0][0] == made.turns[1][0] != made.turns[2][0]


async def test_work_is_serial_in_a_conversation_and_concurrent_across(open_app: OpenApp) -> None:
    """Two workers never run two turns of one conversation at once, and run those of others meanwhile."""
    running: Counter[str] = Counter()
    most: Counter[str] = Counter()
    apps = [open_app(), open_app()]
    for post in apps:

        @post.turn("chat", concurrency=4)
        async def chat(turn: Turn) -> None:
            running.update([turn.stream, "all"])
            for name in (turn.stream, "all"):
                most[name] = max(most[name], running[name])
            await asyncio.sleep(0.02)
            running.subtract([turn.stream, "all"])

    async with apps[0].running(), apps[1].running():
        for number in range(6):
            async with apps[0].begin() as tx:
                for stream in range(4):
                    tx.publish(f"chat/{stream}", MESSAGE, {"id": str(number)}, key=str(number))
        await asyncio.to_thread(until, lambda: idle(apps[0]))
    assert {most[f"chat/{stream}"] for stream in range(4)} == {1}
    assert most["all"] > 1
    for stream in range(4):
        assert [entry.key for entry in apps[0].read(f"chat/{stream}")] == [str(n) for n in range(6)]


def test_reply_operations_and_done_marks_commit_together(chats: Scene) -> None:
    """A commit that fails in the user's own rows leaves no reply, no attached operation and nothing consumed."""
    made, h = chats
    fails = [True]

    def broken(conn: Connection) -> None:
        if fails:
            fails.pop()
            raise RuntimeError("the user's own rule")

    def answer(turn: Turn) -> None:
        made.reply(turn)
        turn.write(broken)

    made.answer = answer
    made.say("a", "hello")
    with pytest.raises(RuntimeError):
        h.drain()
    assert made.kinds() == []
    assert made.rows("chats") == []
    assert len(made.post.streams.list()[0].waiting) == 1
    h.advance(60)
    assert made.kinds() == ["message", "reply"]
    assert made.rows("chats") == [("1", 1)]


def test_attempts_have_a_cap_and_a_visible_end(chats: Scene) -> None:
    """A message that fails for ever ends with an entry in its conversation and an alert; the next one runs."""
    made, h = chats

    def answer(turn: Turn) -> None:
        if turn.events[0].key == "poison":
            raise RetryLater("cannot")
        made.reply(turn)

    made.answer = answer
    made.say("poison", "...")
    h.advance(3600)
    assert made.kinds() == ["postroad.failed"]
    assert made.post.read("chat/1")[0].data["reason"] == "turn.dead.max_attempts"
    assert [alert.code for alert in h.post.database.read(alerts.list_)] == ["turn.dead"]
    made.say("b", "hello")
    h.drain()
    assert made.kinds() == ["postroad.failed", "message", "reply"]


def test_start_up_recovers_every_unfinished_state(harness: Open, place: dict[str, Any]) -> None:
    """A new process finishes what waits, what backs off, and what a process that died had claimed; no reset."""
    made = Chats(Postroad(), place.get("schema"))
    h = harness(made.post)
    made.make()

    def failing(turn: Turn) -> None:
        raise RetryLater("model is down", after=5)

    made.answer = failing
    made.say("a", "hello", chat="failed")
    h.drain()
    made.say("a", "hello", chat="claimed")
    h.post.database.transact(queues.claim, stream_type="chat", token="dead", limit=9, batch=9, lease=10**6)
    made.say("a", "hello", chat="waiting")
    assert sorted(row.state for row in made.post.streams.list()) == ["backing_off", "running", "waiting"]
    made.answer = made.reply
    h.advance(60)
    for chat in ("failed", "claimed", "waiting"):
        assert made.kinds(chat) == ["message", "reply"], chat


def test_recovery_knows_which_attempts_had_effects(harness: Open, place: dict[str, Any]) -> None:
    """After reads a failed turn is run again; after a mail was sent it is shown, and nothing is sent twice."""
    post = Postroad()
    made = Chats(post, place.get("schema"))
    tools = {"read": made.look, "mail": made.mail}

    @post.turn("talk")
    async def talk(turn: Turn) -> None:
        await turn.call(tools[turn.subject], "x")
        if turn.attempt == 1:
            raise RetryLater("model is down", after=1)
        turn.record(REPLY, {})

    h = harness(post)
    for subject in tools:
        with post.begin() as tx:
            tx.publish(f"talk/{subject}", MESSAGE, {"id": "a"}, key="a")
    h.advance(60)
    assert [entry.kind for entry in h.entries("talk/read")] == ["message", "reply"]
    assert [entry.kind for entry in h.entries("talk/mail")] == ["message", "postroad.interrupted"]
    assert made.mailed == ["x"]


async def test_claims_of_several_workers_never_overlap(open_app: OpenApp) -> None:
    """Fifty conversations and two workers: each message is decided on by exactly one of them, once."""
    decided: Counter[str] = Counter()
    apps = [open_app(), open_app()]
    for post in apps:

        @post.turn("chat")
        async def chat(turn: Turn) -> None:
            decided.update(f"{turn.stream} {event.key}" for event in turn.events)

    async with apps[0].running(), apps[1].running():
        async with apps[0].begin() as tx:
            for number in range(50):
                for key in ("a", "b"):
                    tx.publish(f"chat/{number}", MESSAGE, {"id": key}, key=key)
        await asyncio.to_thread(until, lambda: idle(apps[0]))
    assert decided == {f"chat/{number} {key}": 1 for number in range(50) for key in ("a", "b")}
    ends = {str(run.end) for n in range(50) for run in apps[0].database.read(runs.of_stream, f"chat/{n}")}
    assert ends == {"committed"}


def test_a_given_up_message_does_not_take_its_neighbours_along(chats: Scene) -> None:
    """Three messages of which one is refused: the others get their replies, in order."""
    made, h = chats

    def answer(turn: Turn) -> None:
        if any(event.key == "bad" for event in turn.events):
            raise GiveUp("the model refuses")
        made.reply(turn)

    made.answer = answer
    for key in ("a", "bad", "c"):
        made.say(key, key)
    h.advance(3600)
    assert [entry.key for entry in made.post.read("chat/1") if entry.kind == "message"] == ["a", "c"]
    assert made.kinds().count("postroad.failed") == 1


def test_twenty_quick_messages_are_one_turn(harness: Open, place: dict[str, Any]) -> None:
    """With a debounce a burst is one turn, once it is quiet; whoever never stops is heard at the maximum."""
    made = Chats(Postroad(), place.get("schema"), debounce=1, debounce_max=5)
    h = harness(made.post)
    made.make()
    for number in range(20):
        made.say(f"m{number}", "hello")
        h.advance(0.1)
    h.advance(2)
    assert [len(keys) for _, keys in made.turns] == [20]
    for number in range(30):
        made.say(f"n{number}", "hello")
        h.advance(0.5)
    assert 2 <= len(made.turns) - 1 <= 4


def test_deleting_a_conversation_in_the_middle_of_a_turn_re_creates_nothing(chats: Scene) -> None:
    """The turn's result is discarded, and what arrives later (a timer, a message) brings nothing back."""
    made, h = chats

    def answer(turn: Turn) -> None:
        with made.post.begin() as tx:
            tx.delete_stream("chat/1")
        turn.set_timer("t", after=1)
        made.reply(turn)

    made.answer = answer
    made.say("a", "hello")
    h.advance(60)
    assert made.kinds() == []
    assert made.rows("chats") == []
    assert made.post.database.read(operations.of_stream, "chat/1") == []
