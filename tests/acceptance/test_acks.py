"""Consumers acknowledge over HTTP, and people by the command; both as others would use them."""

import asyncio
import json
import os
import pty
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fastapi
import httpx
import pytest
from sqlalchemy import event
from starlette.applications import Starlette
from starlette.routing import Mount, Route

from postroad import Kind, Postroad, Retry, asgi
from postroad.asgi import AckEndpoint
from tests import postgres_server

SECRET = "a secret of the server's own"
MAIL: Kind[dict[str, str]] = Kind("mail", dict[str, str])
FORM = "application/x-www-form-urlencoded"
OK = (200, b'{"ok":true}')
NOTHING = b'{"ok":false,"error":{"kind":"not_found","message":"This token acknowledges nothing."}}'


def app(url: str, schema: str | None = None) -> Postroad:
    """An app that asks for acknowledgements."""
    post = Postroad(url, schema=schema, secret_key=SECRET, migrate=True)
    post.sender(MAIL, retry=Retry(attempts=1, first=0, jitter=False))(lambda d: None)
    return post


@pytest.fixture(params=["sqlite", "postgres"])
def post(request: pytest.FixtureRequest) -> Iterator[Postroad]:
    """An app on either database."""
    if request.param == "sqlite":
        made = app(f"sqlite:///{request.getfixturevalue('sqlite_path')}")
    else:
        made = app(request.getfixturevalue("postgres_url"), request.getfixturevalue("fresh_schema"))
    yield made
    made.close()


def send(post: Postroad, key: str = "k", **more: Any) -> str:
    """Send a mail that asks for an acknowledgement; its token."""
    with post.begin() as tx:
        accepted = tx.send(MAIL, {}, key=key, **{"ack": True, **more})
    return post.keyring.token(accepted.id, 0)


def status(post: Postroad, key: str = "k") -> str:
    row = post.dispatches.get(key)
    assert row is not None
    return row.status


def client(served: Any) -> httpx.AsyncClient:
    """A client of an ASGI app in this process."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(served), base_url="http://shop")


async def answered(served: Any, method: str = "POST", path: str = "/", **request: Any) -> tuple[int, bytes]:
    """Status and body of the answer to one request."""
    async with client(served) as http:
        answer = await http.request(method, path, **request)
    return answer.status_code, answer.content


WAYS: Mapping[str, Callable[[str], dict[str, Any]]] = {
    "bearer": lambda token: {"headers": {"Authorization": f"Bearer {token}"}},
    "bearer and a body": lambda token: {"headers": {"Authorization": f"bearer  {token} "}, "json": {"any": "thing"}},
    "json": lambda token: {"json": {"token": token, "more": 1}},
    "form": lambda token: {"data": {"token": token, "more": "1"}},
    "text": lambda token: {"content": f" {token}\n", "headers": {"Content-Type": "text/plain; charset=utf-8"}},
}


@pytest.mark.parametrize("way", WAYS)
async def test_a_consumer_acknowledges(post: Postroad, way: str) -> None:
    """A token in the header or the body acknowledges, and once more gets the very same answer."""
    request = WAYS[way](send(post))
    endpoint = AckEndpoint(post)
    assert await answered(endpoint, **request) == OK
    assert status(post) == "acked"
    assert await answered(endpoint, **request) == OK


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "OPTIONS"])
async def test_only_a_post_acknowledges(post: Postroad, method: str) -> None:
    """A link that a scanner follows, or any method but POST, acknowledges nothing wherever the token is."""
    token = send(post)
    async with client(AckEndpoint(post)) as http:
        answer = await http.request(method, f"/?token={token}", headers={"Authorization": f"Bearer {token}"})
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert status(post) == "pending"


async def test_a_token_in_the_url_counts_for_nothing(post: Postroad) -> None:
    """A POST with its token in the query or the path has no token: URLs stand in logs."""
    token = send(post)
    for path in (f"/?token={token}", f"/{token}"):
        assert (await answered(AckEndpoint(post), path=path))[0] == 400
    assert status(post) == "pending"


async def test_what_must_not_be_told_apart(post: Postroad) -> None:
    """An unknown dispatch, one that asked for no ack and a bad token get one answer, after the same look."""
    token, plain = send(post), send(post, "plain", ack=False)
    wrongs = {
        "unknown": post.keyring.token("0" * 32, 0),
        "not asked for": plain,
        "of another epoch": post.keyring.token(token.split(".")[1], 1),
        "forged": token[:-2] + "__",
        "of another key": f"00000000.{token.partition('.')[2]}",
    }
    looks: dict[str, list[str]] = {}
    found = []
    for what, wrong in wrongs.items():
        said: list[str] = looks.setdefault(what, [])

        def note(_conn: Any, _cursor: Any, statement: str, *_: Any, said: list[str] = said) -> None:
            said.append(statement)

        event.listen(post.database.engine, "before_cursor_execute", note)
        async with client(AckEndpoint(post)) as http:
            answer = await http.post("/", json={"token": wrong})
        event.remove(post.database.engine, "before_cursor_execute", note)
        found.append((answer.status_code, answer.content, dict(answer.headers)))
    assert found == [found[0]] * len(wrongs)
    assert found[0][:2] == (404, NOTHING)
    assert list(looks.values()) == [looks["unknown"]] * len(wrongs)
    assert sum("FROM" in statement for statement in looks["unknown"]) == 1
    assert not [s for s in looks["unknown"] if "UPDATE" in s or "IMMEDIATE" in s]
    assert await answered(AckEndpoint(post), json={"token": "no token"}) == (404, NOTHING)
    assert (status(post), status(post, "plain")) == ("pending", "pending")


async def test_too_late(post: Postroad) -> None:
    """Who presents a true token of what has ended otherwise is told so, with the reason and since when."""
    token = send(post)
    with post.begin() as tx:
        tx.withdraw("k")
    code, body = await answered(AckEndpoint(post), json={"token": token})
    error = json.loads(body)["error"]
    assert (code, error["kind"]) == (409, "conflict")
    assert "It is expired by dispatch.expired.withdrawn since 20" in error["message"]
    assert token not in body.decode()
    detail = error["detail"]
    assert detail.pop("refused") == {error["message"]: 1}
    assert detail.pop("since") in error["message"]
    row = post.dispatches.get("k")
    assert row is not None
    assert detail == {"dispatch": row.id, "status": "expired", "reason": "dispatch.expired.withdrawn"}


WRONG: list[tuple[int, dict[str, Any]]] = [
    (400, {}),
    (400, {"content": "", "headers": {"Content-Type": "application/json"}}),
    (400, {"content": "{", "headers": {"Content-Type": "application/json"}}),
    (400, {"json": {"tokens": "x"}}),
    (400, {"json": {"token": 7}}),
    (400, {"json": ["token"]}),
    (400, {"data": {"tokens": "x"}}),
    (400, {"content": "token=a&token=b", "headers": {"Content-Type": FORM}}),
    (400, {"content": b"\xff", "headers": {"Content-Type": "text/plain"}}),
    (400, {"content": "&".join("abcdefghijkl"), "headers": {"Content-Type": FORM}}),
    (415, {"content": "x"}),
    (415, {"content": "<token/>", "headers": {"Content-Type": "text/xml"}}),
    (413, {"content": "x" * 4097, "headers": {"Content-Type": "text/plain"}}),
    (413, {"content": "x" * 4097, "headers": {"Authorization": "Bearer x", "Content-Length": "9" * 30}}),
    (404, {"content": "x" * 4096, "headers": {"Content-Type": "text/plain"}}),
    (400, {"content": "token", "headers": {"Authorization": "Basic eA==", "Content-Type": FORM}}),
]


@pytest.mark.parametrize(("code", "request_"), WRONG)
async def test_a_request_that_is_not_as_it_should_be(sqlite_path: Path, code: int, request_: dict[str, Any]) -> None:
    """What has no token, another form, or more than 4 KiB is refused with what is wrong, as JSON."""
    post = app(f"sqlite:///{sqlite_path}")
    found, body = await answered(AckEndpoint(post), **request_)
    assert (found, json.loads(body)["ok"]) == (code, False)
    post.close()


async def test_a_body_that_never_ends_is_cut_off(sqlite_path: Path) -> None:
    """A body without a length is read up to the bound, and no further."""
    read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal read
        while True:
            read += 1
            yield b"x" * 1000

    post = app(f"sqlite:///{sqlite_path}")
    messages = endless()
    sent: list[Mapping[str, Any]] = []

    async def receive() -> Mapping[str, Any]:
        return {"type": "http.request", "body": await anext(messages), "more_body": True}

    async def answer(message: Mapping[str, Any]) -> None:
        sent.append(message)

    await AckEndpoint(post)({"type": "http", "method": "POST", "headers": []}, receive, answer)
    assert (sent[0]["status"], read) == (413, 5)


@pytest.mark.parametrize("waits", [False, True])
async def test_a_client_that_leaves_or_waits(sqlite_path: Path, monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    """Who leaves in the middle of the body gets no answer; who sends none of it for too long gets 408."""
    monkeypatch.setattr(asgi, "BODY_SECONDS_MAX", 0.01)
    sent: list[Any] = []

    async def receive() -> Mapping[str, Any]:
        if waits:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def answer(message: Mapping[str, Any]) -> None:
        sent.append(message.get("status"))

    endpoint = AckEndpoint(app(f"sqlite:///{sqlite_path}"))
    await endpoint({"type": "http", "method": "POST", "headers": []}, receive, answer)
    assert sent == ([408, None] if waits else [])


async def test_the_database_is_away(own_postgres: postgres_server.Own) -> None:
    """While the database is away an ack is answered by 503, and afterwards the same request is the ack."""
    post = app(own_postgres.url)
    token = send(post)
    own_postgres.crash()
    async with client(AckEndpoint(post)) as http:
        away = await http.post("/", json={"token": token})
        assert (away.status_code, away.headers["retry-after"]) == (503, "1")
        assert away.json()["error"]["kind"] == "unavailable"
        own_postgres.start()
        back = await http.post("/", json={"token": token})
    assert (back.status_code, status(post)) == (200, "acked")
    post.close()


async def test_a_database_that_was_never_there() -> None:
    """An endpoint whose database cannot be reached from the start answers 503, and no traceback."""
    post = Postroad("postgresql://nobody@127.0.0.1:1/nothing", secret_key=SECRET)
    token = post.keyring.token("0" * 32, 0)
    assert (await answered(AckEndpoint(post), json={"token": token}))[0] == 503


async def test_it_is_mounted_in_frameworks(post: Postroad) -> None:
    """A route of FastAPI, and a mount of Starlette: the endpoint is an ASGI app like any other."""
    api = fastapi.FastAPI()
    api.router.routes.append(Route("/acks", AckEndpoint(post)))
    site = Starlette(routes=[Mount("/in", AckEndpoint(post))])
    assert await answered(api, path="/acks", json={"token": send(post)}) == OK
    assert (await answered(api, "GET", "/acks"))[0] == 405
    assert await answered(site, path="/in/", json={"token": send(post, "other")}) == OK
    assert (status(post), status(post, "other")) == ("acked", "acked")


async def test_other_protocols(sqlite_path: Path) -> None:
    """A websocket is closed."""
    sent: list[Mapping[str, Any]] = []

    async def answer(message: Mapping[str, Any]) -> None:
        sent.append(message)

    async def receive() -> Mapping[str, Any]:
        raise AssertionError

    await AckEndpoint(app(f"sqlite:///{sqlite_path}"))({"type": "websocket"}, receive, answer)
    assert sent == [{"type": "websocket.close"}]


PROGRAM = """
import postroad.bundled_sqlite
from postroad import Kind, Postroad
from postroad.asgi import AckEndpoint

post = Postroad()
post.elsewhere(Kind("mail", dict))
acks = AckEndpoint(post)
"""


@contextmanager
def serving(folder: Path, **environment: str) -> Iterator["subprocess.Popen[str]"]:
    """The endpoint by itself under uvicorn, until it says what it has to say first."""
    (folder / "shop.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "uvicorn", "shop:acks", "--uds", str(folder / "http.sock")]
    with subprocess.Popen(
        command, cwd=folder, env={**os.environ, **environment}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        yield process
        process.kill()


@pytest.mark.acceptance
def test_it_is_served_by_itself(sqlite_path: Path, tmp_path: Path) -> None:
    """The endpoint by itself under a server, with its key in the environment; no token in what the server logs."""
    url = f"sqlite:///{sqlite_path}"
    post = app(url)
    token = send(post)
    with serving(tmp_path, POSTROAD_DATABASE_URL=url, POSTROAD_SECRET_KEY=SECRET) as process:
        assert process.stdout is not None
        said = ""
        while "Uvicorn running" not in said:
            line = process.stdout.readline()
            assert line, said
            said += line
        transport = httpx.HTTPTransport(uds=str(tmp_path / "http.sock"))
        with httpx.Client(transport=transport, base_url="http://shop") as http:
            for _ in range(2):
                assert http.post("/", json={"token": token}).json() == {"ok": True}
            assert http.post("/", content="x" * 5000, headers={"Content-Type": "text/plain"}).status_code == 413
        process.terminate()
        said += process.stdout.read()
    assert status(post) == "acked"
    assert "Application shutdown complete" in said
    assert said.count("POST / ") == 3
    assert token.rpartition(".")[2] not in said
    post.close()


@pytest.mark.acceptance
def test_it_is_not_served_without_a_key(sqlite_path: Path, tmp_path: Path) -> None:
    """Without a secret_key the endpoint does not start, and says where a key goes."""
    environment = {"POSTROAD_DATABASE_URL": f"sqlite:///{sqlite_path}", "POSTROAD_SECRET_KEY": ""}
    with serving(tmp_path, **environment) as process:
        assert process.stdout is not None
        said = process.stdout.read()
        assert process.wait() != 0
    assert "set POSTROAD_SECRET_KEY" in said


class Shell:
    """Somebody at a shell, next to an app's database."""

    def __init__(self, post: Postroad, folder: Path) -> None:
        database = post.database
        self.url = database.engine.url.render_as_string(hide_password=False)
        self.folder = folder
        given = {"POSTROAD_DATABASE_URL": self.url, "POSTROAD_SECRET_KEY": SECRET, "POSTROAD_BUNDLED_SQLITE": "1"}
        self.environment = {**os.environ, **given, **({"POSTROAD_SCHEMA": database.schema} if database.schema else {})}

    def ack(self, *arguments: str, typed: str = "", **environment: str) -> "subprocess.CompletedProcess[str]":
        """Run `postroad ack` with this on its stdin."""
        return subprocess.run(
            [sys.executable, "-m", "postroad", "ack", *arguments], input=typed, capture_output=True, check=False,
            timeout=60, text=True, cwd=self.folder, env={**self.environment, **environment},
        )  # fmt: skip


@pytest.fixture
def shell(post: Postroad, tmp_path: Path) -> Shell:
    """A shell in an empty folder."""
    folder = tmp_path / "shell"
    folder.mkdir()
    return Shell(post, folder)


@pytest.mark.acceptance
def test_a_person_acknowledges(post: Postroad, shell: Shell) -> None:
    """`postroad ack` reads the token from stdin; once more is the same success; no loop runs."""
    token = send(post)
    for _ in range(2):
        done = shell.ack(typed=f"{token}\n")
        assert (done.returncode, done.stdout, done.stderr) == (0, f"acknowledged {token.split('.')[1]}\n", "")
    assert status(post) == "acked"
    answer = json.loads(shell.ack("--json", typed=token).stdout)
    assert answer == {
        "ok": True, "contract_version": 1, "data": {"dispatch": token.split(".")[1]}, "error": None,
    }  # fmt: skip


@pytest.mark.acceptance
def test_a_token_as_an_argument_is_warned_of(post: Postroad, shell: Shell) -> None:
    """A token on the command line works, with a warning on stderr that does not repeat it."""
    token = send(post)
    done = shell.ack(token)
    assert (done.returncode, status(post)) == (0, "acked")
    assert "list of processes" in done.stderr
    assert "history" in done.stderr
    assert token.rpartition(".")[2] not in done.stderr + done.stdout


@pytest.mark.acceptance
def test_what_the_command_answers_when_it_cannot(post: Postroad, shell: Shell) -> None:
    """Each refusal has its kind and exit code, in words and as JSON, and shows no token."""
    token, plain, late = send(post), send(post, "plain", ack=False), send(post, "late")
    with post.begin() as tx:
        tx.withdraw("late")
    expected = [
        (token[:-2] + "__", 2, "invalid_input", "acknowledges nothing"),
        ("", 2, "invalid_input", "acknowledges nothing"),
        ("x" * 10_000, 2, "invalid_input", "acknowledges nothing"),
        (post.keyring.token("0" * 32, 0), 1, "not_found", "no such dispatch"),
        (plain, 1, "conflict", "asked for no acknowledgement"),
        (late, 1, "conflict", "dispatch.expired.withdrawn"),
    ]
    for typed, code, kind, said in expected:
        done = shell.ack("--json", typed=typed)
        answer = json.loads(done.stdout)
        assert (done.returncode, answer["error"]["kind"]) == (code, kind)
        assert said in answer["error"]["message"]
        assert not typed or typed.rpartition(".")[2] not in done.stdout + done.stderr
    done = shell.ack(typed=late)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("postroad: This dispatch can no longer be acknowledged. It is expired by")
    assert [status(post, key) for key in ("k", "plain", "late")] == ["pending", "pending", "expired"]


@pytest.mark.acceptance
def test_the_command_needs_the_key(post: Postroad, shell: Shell) -> None:
    """Without a key the command says where one goes; `--app` takes it, and the database, from the app's code."""
    token = send(post)
    done = shell.ack(typed=token, POSTROAD_SECRET_KEY="")
    assert done.returncode == 2
    assert "POSTROAD_SECRET_KEY" in done.stderr
    code = f"from postroad import Postroad\npost = Postroad({shell.url!r}, secret_key={SECRET!r})\n"
    (shell.folder / "shop.py").write_text(code)
    done = shell.ack("--app", "shop:post", typed=token, POSTROAD_SECRET_KEY="", POSTROAD_DATABASE_URL="")
    assert (done.returncode, done.stderr) == (0, "")
    assert status(post) == "acked"


@pytest.mark.acceptance
def test_a_token_that_is_typed_is_not_seen(post: Postroad, shell: Shell) -> None:
    """At a terminal the command asks for the token and shows nothing of it."""
    token = send(post)
    outside, inside = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "postroad", "ack"], stdin=inside, stdout=inside, stderr=inside, cwd=shell.folder,
        env=shell.environment, start_new_session=True,
    ) as process:  # fmt: skip
        os.close(inside)
        seen = b""
        while b"token:" not in seen:
            seen += os.read(outside, 1000)
        os.write(outside, token.encode() + b"\n")
        while b"acknowledged" not in seen:
            seen += os.read(outside, 1000)
        assert process.wait(30) == 0
    os.close(outside)
    assert token.rpartition(".")[2].encode() not in seen
    assert status(post) == "acked"


@pytest.mark.acceptance
def test_the_command_makes_no_database(tmp_path: Path) -> None:
    """Pointed at a file that is not there the command says so, and there is none afterwards."""
    place = tmp_path / "none.db"
    done = subprocess.run(
        [sys.executable, "-m", "postroad", "ack", "--database", f"sqlite:///{place}"],
        input=f"00000000.{'0' * 32}.{'a' * 43}", capture_output=True, check=False, timeout=60, text=True,
        cwd=tmp_path, env={**os.environ, "POSTROAD_SECRET_KEY": SECRET, "POSTROAD_BUNDLED_SQLITE": "1"},
    )  # fmt: skip
    assert done.returncode == 1
    assert "none.db" in done.stderr
    assert not place.exists()
