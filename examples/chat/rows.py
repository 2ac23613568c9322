"""The app's own tables: conversations and messages. Plain functions over a connection; whoever calls them commits."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, bindparam, text

TABLES = (
    "create table if not exists chat_conversations ("
    "id text primary key, title text not null, updated text not null, unread integer not null)",
    "create table if not exists chat_messages ("
    "id text primary key, conversation text not null, text text not null, sent text not null, status text not null)",
    "create index if not exists chat_messages_of_conversations on chat_messages (conversation, status)",
)
# A message is `open` until the turn that answers it commits, or until the user stops the conversation.
OPEN, ANSWERED, STOPPED = "open", "answered", "stopped"
TITLE_CHARS_MAX = 40


class OtherMessage(Exception):
    """This id belongs to another message."""


def written(moment: datetime) -> str:
    """A moment as it is stored: texts in the order of time."""
    return moment.isoformat(timespec="microseconds")


def create(conn: Connection) -> None:
    """Make the tables if they are not there."""
    for statement in TABLES:
        conn.execute(text(statement))


def accept(conn: Connection, *, conversation: str, id: str, said: str, now: str) -> None:
    """Write a message, and its conversation if it is new. The same once more changes nothing.

    Raises:
        OtherMessage: The id is taken by a message that says something else.
    """
    values = {"conversation": conversation, "id": id, "said": said, "now": now, "status": OPEN}
    conn.execute(
        text("insert into chat_conversations values (:conversation, :title, :now, 0) on conflict (id) do nothing"),
        {"conversation": conversation, "title": " ".join(said.split())[:TITLE_CHARS_MAX], "now": now},
    )
    conn.execute(
        text("insert into chat_messages values (:id, :conversation, :said, :now, :status) on conflict (id) do nothing"),
        values,
    )
    found = conn.execute(text("select conversation, text from chat_messages where id = :id"), {"id": id}).one()
    if found != (conversation, said):
        raise OtherMessage(id)


def answered(conn: Connection, *, conversation: str, ids: Sequence[str], now: str) -> None:
    """What a turn writes: its messages are answered, and its conversation is the newest, with one more to read."""
    conn.execute(
        text("update chat_messages set status = :status where id in :ids").bindparams(bindparam("ids", expanding=True)),
        {"status": ANSWERED, "ids": list(ids)},
    )
    conn.execute(
        text("update chat_conversations set updated = :now, unread = unread + 1 where id = :conversation"),
        {"now": now, "conversation": conversation},
    )


def stopped(conn: Connection, *, conversation: str) -> None:
    """Whatever is not answered by now is not going to be."""
    conn.execute(
        text("update chat_messages set status = :stopped where conversation = :conversation and status = :open"),
        {"stopped": STOPPED, "open": OPEN, "conversation": conversation},
    )


def seen(conn: Connection, *, conversation: str) -> None:
    """The user has read everything."""
    conn.execute(text("update chat_conversations set unread = 0 where id = :id"), {"id": conversation})


def delete(conn: Connection, *, conversation: str) -> None:
    """Delete a conversation with its messages."""
    conn.execute(text("delete from chat_messages where conversation = :id"), {"id": conversation})
    conn.execute(text("delete from chat_conversations where id = :id"), {"id": conversation})


def conversations(conn: Connection) -> list[dict[str, Any]]:
    """The conversations, the one with the latest reply first."""
    found = conn.execute(text("select id, title, unread from chat_conversations order by updated desc, id limit 200"))
    return [dict(row) for row in found.mappings()]


def unanswered(conn: Connection, conversation: str) -> list[dict[str, Any]]:
    """The messages of a conversation that no turn has answered, oldest first."""
    found = conn.execute(
        text(
            "select id, text, sent, status from chat_messages where conversation = :id and status <> :answered "
            "order by sent, id"
        ),
        {"id": conversation, "answered": ANSWERED},
    )
    return [dict(row) for row in found.mappings()]


def texts(conn: Connection, ids: Sequence[str]) -> dict[str, str]:
    """What messages say, by their ids; those that are gone are left out."""
    statement = text("select id, text from chat_messages where id in :ids").bindparams(bindparam("ids", expanding=True))
    return {row.id: row.text for row in conn.execute(statement, {"ids": list(ids)})}
