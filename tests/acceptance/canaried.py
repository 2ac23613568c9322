"""An app in which everything is secret, and a canary in each of the places: what it does, and where a canary may be."""

import base64
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from sqlalchemy import select

from postroad.store.database import Database
from postroad.store.schema import PREFIX, metadata
from tests.transports.receivers import Receiver, answers, receiving_beside, silent

MODULE = "canary_shop"
APP = """
import os

from postroad import Argv, GiveUp, Kind, OutcomeUnknown, Postroad, Retry, RetryLater, Webhook

ONCE = Retry(attempts=1)
HERE = {here!r}
post = Postroad(schema={schema!r}, migrate=True)
tokens = {{}}


def send(d):
    tokens[d.key] = d.ack_token
    match d.to:
        case "later":
            raise RetryLater("not now", after=3600)
        case "never":
            raise GiveUp("no such mailbox")
        case "unsure":
            raise OutcomeUnknown("the line went dead")
        case "breaks":
            raise ValueError("it broke")
        case "odd":
            return 5


post.sender("call", retry=Retry(attempts=2, first=3600, jitter=False), on_unknown="park")(send)
post.sender("once", retry=ONCE)(send)
post.transport("run", Argv({python!r}, HERE + "/program.py", "--", "{{to}}", env=("CANARY",)), timeout=2, retry=ONCE)
post.transport("missing", Argv("/no/such/program", "--", "{{to}}", env=("CANARY",)), retry=ONCE)
hook = Webhook(secret=os.environ["HOOK"], headers={{"authorization": os.environ["HEADER"]}}, allow_private=True)
post.transport("hook", hook, timeout=1, retry=ONCE)
post.elsewhere("elsewhere")


@post.turn("chat", attempts=1)
def chat(t):
    for event in t.events:
        if event.kind == "breaks":
            raise ValueError("the turn broke")
        if event.kind == "ask":
            t.send("call", {{"secret": os.environ["BODY"]}}, to="fine", key=event.key, ack=True)
"""
# While it runs it looks at all processes; what it was given it keeps where only the test looks.
PROGRAM = """
import glob, os, sys, time

here, to = os.path.dirname(os.path.abspath(__file__)), sys.argv[-1]
with open(here + "/given", "ab") as given:
    given.write(sys.stdin.buffer.read() + os.environ["CANARY"].encode() + b"\\n")
with open(here + "/processes", "ab") as processes:
    for name in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            processes.write(open(name, "rb").read() + b"\\n")
        except OSError:
            pass
if to == "stays":
    time.sleep(60)
if to == "fails":
    sys.stderr.write("unknown profile")
    sys.exit(3)
print("done")
"""


@dataclass
class Shop:
    """The app's place, and the canaries by what they are in."""

    place: dict[str, Any]
    folder: Path
    canaries: dict[str, str]

    def spelt(self, name: str) -> tuple[str, ...]:
        """How a canary may be written."""
        text = self.canaries[name]
        return tuple({text, quote(text), json.dumps(text)[1:-1], base64.b64encode(text.encode()).decode().rstrip("=")})

    def hits(self, text: str, *without: str) -> list[str]:
        """The canaries that are in a text."""
        return [name for name in self.canaries if name not in without and any(one in text for one in self.spelt(name))]

    def stored(self, database: Database) -> dict[str, set[str]]:
        """The columns of all our tables in which each canary is."""
        found: dict[str, set[str]] = {name: set() for name in self.canaries}
        with database.engine.connect() as conn:
            bound = conn.execution_options(schema_translate_map={None: database.schema})
            for table in metadata.sorted_tables:
                for row in bound.execute(select(table)).mappings():
                    for column, value in row.items():
                        for name in self.hits(str(value)):
                            found[name].add(f"{table.name.removeprefix(PREFIX)}.{column}")
        return found


def canary(name: str) -> str:
    """A text that is in nothing else."""
    return f"c4nary-{name}-" + base64.b32encode(name.encode()).decode().rstrip("=").lower()


def open_shop(place: dict[str, Any], folder: Path, patch: pytest.MonkeyPatch) -> Shop:
    """Write the app, and put a canary into each setting that it reads."""
    (folder / "program.py").write_text(PROGRAM)
    (folder / f"{MODULE}.py").write_text(
        APP.format(here=str(folder), schema=place.get("schema"), python=sys.executable)
    )
    names = ["key", "former", "hook", "header", "env", "body", "query", "user"]
    names += ["password"] if "schema" in place else []  # a file has none
    canaries = {name: canary(name) for name in names}
    hook = "whsec_" + base64.b64encode(canaries["hook"].ljust(32, "=").encode()).decode()
    canaries |= {"hook": hook.removeprefix("whsec_").rstrip("=")}
    url = place["database"]
    if "schema" in place:
        url = url.replace("postgres@", f"postgres:{quote(canaries['password'])}@")
        assert canaries["password"] in url
    given = {
        "POSTROAD_DATABASE_URL": url, "POSTROAD_SECRET_KEY": canaries["key"], "CANARY": canaries["env"],
        "POSTROAD_SECRET_KEYS_FORMER": json.dumps([canaries["former"]]), "HOOK": hook, "HEADER": canaries["header"],
        "BODY": canaries["body"],
    }  # fmt: skip
    if "schema" in place:
        given["POSTROAD_SCHEMA"] = place["schema"]
    for name, value in given.items():
        patch.setenv(name, value)
    patch.chdir(folder)
    patch.syspath_prepend(str(folder))
    patch.delitem(sys.modules, MODULE, raising=False)
    return Shop(place, folder, canaries)


@contextmanager
def receivers() -> Iterator[list[Receiver]]:
    """Webhooks that take it, fail, are gone, and never answer."""
    behaviours = (answers(204), answers(500, b"it broke"), answers(410), silent)
    with ExitStack() as stack:
        yield [stack.enter_context(receiving_beside(behave)) for behave in behaviours]
