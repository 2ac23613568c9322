"""A canary in every secret, token and payload of an app that does everything and fails in every way.

What is looked through: logs at DEBUG, what observers are told, errors, stderr, what every command answers to people and
to programs, the process list while a program runs, and all columns of all tables. Where a canary may be is said here,
and must be found there: a canary that was never planted would not be missed.
"""

import importlib
import logging
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from postroad import Kind, Postroad, PostroadError
from postroad.surfaces import cli
from tests.acceptance.canaried import MODULE, Shop, open_shop, receivers
from tests.engine.conftest import place

__all__ = ["place"]

ANY: Kind[Any] = Kind("any", Any)
REFERENCE = f"{MODULE}:post"
# A dispatch's body is stored and shown where one dispatch is looked at; its destination is what an operator chooses by.
STORED = {
    "body": {"outbox.body"},
    "query": {"outbox.destination", "audit.before"},
    "user": {"outbox.destination", "audit.before"},
}
CALLS = ("fine", "later", "never", "unsure", "breaks", "odd")
SHOWING: tuple[tuple[str, ...], ...] = (
    ("status",), ("config",), ("config", REFERENCE), ("doctor", REFERENCE), ("migrate", "status"),
    ("migrate", "verify"), ("stream", "show", "chat/1"),
    ("dispatch", "why", "hook/0"),
    ("dispatch", "why", "call/breaks", "--app", REFERENCE), ("dispatch", "why", "run/stays"),
    ("dispatch", "why", "no such"), ("dispatch", "resolve", "hook/3", "--sent"),
    ("dispatch", "resolve", "call/unsure", "--sent"), ("dispatch", "withdraw", "elsewhere"),
    ("dispatch", "retry", "once/breaks"), ("dispatch", "retry", "hook/1"), ("dispatch", "retry", "hook/5"),
    ("dispatch", "retry", "run/stays", "--reason", "asked to"),
    ("dispatch", "replay", "call/never"), ("dispatch", "retry", "--kind", "call"), ("dispatch", "purge", "run/fails"),
    ("dispatch", "purge", "--status", "delivered", "--history"),
)  # fmt: skip
# These show destinations, which hold a query, and `show` the body too.
LISTING: tuple[tuple[str, ...], ...] = (
    ("dispatch", "ls"), ("dispatch", "ls", "--kind", "hook"), ("dispatch", "retry", "--kind", "hook", "--dry-run"),
    ("dispatch", "purge", "--kind", "hook", "--dry-run"),
)  # fmt: skip
WHOLE: tuple[tuple[str, ...], ...] = (
    ("dispatch", "show", "hook/4"), ("dispatch", "show", "hook/1", "--app", REFERENCE),
    ("dispatch", "show", "run/stays"), ("dispatch", "show", "missing", "--body"),
)  # fmt: skip


def send_everything(shop: Shop, post: Postroad, urls: Sequence[str]) -> None:
    """Whatever can be sent, by every way, to what takes it and what does not."""
    body, user, query = ({"secret": shop.canaries["body"]}, shop.canaries["user"], shop.canaries["query"])
    hooks = [*(f"{url}?token={query}" for url in urls), f"http://127.0.0.1:9/{query}", f"http://{user}@127.0.0.1/"]
    with post.begin() as tx:
        for to in CALLS:
            tx.send("call", body, to=to, key=f"call/{to}", ack=True)
        tx.send("once", body, to="breaks", key="once/breaks", ack=True)
        for to in ("works", "fails", "stays"):
            tx.send("run", body, to=to, key=f"run/{to}", ack=to == "works")
        for number, url in enumerate(hooks):
            tx.send("hook", body, to=url, key=f"hook/{number}", ack=number == 0)
        tx.send("missing", body, to="ann", key="missing")
        tx.send("elsewhere", body, to="ann", key="elsewhere")
        tx.publish("chat/1", "ask", {}, key="asked")
        tx.publish("chat/2", "breaks", {})


def refused(post: Postroad, *tokens: str) -> list[str]:
    """The errors of tokens that acknowledge nothing, in all their parts."""
    said = []
    for token in tokens:
        with pytest.raises(PostroadError) as refusal, post.begin() as tx:
            tx.ack(token)
        said.append(f"{refusal.value} {refusal.value!r} {refusal.value.about} {refusal.value.__context__!r}")
    return said


def command(*arguments: str, given: str | None = None) -> str:
    """All that a command says, on both of its streams, and what it raised."""
    done = CliRunner().invoke(cli.app, [*arguments], input=given)
    assert "Traceback" not in done.output, done.output
    assert done.exit_code in (0, 1, 2), arguments
    return f"{done.output} {done.stderr} {done.exception!r}"


def said_by(commands: Sequence[tuple[str, ...]]) -> str:
    """What commands say to programs and to people; those that change something find less to do the second time."""
    return "\n".join(command(*one, *more) for one in commands for more in (("--json",), ()))


def ran() -> str:
    """What a process says that carries out what operators had sent again: it fails in most of the ways once more."""
    done = subprocess.run(
        [sys.executable, "-m", "postroad", "run", REFERENCE, "--once"], capture_output=True, check=False, timeout=60,
        env={**os.environ, "POSTROAD_BUNDLED_SQLITE": "1"},
    )  # fmt: skip
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, said
    assert "it broke" in said
    return said


def acknowledged(shop: Shop, tokens: Sequence[str]) -> str:
    """What `postroad ack` says to true, forged, late and former tokens, from stdin and as an argument."""
    forged = tokens[0][:-2] + "__"
    said = [command("ack", "--app", REFERENCE, given=token) for token in (*tokens, forged, "no token")]
    said += [command("ack", "--json", given=token) for token in (tokens[0], forged)]
    return "\n".join([*said, command("ack", tokens[1])])


@pytest.fixture
def shop(place: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    """The app, on either database."""
    return open_shop(place, tmp_path, monkeypatch)


@pytest.mark.acceptance
def test_no_secret_is_ever_shown(
    shop: Shop, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Keys, secrets, variables, passwords and tokens are nowhere; bodies and destinations where they belong."""
    caplog.set_level(logging.DEBUG)
    app: Any = importlib.import_module(MODULE)
    post, observed = app.post, list[str]()

    def watch(name: str, values: Mapping[str, Any]) -> None:
        observed.append(f"{name} { {key: value for key, value in values.items() if key != 'dispatch'} }")

    post.observe(watch)
    with receivers() as found:
        send_everything(shop, post, [receiver.url for receiver in found])
        drained = post.drain()
        assert (drained.delivered, drained.dead_letter) == (4, 11), drained
        requests = repr([receiver.requests for receiver in found])
    shop.canaries |= {f"token of {key}": token.rpartition(".")[2] for key, token in app.tokens.items()}
    tokens = [app.tokens[f"call/{to}"] for to in CALLS]
    errors = refused(post, tokens[0][:-2] + "__", app.tokens["call/never"])
    hidden = [said_by(SHOWING), ran(), acknowledged(shop, tokens), *errors, *observed]
    listed, whole = said_by(LISTING), said_by(WHOLE)
    hidden += [caplog.text, "".join(capfd.readouterr())]
    check_what_was_given(shop, requests)
    found_in = {line: shop.hits(line) for text in hidden for line in text.splitlines() if shop.hits(line)}
    assert found_in == {}
    assert shop.hits(listed) == ["query", "user"]
    assert shop.hits(whole) == ["body", "query"]
    stored = shop.stored(post.database)
    post.close()
    assert {name: columns for name, columns in stored.items() if columns} == STORED


def check_what_was_given(shop: Shop, requests: str) -> None:
    """Those whom it concerns got their secrets; other processes saw none."""
    given = (shop.folder / "given").read_text()
    assert {"env", "body"} <= set(shop.hits(given))
    assert {"header", "body", "query"} <= set(shop.hits(requests))
    assert re.search(r"'webhook-signature': 'v1,", requests)
    processes = (shop.folder / "processes").read_text(errors="replace")
    assert "program.py" in processes
    assert shop.hits(processes) == []
