"""An operator's session: the dispatch commands with every loop down, on both databases.

Sessions are made of processes; what single commands answer is asked of the same command line in this process.
"""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from postroad import Dispatch, GiveUp, Kind, OutcomeUnknown, Postroad, Retry
from postroad.store import audit
from tests.acceptance import shell

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.filterwarnings("ignore::postroad.store.sqlite_version.SQLiteVersionWarning"),
]

MAIL: Kind[dict[str, str]] = Kind("mail", dict[str, str])
LATER: Kind[Any] = Kind("later", Any)
EVIL = "\x1b[31mred\x07\r\n\u202eevil\u2066\x9b"
APP = """
import os
from postroad import GiveUp, Kind, Postroad, Retry

post = Postroad()
MAIL = Kind("mail", dict[str, str])


@post.sender(MAIL, retry=Retry(attempts=1))
def mail(d):
    if d.to == "nobody":
        raise GiveUp("no such mailbox")
    with open("sent", "a") as sent:
        sent.write(d.key + "\\n")


post.elsewhere(Kind("later", dict))
"""


@dataclass(frozen=True)
class Place:
    """A database, and the folder in which the operator's shell stands."""

    url: str
    schema: str | None
    folder: Path
    apart: bool = False
    """Whether each command is a process of its own."""

    def call(self, *arguments: str) -> shell.Done:
        """Run a command; one that runs an app is always a process."""
        given = {"POSTROAD_DATABASE_URL": self.url, **({"POSTROAD_SCHEMA": self.schema} if self.schema else {})}
        run = shell.apart if self.apart or arguments[0] == "run" else shell.here
        return run(*arguments, folder=self.folder, environ={**os.environ, **given})

    def said(self, *arguments: str, code: int = 0) -> str:
        """What a command says to a person, wherever it says it."""
        done = self.call(*arguments)
        assert done.returncode == code, (arguments, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
        return done.stdout if code == 0 else done.stderr

    def answer(self, *arguments: str, code: int = 0) -> Any:
        """What a command answers to a program: its data, or its error."""
        done = self.call(*arguments, "--json")
        assert done.returncode == code, (arguments, done.stdout, done.stderr)
        document = json.loads(done.stdout)
        assert list(document) == ["ok", "contract_version", "data", "error"]
        assert (document["ok"], document["contract_version"]) == (code == 0, 1)
        if code == 0:
            assert document["error"] is None
            return document["data"]
        assert (document["data"], list(document["error"])) == (None, ["kind", "message", "detail"])
        return document["error"]

    def sent(self) -> list[str]:
        """The keys that an app's sender was called with."""
        path = self.folder / "sent"
        return path.read_text().split() if path.exists() else []

    def audited(self) -> list[tuple[str, str, str, str]]:
        """Who did what to what, and why; oldest first."""
        post = Postroad(self.url, schema=self.schema)
        rows = post.database.read(audit.list_)
        post.close()
        return [(row.action, row.subject, row.actor, row.reason) for row in reversed(rows)]


@pytest.fixture(params=["sqlite", "postgres"])
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A database without any dispatch."""
    (tmp_path / "shop.py").write_text(APP)
    if request.param == "sqlite":
        place = Place(f"sqlite:///{request.getfixturevalue('sqlite_path')}", None, tmp_path)
    else:
        place = Place(request.getfixturevalue("postgres_url"), request.getfixturevalue("fresh_schema"), tmp_path)
    post = Postroad(place.url, schema=place.schema, migrate=True)
    post.check_schema()
    post.close()
    return place


def send(d: Dispatch[dict[str, str]]) -> None:
    if d.to == "nobody":
        raise GiveUp("no such mailbox")
    if d.to == "perhaps":
        raise OutcomeUnknown("the connection broke")


@pytest.fixture
def place(empty: Place) -> Place:
    """Dispatches that were delivered, died, are parked and wait; no loop runs any more."""
    post = Postroad(empty.url, schema=empty.schema)
    post.sender(MAIL, retry=Retry(attempts=1), on_unknown="park")(send)
    post.elsewhere(LATER)
    with post.begin() as tx:
        tx.send(MAIL, {"subject": "x" * 3000}, to="ann", key="good/1", origin={"session": "7"})
        for n in range(1, 4):
            tx.send(MAIL, {}, to="nobody", key=f"bad/{n}")
        for n in range(1, 4):
            tx.send(MAIL, {}, to="perhaps", key=f"parked/{n}")
        tx.send(LATER, {}, to=EVIL, key="waits/1")
    post.drain()
    post.close()
    return empty


def test_a_session_with_every_loop_down(place: Place) -> None:
    """An operator finds what died, sees why, has it sent again, and the next loop sends it."""
    place = replace(place, apart=True)
    listed = place.said("dispatch", "ls", "--status", "dead_letter", "--reason-code", "permanent")
    head, *rows = listed.splitlines()
    assert head.split() == ["key", "kind", "to", "status", "attempt", "due", "created", "last", "error"]
    assert sorted(row.split()[0] for row in rows) == ["bad/1", "bad/2", "bad/3"]
    assert "no such mailbox" in place.said("dispatch", "why", "bad/1")
    shown = place.said("dispatch", "show", "bad/1")
    for part in ("Dead by dispatch.dead_letter.permanent", "attempts", "history", "no such mailbox", "body (2 bytes)"):
        assert part in shown
    assert place.said("dispatch", "retry", "bad/1", "--actor", "ann", "--reason", "route fixed") == (
        "bad/1 was retried\n"
    )
    again = place.answer("dispatch", "show", "bad/1")
    assert (again["status"], again["attempt"], again["epoch"], again["last_error"]) == ("pending", 0, 1, None)
    assert again["history"][-1]["actor"] == "ann"
    assert place.audited() == [("dispatch.retry", again["id"], "ann", "route fixed")]
    assert place.said("dispatch", "withdraw", "waits/1") == "waits/1 was withdrawn\n"
    assert place.said("dispatch", "purge", "good/1") == "good/1 was purged\n"
    assert place.sent() == []
    once = place.said("run", "shop:post", "--once")
    assert [line.split() for line in once.splitlines()[:6]] == [
        ["attempted", "1"], ["delivered", "0"], ["dead", "letter", "1"], ["expired", "0"], ["retried", "0"],
        ["stale", "0"],
    ]  # fmt: skip


def test_an_empty_outbox(empty: Place) -> None:
    """Without dispatches a list says so, and a filter that fits nothing has done its work."""
    assert empty.said("dispatch", "ls") == "(no dispatches)\n"
    assert empty.answer("dispatch", "ls") == []
    nothing = {"found": 0, "done": 0, "said": "no dispatch fits", "refused": {}, "id": None, "sample": []}
    for verb in ("retry", "withdraw", "purge"):
        assert empty.answer("dispatch", verb, "--kind", "mail") == nothing


CHANGES = [("retry",), ("replay",), ("resolve", "--sent"), ("withdraw",), ("purge",)]
EACH = [("ls",), *((verb, "k", *options) for verb, *options in [("show",), ("why",), *CHANGES])]


@pytest.mark.parametrize("command", [("show",), ("why",), *CHANGES], ids=" ".join)
def test_a_missing_dispatch(empty: Place, command: tuple[str, ...]) -> None:
    """What is not there is exit code 1 and kind not_found, for every command."""
    error = empty.answer("dispatch", command[0], "nothing", *command[1:], code=1)
    assert (error["kind"], error["detail"]) == ("not_found", {"dispatch": "nothing"})
    assert "nothing" in empty.said("dispatch", command[0], "nothing", *command[1:], code=1)


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (("retry", "good/1"), "it is delivered; only dead_letter and expired can be retried"),
        (("replay", "waits/1"), "it is pending: it is still to be sent"),
        (("resolve", "bad/1", "--discard"), "only what may have arrived"),
        (("withdraw", "good/1"), "too late: it is delivered"),
        (("purge", "waits/1"), "it is pending, and not finished"),
    ],
)
def test_what_cannot_be_done_is_a_conflict(place: Place, command: tuple[str, ...], why: str) -> None:
    """A verb that comes too late or does not fit says what there is, with exit code 1 and kind conflict."""
    error = place.answer("dispatch", *command, code=1)
    assert error["kind"] == "conflict"
    assert why in error["message"]
    assert why in place.said("dispatch", *command, code=1)
    assert place.audited() == []


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("purge",), "--status"),
        (("purge", "--force", "--history"), "--status"),
        (("retry",), "--status"),
        (("withdraw", "--dry-run"), "--status"),
        (("purge", "good/1", "--status", "delivered"), "not both"),
        (("purge", "--status", "pending"), "can be purged"),
        (("retry", "--status", "delivered"), "can be retried"),
        (("resolve", "parked/1"), "--sent, --resend"),
        (("resolve", "parked/1", "--sent", "--discard"), "--sent, --resend"),
        (("ls", "--status", "gone"), "status"),
        (("ls", "--since", "yesterday"), "since"),
        (("ls", "--origin", "x"), "origin"),
        (("ls", "--after", "x"), "after"),
        (("retry", "bad/1", "--expires", "soon"), "expires"),
        (("retry", "--kind", "mail", "--rate", "0"), "rate"),
        (("retry", "bad/1", "--actor", ""), "actor"),
        (("show",), "ID_OR_KEY"),
    ],
)
def test_wrong_use_says_what_to_give(place: Place, command: tuple[str, ...], said: str) -> None:
    """Wrong use is exit code 2 and kind invalid_input, names what is wrong, and changes nothing."""
    error = place.answer("dispatch", *command, code=2)
    assert error["kind"] == "invalid_input"
    assert said in error["message"]
    assert place.audited() == []


def test_all_that_a_filter_names(place: Place) -> None:
    """A dry run counts and shows; the command does it, spread over time, and audits it once; parked ones stay."""
    dry = place.answer("dispatch", "retry", "--kind", "mail", "--dry-run")
    assert (dry["found"], dry["done"], dry["said"]) == (6, 0, "3 of 6 would be retried")
    assert {row["key"] for row in dry["sample"]} == {f"{what}/{n}" for what in ("bad", "parked") for n in (1, 2, 3)}
    assert "body" not in dry["sample"][0]
    assert "bad/1" in place.said("dispatch", "retry", "--kind", "mail", "--dry-run")
    done = place.answer("dispatch", "retry", "--kind", "mail", "--rate", "1", "--actor", "ann", "--reason", "up again")
    assert (done["found"], done["done"]) == (6, 3)
    assert done["refused"] == {"its reason is dispatch.dead_letter.unknown_outcome, which has to be named": 3}
    assert place.audited() == [("dispatch.retry", "kind=mail", "ann", "up again")]
    due = sorted(row["due_at"] for row in place.answer("dispatch", "ls", "--key", "bad/"))
    assert len(set(due)) == 3
    assert place.answer("dispatch", "retry", "--kind", "mail", code=1)["kind"] == "conflict"
    assert place.said("dispatch", "withdraw", "--status", "pending", "--to", "nobody") == "3 of 3 were withdrawn\n"
    purged = place.answer("dispatch", "purge", "--before", "0s", "--status", "expired")
    assert (purged["found"], purged["done"]) == (3, 3)
    assert place.answer("dispatch", "ls", "--key", "bad/") == []


def test_what_may_have_arrived_is_resolved(place: Place) -> None:
    """A parked dispatch is resolved in three ways; the list of what still waits for a person gets shorter."""
    process = replace(place, apart=True)
    parked = ("dispatch", "ls", "--reason-code", "unknown_outcome", "--json")
    assert "then resolve it with --sent, --resend or --discard" in place.said("dispatch", "why", "parked/1")
    for number, how in enumerate(("sent", "resend", "discard"), 1):
        assert process.said("dispatch", "resolve", f"parked/{number}", f"--{how}") == (
            f"parked/{number} was resolved ({how})\n"
        )
        assert len(json.loads(place.said(*parked))["data"]) == 3 - number
    assert "arrived" in place.answer("dispatch", "retry", "parked/1", code=1)["message"]
    assert place.answer("dispatch", "retry", "parked/1", "--force")["done"] == 1
    assert place.answer("dispatch", "show", "parked/2")["status"] == "pending"
    assert "discarded" in place.said("dispatch", "why", "parked/3")


def test_a_replay_is_a_new_dispatch(place: Place) -> None:
    """A replay says which one it is, and can be found by the one that it repeats."""
    done = place.answer("dispatch", "replay", "good/1", "--key", "good/1/again")
    old = place.answer("dispatch", "show", "good/1")
    [new] = place.answer("dispatch", "ls", "--origin", f"replay_of={old['id']}")
    assert (new["id"], new["key"], new["status"]) == (done["id"], "good/1/again", "pending")
    assert new["origin"] == {"session": "7", "replay_of": old["id"]}
    assert place.answer("dispatch", "replay", "good/1", "--key", "good/1/again", code=1)["kind"] == "conflict"


def test_a_body_is_shown_in_part_and_in_whole(place: Place) -> None:
    """`show` gives a body's first 2,000 characters with its size, `--body` all of it; a list never any."""
    cut, whole = place.answer("dispatch", "show", "good/1"), place.answer("dispatch", "show", "good/1", "--body")
    assert (len(cut["body"]), cut["body_size"], len(whole["body"])) == (2000, 3014, 3014)
    assert json.loads(whole["body"]) == {"subject": "x" * 3000}
    assert "body (3014 bytes, the first 2000 characters)" in place.said("dispatch", "show", "good/1")
    assert "body" not in place.answer("dispatch", "ls")[0]


def test_an_app_tells_what_it_knows(place: Place) -> None:
    """With --app the retry horizon and what the app takes are told; its senders are not called."""
    assert place.answer("dispatch", "show", "bad/1", "--app", "shop:post")["horizon_seconds"] == 10.0
    assert "carries out no dispatches of it" in place.said("dispatch", "why", "waits/1", "--app", "shop:post")
    assert "no dispatcher has taken kind later" in place.said("dispatch", "why", "waits/1")
    assert place.answer("dispatch", "why", "waits/1", "--app", "shop:none", code=2)["kind"] == "invalid_input"
    assert place.sent() == []


def test_a_list_goes_on_where_it_ended(place: Place) -> None:
    """Pages are taken by a row's cursor, which the table tells too."""
    keys: list[str] = []
    cursor: list[str] = []
    while page := place.answer("dispatch", "ls", "--limit", "3", *cursor):
        keys += [row["key"] for row in page]
        cursor = ["--after", page[-1]["cursor"]]
    assert len(keys) == len(set(keys)) == 8
    first = place.said("dispatch", "ls", "--limit", "3")
    assert first.splitlines()[-1].startswith("There may be more: --after ")


def test_nothing_from_outside_reaches_the_terminal_raw(place: Place) -> None:
    """Control and bidirectional characters in destinations, keys, actors and reasons are escapes."""
    place.said("dispatch", "retry", "bad/1", "--actor", f"ann{EVIL}", "--reason", f"because{EVIL}")
    for command in (
        ("ls",), ("show", "waits/1"), ("show", "bad/1"), ("why", "waits/1"), ("purge", "--kind", "later", "--dry-run"),
        ("purge", "--kind", "later", "--dry-run", "--force"),
    ):  # fmt: skip
        shown = place.said("dispatch", *command)
        assert not set(shown) & (set(EVIL) - set("redvil[31m\n")), command
    assert "ann\\x1b[31mred" in place.said("dispatch", "show", "bad/1")
    assert "Not found. No dispatch" in place.said("dispatch", "purge", f"no{EVIL}", code=1)


@pytest.mark.parametrize("command", EACH, ids=" ".join)
def test_a_schema_that_does_not_fit_is_one_line(command: tuple[str, ...], tmp_path: Path) -> None:
    """On a file that is not ours every command says so in one line, and leaves it as it is."""
    path = tmp_path / "other.db"
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as conn:
        conn.execute(text("CREATE TABLE other (id integer)"))
    engine.dispose()
    before = path.read_bytes()
    place = Place(f"sqlite:///{path}", None, tmp_path)
    assert place.answer("dispatch", *command, code=1)["kind"] == "unavailable"
    [line] = place.said("dispatch", *command, code=1).splitlines()
    assert "postroad migrate" in line
    assert path.read_bytes() == before
    nowhere = Place(f"sqlite:///{tmp_path}/none.db", None, tmp_path)
    assert "There is no file" in nowhere.said("dispatch", *command, code=1)
    assert not (tmp_path / "none.db").exists()


def test_run_once_says_what_was_done(place: Place) -> None:
    """`run --once` works until nothing is due, says what it did in numbers, and ends; --json only goes with it."""
    place.said("dispatch", "retry", "--status", "dead_letter", "--force", "--rate", "1000000")
    counts = place.answer("run", "shop:post", "--once", "--only", "sends")
    assert list(counts)[:6] == ["attempted", "delivered", "dead_letter", "expired", "retried", "stale"]
    assert (counts["attempted"], counts["delivered"], counts["dead_letter"]) == (6, 3, 3)
    assert sorted(place.sent()) == ["parked/1", "parked/2", "parked/3"]
    assert place.answer("run", "shop:post", code=2)["kind"] == "invalid_input"
    assert place.answer("run", "shop:none", "--once", code=2)["kind"] == "invalid_input"
