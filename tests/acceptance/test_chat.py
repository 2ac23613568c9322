"""The chat's API and its turns, on both databases; the page itself is tested in a browser, in tests/system."""

import asyncio
import importlib
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import anyio
import httpx
import msgspec
import psycopg
import pytest
from sqlalchemy import make_url

from postroad import RetryLater, Turn
from postroad.model.clock import SECOND
from postroad.store import queues
from postroad.testing import Harness

EXAMPLE = Path(__file__).parents[2] / "examples/chat"
MODULES = tuple(path.stem for path in EXAMPLE.glob("*.py"))
WAIT_SECONDS = 60
Event = tuple[str, Any]


class Chat:
    """The example's modules over a database of the test's own, and a client."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.web = importlib.import_module("web")
        self.app, self.feed, self.rows, self.tools = (sys.modules[name] for name in ("app", "feed", "rows", "tools"))
        with self.app.post.begin() as tx:
            tx.write(self.rows.create)
        transport = httpx.ASGITransport(self.web.web)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000")

    async def say(self, text: str, *, to: str = "c1", id: str = "m1") -> httpx.Response:
        return await self.client.post(f"/conversations/{to}/messages", json={"id": id, "text": text})

    async def drain(self) -> None:
        """Run turns until no message waits."""
        async with asyncio.timeout(WAIT_SECONDS):
            while (await self.app.post.adrain()).waiting:
                await asyncio.sleep(0.05)  # until the debounce or a back-off is over

    async def told(self, conversation: str | None = "c1", *, after: int = 0, until: str = "state") -> list[Event]:
        """What a page is told that comes with what it has heard up to `after`."""
        found: list[Event] = []
        feed = self.feed.events(conversation, after, lambda: 7, anyio.Event())
        async with asyncio.timeout(WAIT_SECONDS), aclosing(feed) as events:
            async for one in events:
                found.append((one.event, msgspec.json.decode(one.data)))
                if one.event in (until, "deleted", "reset"):
                    break
        return found

    async def state(self, conversation: str | None = "c1") -> dict[str, Any]:
        """How things stand, as a page is told."""
        name, state = (await self.told(conversation))[-1]
        assert name == "state"
        return dict(state)

    async def log(self, conversation: str = "c1") -> list[tuple[str, Any]]:
        """The kinds of the entries that a page is told, with what they say."""
        found = [entry for name, entry in await self.told(conversation) if name == "entry"]
        return [(entry["kind"], entry["data"].get("text") or list(entry["texts"].values())) for entry in found]

    def close(self) -> None:
        self.app.post.close()
        self.app.engine.dispose()


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'chat.db'}"
    server, schema = request.getfixturevalue("postgres_url"), request.getfixturevalue("fresh_schema")
    with psycopg.connect(server.replace("+psycopg", "", 1), autocommit=True) as conn:
        conn.execute(f'create schema "{schema}"')
    found = make_url(server).update_query_dict({"options": f"-csearch_path={schema}"})
    return found.render_as_string(hide_password=False)


@pytest.fixture
def open_chat(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Chat]]:
    """The example, imported anew for this database, in a folder of its own, with tools that take no time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POSTROAD_DATABASE_URL", url)
    monkeypatch.syspath_prepend(str(EXAMPLE))
    opened: list[Chat] = []

    def factory() -> Chat:
        opened.append(Chat(url))
        monkeypatch.setattr(opened[-1].tools, "TAKES_SECONDS", 0.0)
        monkeypatch.setattr(sys.modules["model"], "WORD_SECONDS", 0.0)
        return opened[-1]

    yield factory
    for chat in opened:
        chat.close()
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
async def chat(open_chat: Callable[[], Chat]) -> AsyncIterator[Chat]:
    made = open_chat()
    yield made
    await made.client.aclose()


async def test_a_message_is_there_at_once_with_its_place(chat: Chat) -> None:
    """What was accepted is told as waiting, with its place, before any worker has seen it."""
    assert (await chat.say("hello there", id="m1")).status_code == 201
    assert (await chat.say("anyone?", id="m2")).json() == {"id": "m2", "new": True}
    state = await chat.state()
    assert [(m["text"], m["status"], m["place"]) for m in state["messages"]] == [
        ("hello there", "open", 0),
        ("anyone?", "open", 1),
    ]
    assert state["turn"] == "waiting"
    assert state["conversations"] == [{"id": "c1", "title": "hello there", "unread": 0}]


async def test_a_retry_is_the_same_message(chat: Chat) -> None:
    """A message that comes again under its id is accepted, and is one message, before its answer and after it."""
    first, again = await chat.say("hello"), await chat.say("hello")
    assert (first.status_code, again.status_code) == (201, 200)
    await chat.drain()
    assert (await chat.say("hello")).json() == {"id": "m1", "new": False}
    await chat.drain()
    assert [kind for kind, _ in await chat.log()] == ["message", "reply"]
    assert (await chat.state())["messages"] == []


async def test_an_id_is_of_one_message(chat: Chat) -> None:
    """The same id with another text, or in another conversation, is refused, and nothing of it is written."""
    await chat.say("hello")
    assert (await chat.say("good bye")).status_code == 409
    other = await chat.say("hello", to="c2")
    assert (other.status_code, other.json()) == (409, {"error": "This id belongs to another message."})
    state = await chat.state()
    assert [m["text"] for m in state["messages"]] == ["hello"]
    assert [c["id"] for c in state["conversations"]] == ["c1"]
    assert chat.app.post.streams.get("chat/c2") is None


BAD = {
    '{"id": "m1", "text": "x", "status": "done"}': "unknown field `status`",
    '{"id": "m1", "text": "x", "attempts": 0}': "unknown field `attempts`",
    '{"text": "x"}': "missing required field `id`",
    '{"id": "m1"}': "missing required field `text`",
    '{"id": "M 1", "text": "x"}': "matching regex",
    '{"id": "m1", "text": ""}': "length >= 1",
    '{"id": "m1", "text": "  \\n"}': "needs a text",
    '{"id": "m1", "text": "a\\u0000b"}': "without NUL",
    '{"id": "m1", "text": "\\ud800"}': "A message is",
    '{"id": "m1", "text": 1}': "Expected `str`, got `int`",
    '["m1", "x"]': "Expected `object`, got `array`",
    "id=m1": "A message is",
    "": "A message is",
}


async def test_a_message_is_an_id_and_a_text(chat: Chat) -> None:
    """Anything else in a message is refused with a sentence, and nothing of it is written."""
    for body, said in BAD.items():
        answer = await chat.client.post("/conversations/c1/messages", content=body)
        assert answer.status_code == 422, body
        assert said in answer.json()["error"], body
    assert (await chat.say("x" * 4_001)).status_code == 422
    assert (await chat.say("x" * 70_000)).status_code == 413
    assert (await chat.say("x", to="C1")).status_code == 422
    assert (await chat.client.get("/events", params={"after": "x"})).status_code == 422
    assert (await chat.state())["messages"] == []


async def test_nobody_elses_page_may_say_anything(chat: Chat) -> None:
    """What another site's page sends is refused, and so is a name that somebody else pointed at this machine."""
    body = {"id": "m1", "text": "hello"}
    foreign = await chat.client.post("/conversations/c1/messages", json=body, headers={"origin": "http://evil.example"})
    assert foreign.status_code == 403
    assert (await chat.client.post("/worker/kill", headers={"origin": "null"})).status_code == 403
    assert (await chat.client.get("http://evil.example:8000/")).status_code == 400
    own = {"origin": "http://127.0.0.1:8000"}
    assert (await chat.client.post("/conversations/c1/messages", json=body, headers=own)).status_code == 201


async def test_the_page_runs_no_code_but_its_own(chat: Chat) -> None:
    """The page, its script and its style come from here, under a policy that allows no other."""
    for path in ("/", "/page.js", "/page.css"):
        answer = await chat.client.get(path)
        assert answer.status_code == 200
        assert "default-src 'none'; script-src 'self'" in answer.headers["content-security-policy"]
    assert "innerHTML" not in (EXAMPLE / "page.js").read_text("utf-8")


async def test_a_turn_orders_the_list(chat: Chat) -> None:
    """A turn's commit brings its conversation to the top of the list and counts its reply as unread."""
    await chat.say("first", to="c1", id="m1")
    await chat.say("second", to="c2", id="m2")
    await chat.drain()
    await chat.say("again", to="c1", id="m3")
    await chat.drain()
    listed = (await chat.state(None))["conversations"]
    assert [(c["id"], c["unread"]) for c in listed] == [("c1", 2), ("c2", 1)]
    assert (await chat.client.post("/conversations/c1/seen")).status_code == 204
    assert [c["unread"] for c in (await chat.state(None))["conversations"]] == [0, 1]


async def test_a_turn_whose_rows_fail_has_no_reply(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the app writes in a turn's commit and the reply are there together or not at all."""
    whole = chat.rows.answered

    def half(conn: Any, **given: Any) -> None:
        whole(conn, **given)
        raise RuntimeError("the disk is full")

    monkeypatch.setattr(chat.rows, "answered", half)
    await chat.say("hello")
    async with asyncio.timeout(WAIT_SECONDS):
        while (row := chat.app.post.streams.get("chat/c1")).state != "backing_off":
            await chat.app.post.adrain()
    state = await chat.state()
    assert (row.version, state["conversations"][0]["unread"], state["messages"][0]["status"]) == (0, 0, "open")
    monkeypatch.setattr(chat.rows, "answered", whole)
    await chat.drain()
    assert [kind for kind, _ in await chat.log()] == ["message", "reply"]


async def test_quick_messages_are_one_turn(chat: Chat) -> None:
    """Twenty messages in a row get one reply."""
    for number in range(20):
        await chat.say(f"message {number}", id=f"m{number}")
    await chat.drain()
    assert [kind for kind, _ in await chat.log()] == ["message"] * 20 + ["reply"]


class Held:
    """A model that answers when it may."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.may = asyncio.Event()

    async def answer(self, turn: Turn, texts: list[str]) -> str:
        self.asked.set()
        await self.may.wait()
        return "an answer"


async def test_deleting_in_the_middle_of_a_turn_creates_nothing_again(
    chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversation that is deleted while its turn runs is gone, and so is whatever the turn and clients do later."""
    model = Held()
    monkeypatch.setattr(chat.app, "answer", model.answer)
    await chat.say("hello")
    async with asyncio.timeout(WAIT_SECONDS):
        drained = asyncio.create_task(chat.drain())
        await model.asked.wait()
        assert (await chat.client.delete("/conversations/c1")).status_code == 204
        model.may.set()
        await drained
    again = await chat.say("hello")
    assert (again.status_code, again.json()) == (410, {"error": "This conversation was deleted."})
    assert (await chat.client.post("/conversations/c1/stop")).status_code == 410
    assert (await chat.client.delete("/conversations/c1")).status_code == 204
    assert await chat.told() == [("deleted", {})]
    assert (await chat.state(None))["conversations"] == []
    assert chat.app.texts(["m1"]) == {}


async def test_stopping_withdraws_what_waits_and_ends_what_runs(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a stop the running turn has no reply, what waited shows as stopped, and what comes later is answered."""
    model = Held()
    monkeypatch.setattr(chat.app, "answer", model.answer)
    await chat.say("runs", id="m1")
    async with asyncio.timeout(WAIT_SECONDS):
        drained = asyncio.create_task(chat.drain())
        await model.asked.wait()
        await chat.say("waits", id="m2")
        assert (await chat.client.post("/conversations/c1/stop")).status_code == 204
        model.may.set()
        await drained
    await chat.say("later", id="m3")
    await chat.drain()
    log = await chat.log()
    assert ("reply", "an answer") in log[-2:]
    assert [kind for kind, _ in log].count("reply") == 1
    assert ("message", ["runs"]) in log
    assert ("message", ["waits"]) not in log
    assert "postroad.interrupted" in [kind for kind, _ in log]
    left = (await chat.state())["messages"]
    assert {m["text"]: (m["status"], m["place"]) for m in left}["waits"] == ("stopped", None)


async def test_a_turn_at_its_cap_is_shown_as_failed(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that no attempt could answer is shown with the error, and the next one is answered."""

    async def busy(turn: Turn, texts: list[str]) -> str:
        raise RetryLater("the model is down")

    with (
        monkeypatch.context() as patched,
        Harness(chat.app.post, database=chat.url, start="2035-01-01T00:00Z") as harness,
    ):
        patched.setattr(chat.app, "answer", busy)
        with chat.app.post.begin() as tx:
            tx.write(lambda conn: chat.rows.accept(conn, conversation="c1", id="m1", said="hello", now="2035"))
            tx.publish("chat/c1", chat.app.MESSAGE, {"id": "m1"}, key="m1")
        await harness.aadvance(600)
    assert await chat.log() == [("postroad.failed", ["hello"])]
    (failed,) = [entry for name, entry in await chat.told() if name == "entry"]
    assert failed["data"]["reason"] == "turn.dead.max_attempts"
    assert failed["data"]["error"] == "the model is down"


async def test_nobody_thinks_once_the_worker_is_gone(chat: Chat) -> None:
    """Half a lease after a worker was heard of last the page is told that it is lost, until another one may begin."""
    with Harness(chat.app.post, database=chat.url) as harness:
        with chat.app.post.begin() as tx:
            tx.publish("chat/c1", chat.app.MESSAGE, {"id": "m1"}, key="m1")
        harness.clock.advance(1)
        chat.app.post.database.transact(
            queues.claim, stream_type="chat", token="dead", limit=9, batch=9, lease=4 * SECOND
        )
        told = []
        for _ in range(4):
            told.append(chat.feed.standing("c1", 7).state["turn"])
            harness.clock.advance(1.5)
    assert told == ["running", "running", "lost", "waiting"]


async def test_a_page_that_comes_again_misses_and_repeats_nothing(chat: Chat) -> None:
    """The stream goes on behind the entry that the page has seen last, as its parameter or its browser says."""
    await chat.say("one", id="m1")
    await chat.drain()
    seqs = [entry["seq"] for name, entry in await chat.told() if name == "entry"]
    assert seqs == [1, 2]
    await chat.say("two", id="m2")
    await chat.drain()
    assert [entry["seq"] for name, entry in await chat.told(after=2) if name == "entry"] == [3, 4]
    assert await chat.told(after=9) == [("reset", {})]  # it has seen more than there is: another database
    asked: list[int] = []

    async def nothing(conversation: str, after: int, *_: object) -> AsyncIterator[Any]:
        asked.append(after)
        for event in ():
            yield event

    chat.feed.events = nothing
    await chat.client.get("/events", params={"conversation": "c1", "after": 1})
    await chat.client.get("/events", params={"conversation": "c1", "after": 1}, headers={"last-event-id": "3"})
    assert asked == [1, 3]


async def test_words_come_before_the_reply(chat: Chat) -> None:
    """What the running turn says is told as it grows, and the reply takes its place."""
    sys.modules["model"].WORD_SECONDS = 0.05
    await chat.say("what's the weather in Rome?")
    drained = asyncio.create_task(chat.drain())
    found = await chat.told(until="entry")
    await drained
    texts = [data["text"] for name, data in found if name == "partial"]
    assert texts
    assert texts == sorted(texts)
    assert texts[-1].startswith("Let me look")
    assert "running" in [data["turn"] for name, data in found if name == "state"]
    assert await chat.log() == [
        ("message", ["what's the weather in Rome?"]),
        ("reply", "Let me look out of the window. Done: 19 degrees and dry in Rome."),
    ]


ACTS = {
    "label this urgent": ("label urgent", 1),
    "charge 5 euros": ("charge 5 euros, key ", 1),
    "send a mail to ann@example.com": ("mail to ann@example.com: Hello", 1),
}


@pytest.mark.parametrize("text", ACTS)
async def test_what_a_turn_did_is_not_done_again(chat: Chat, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn that fails inside its tool runs again if its effect allows that; the world is changed once in any case."""
    happen, failing = chat.tools.happen, [True]

    async def cut_off(line: str, *, once: bool) -> None:
        await happen(line, once=once)
        if failing:
            failing.clear()
            raise ConnectionError("cut off in the middle")

    monkeypatch.setattr(chat.tools, "happen", cut_off)
    await chat.say(text)
    await chat.drain()
    line, times = ACTS[text]
    assert [one.startswith(line) for one in chat.tools.world()] == [True] * times
    entries = [entry for name, entry in await chat.told() if name == "entry"]
    if "mail" not in text:
        assert [entry["kind"] for entry in entries] == ["message", "reply"]
        return
    assert [entry["kind"] for entry in entries] == ["message", "postroad.interrupted"]
    (call,) = entries[1]["data"]["operations"]
    assert (call["tool"], call["effect"], call["status"]) == ("send_mail", "unsafe", "failed")


async def test_a_real_model_answers_by_setting(open_chat: Callable[[], Chat], monkeypatch: pytest.MonkeyPatch) -> None:
    """With POSTROAD_CHAT_MODEL a Pydantic AI model answers, and calls the app's tools."""
    monkeypatch.setenv("POSTROAD_CHAT_MODEL", "test")  # of Pydantic AI's own: it calls every tool once
    chat = open_chat()
    async with chat.client:
        await chat.say("hello")
        await chat.drain()
        kinds = [entry["kind"] for name, entry in await chat.told() if name == "entry"]
    assert kinds == ["message", "pydantic_ai.messages", "reply"]
    assert len(chat.tools.world()) == 3
