"""A newcomer adds Postroad to an existing FastAPI and SQLAlchemy app."""

import difflib
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import psycopg
import pytest
from sqlalchemy import create_engine, make_url, text

from postroad import Postroad

pytestmark = pytest.mark.acceptance

BEFORE = """
import os
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

engine = create_async_engine(os.environ["DATABASE_URL"])
sessions = async_sessionmaker(engine, expire_on_commit=False)


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    email: Mapped[str]


async def session() -> AsyncIterator[AsyncSession]:
    async with sessions.begin() as session:
        yield session


Db = Annotated[AsyncSession, Depends(session, scope="function")]
app = FastAPI()


@app.post("/orders")
async def place(db: Db, email: str) -> int:
    order = Order(email=email)
    db.add(order)
    await db.flush()
    if "@" not in email:
        raise HTTPException(422, "not an address")
    return order.id


@app.get("/orders")
async def list_orders(db: Db) -> list[str]:
    return list(await db.scalars(select(Order.email)))
"""

AFTER = """
import os
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from postroad import Dispatch, Kind, Postroad

engine = create_async_engine(os.environ["DATABASE_URL"])
sessions = async_sessionmaker(engine, expire_on_commit=False)
post = Postroad(os.environ["DATABASE_URL"])
MAIL = Kind("mail", dict[str, str])


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    email: Mapped[str]


async def session() -> AsyncIterator[AsyncSession]:
    async with sessions.begin() as session:
        yield session


Db = Annotated[AsyncSession, Depends(session, scope="function")]
app = FastAPI(lifespan=post.lifespan)


@post.sender(MAIL)
async def send_mail(d: Dispatch[dict[str, str]]) -> None:
    print(f"{d.to}: {d.body['subject']} ({d.key})", flush=True)


@app.post("/orders")
async def place(db: Db, email: str) -> int:
    order = Order(email=email)
    db.add(order)
    await db.flush()
    async with post.join(db) as tx:
        tx.send(MAIL, {"subject": "Thanks"}, to=email, key=f"order/{order.id}/thanks")
    if "@" not in email:
        raise HTTPException(422, "not an address")
    return order.id


@app.get("/orders")
async def list_orders(db: Db) -> list[str]:
    return list(await db.scalars(select(Order.email)))
"""


def added(before: str, after: str) -> list[str]:
    """The lines with something in them that a program gained; a changed one counts."""
    found = difflib.ndiff(before.splitlines(), after.splitlines())
    return [line[2:] for line in found if line.startswith("+ ") and line[2:].strip()]


def test_postroad_is_added_in_ten_lines() -> None:
    """An existing app becomes one with an outbox by at most ten new or changed lines."""
    assert len(added(BEFORE, AFTER)) <= 10, added(BEFORE, AFTER)


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of the app's database, with its own table in it; on Postgres `postroad migrate` has run."""
    if request.param == "sqlite":
        path = tmp_path / "app.db"
        with closing(sqlite3.connect(path)) as conn:
            conn.execute("create table orders (id integer primary key, email text not null)")
        return f"sqlite+aiosqlite:///{path}"
    schema, server = request.getfixturevalue("fresh_schema"), request.getfixturevalue("postgres_url")
    found = make_url(server).update_query_dict({"options": f"-csearch_path={schema}"})
    with psycopg.connect(server.replace("+psycopg", "", 1), autocommit=True) as conn:
        conn.execute(f'create schema "{schema}"')
        conn.execute(f'create table "{schema}".orders (id serial primary key, email text not null)')
    post = Postroad(found.render_as_string(hide_password=False), migrate=True)
    post.check_schema()
    post.close()
    return found.render_as_string(hide_password=False)


class Server:
    """The app under uvicorn in a process of its own, with a client."""

    def __init__(self, process: subprocess.Popen[str], client: httpx.Client) -> None:
        self.process = process
        self.client = client

    def order(self, email: str) -> int:
        """Place an order; its number."""
        return int(self.client.post("/orders", params={"email": email}).raise_for_status().json())

    def mail(self) -> str:
        """The next mail that the app sends; waits for it."""
        assert self.process.stdout is not None
        while "(order/" not in (line := self.process.stdout.readline()):
            assert line, "the server ended before it sent"
        return line.strip()

    def end(self) -> str:
        """End it as a supervisor would; what it still printed."""
        self.process.terminate()
        return self.process.communicate(timeout=30)[0]


@contextmanager
def serving(program: str, url: str, folder: Path) -> Iterator[Server]:
    """The program, served until the block is left."""
    (folder / "shop.py").write_text("import postroad.bundled_sqlite\n" + program)
    socket = folder / "http.sock"
    command = [sys.executable, "-m", "uvicorn", "shop:app", "--uds", str(socket)]
    with (
        subprocess.Popen(
            command, cwd=folder, env={**os.environ, "DATABASE_URL": url}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as process,
        httpx.Client(transport=httpx.HTTPTransport(uds=str(socket)), base_url="http://shop") as client,
    ):  # fmt: skip
        assert process.stderr is not None
        while "Uvicorn running" not in (line := process.stderr.readline()):
            assert line, "the server ended before it served"
        try:
            yield Server(process, client)
        finally:
            if process.poll() is None:
                process.terminate()
                process.communicate(timeout=30)


def kept(url: str) -> list[tuple[str, str]]:
    """(key, status) of every dispatch in the database, read by another process's connection."""
    engine = create_engine(url.replace("+aiosqlite", ""))
    with engine.connect() as conn:
        rows = conn.execute(text("select key, status from postroad_outbox order by created_at")).all()
    engine.dispose()
    return [tuple(row) for row in rows]


def test_the_mail_goes_out_after_the_commit_and_only_then(url: str, tmp_path: Path) -> None:
    """An order that commits sends its mail; one that rolls back leaves no order, no dispatch and no mail."""
    with serving(AFTER, url, tmp_path) as server:
        assert server.order("ann@example.com") == 1
        assert server.client.get("/orders").json() == ["ann@example.com"]
        assert server.mail() == "ann@example.com: Thanks (order/1/thanks)"
        assert server.client.post("/orders", params={"email": "nobody"}).status_code == 422
        assert server.client.get("/orders").json() == ["ann@example.com"]
        last = server.order("bob@example.com")
        assert server.mail() == f"bob@example.com: Thanks (order/{last}/thanks)"  # nobody's would have come first
        assert "Thanks" not in server.end()
    assert kept(url) == [("order/1/thanks", "delivered"), (f"order/{last}/thanks", "delivered")]


def test_what_was_accepted_is_sent_by_the_next_process(url: str, tmp_path: Path) -> None:
    """A mail that was committed while no loop ran goes out when the app starts."""
    with serving(AFTER.replace("lifespan=post.lifespan", ""), url, tmp_path) as server:
        server.order("ann@example.com")
        assert kept(url) == [("order/1/thanks", "pending")]
    with serving(AFTER, url, tmp_path) as server:
        assert server.mail() == "ann@example.com: Thanks (order/1/thanks)"
