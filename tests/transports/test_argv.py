"""The argv transport against real programs."""

import asyncio
import gc
import json
import os
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postroad import Argv, GiveUp, InvalidInput, Receipt, RetryLater
from postroad.model.dispatches import Dispatch
from postroad.transports.envelope import envelope

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
ECHO = "import sys, json; print(json.dumps(sys.argv[1:]))"


def dispatch(to: str = "ann", raw: str = '{"n":1}', **more: Any) -> Dispatch[Any]:
    about: dict[str, Any] = {
        "id": "0" * 32, "key": "k", "kind": "note", "to": to, "body": json.loads(raw), "raw": raw, "attempt": 3,
        "created_at": NOW, "first_attempt_at": NOW, "deadline": NOW, "possible_duplicate": True, "post": None,
        "ack_token": "canary-token", **more,
    }  # fmt: skip
    return Dispatch(**about)


def python(code: str, *arguments: str, **more: Any) -> Argv:
    return Argv(sys.executable, "-c", code, *arguments, **more)


def sent(argv: Argv, *, seconds: float = 20, **about: Any) -> Receipt | None:
    async def send() -> Receipt | None:
        async with asyncio.timeout(seconds):
            return await argv.send(dispatch(**about))

    return asyncio.run(send())


def gone(pid: int) -> bool:
    """Whether a process is gone, or a zombie that nobody of ours has to reap."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 10
    while not gone(pid):
        assert time.monotonic() < deadline, f"process {pid} is alive"
        time.sleep(0.01)


@pytest.fixture
def script(tmp_path: Path) -> Any:
    """Makes an executable file with a text."""

    def make(text: str, mode: int = 0o755) -> str:
        path = tmp_path / "program"
        path.write_text(text)
        path.chmod(mode)
        return str(path)

    return make


def test_the_envelope_comes_on_stdin(tmp_path: Path) -> None:
    """The program reads the whole envelope: the body's bytes as they were accepted, and this attempt's number."""
    raw = '{"b":  1.50, "a": "ü"}'
    out = tmp_path / "out"
    sent(python(f"import sys; open({str(out)!r}, 'wb').write(sys.stdin.buffer.read())"), raw=raw)
    read = out.read_bytes()
    assert raw.encode() in read
    said = json.loads(read)
    assert (said["schema_version"], said["attempt"], said["possible_duplicate"]) == (2, 3, True)
    assert (said["dispatch_id"], said["key"], said["ack_token"]) == ("0" * 32, "k", "canary-token")
    assert said["created_at"] == "2026-01-02T03:04:05.000000Z"


def test_the_first_line_is_the_receipt() -> None:
    """What a program prints first names the receipt; one that prints nothing has none."""
    assert sent(python("print(' ref-7 '); print('more')")) == Receipt("ref-7")
    assert sent(python("pass")) is None


@settings(max_examples=25, deadline=None)
@given(to=st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40) | st.sampled_from(
    ["-rf", "--help", "--", "- item", "@file", "a\nb", "$(id)", "`id`", "; id", "*", "", " "]
))  # fmt: skip
def test_data_are_whole_arguments(to: str) -> None:
    """Whatever `to` is, the program gets the template's arguments and that one, unchanged."""
    receipt = sent(python(ECHO, "--", "{to}", "fixed"), to=to)
    assert receipt is not None
    assert json.loads(receipt.reference) == ["--", to, "fixed"]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys; sys.exit(3)", "exit 3"),
        ("import sys; sys.exit('no such user')", "no such user (exit 1)"),
        ("import os; os.kill(os.getpid(), 11)", "killed by SIGSEGV"),
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        ("import sys; sys.stderr.buffer.write(b'\\xff\\xfe\\xb2\\0 \\xe2\\x82'); sys.exit(3)", "\ufffd"),
    ],
)
def test_a_failure_says_why(code: str, said: str) -> None:
    """An exit code, a signal, what stderr says; bytes that are no text are replaced."""
    with pytest.raises(RetryLater) as caught:
        sent(python(code))
    assert said in caught.value.reason
    caught.value.reason.encode()
    assert "\0" not in caught.value.reason


def test_a_long_complaint_is_cut() -> None:
    """The end of stderr is kept, 2,000 characters at the most."""
    with pytest.raises(RetryLater) as caught:
        sent(python("import sys; sys.stderr.write('x' * 3_000_000 + 'the cause'); sys.exit(1)"))
    assert caught.value.reason.endswith("the cause (exit 1)")
    assert len(caught.value.reason) <= 2_000


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        (None, 0, "no such program"),
        ("#!/bin/sh\nexit 0\n", 0o644, "not be executed"),
        ("no program\n", 0o755, "no program"),
        ("#!/no/such/interpreter\n", 0o755, "interpreter"),
    ],
)
def test_what_cannot_be_started_is_a_failed_attempt(script: Any, text: str | None, mode: int, said: str) -> None:
    """A program that is missing or broken is named, and tried again."""
    program = "/no/such/program" if text is None else script(text, mode)
    with pytest.raises(RetryLater, match=said) as caught:
        sent(Argv(program))
    assert program in caught.value.reason


def test_arguments_that_are_too_long() -> None:
    """What the system takes no argument of is a failure that says so; a NUL or a huge payload never goes."""
    with pytest.raises(RetryLater, match="too long"):
        sent(python(ECHO, "--", "{to}"), to="x" * 3_000_000)
    with pytest.raises(GiveUp, match="NUL"):
        sent(python(ECHO, "--", "{to}"), to="a\0b")
    with pytest.raises(GiveUp, match="bytes"):
        sent(python(ECHO, "--", "{payload}", payload_in_argv=True), raw=json.dumps("x" * 98_304))


def test_a_payload_as_argument_has_no_token() -> None:
    """Asked for on purpose, the envelope is an argument, without what others must not read; stdin is empty."""
    code = "import sys; print(sys.argv[2] + '|' + sys.stdin.read())"
    receipt = sent(python(code, "--", "{payload}", payload_in_argv=True))
    assert receipt is not None
    said, _, stdin = receipt.reference.partition("|")
    assert json.loads(said)["ack_token"] is None
    assert stdin == ""


def test_secrets_are_in_no_command_line(tmp_path: Path) -> None:
    """While a program runs, no process of this machine shows the payload or the token in its arguments."""
    ready, go = tmp_path / "ready", tmp_path / "go"
    code = (
        f"import pathlib, time\npathlib.Path({str(ready)!r}).touch()\n"
        f"while not pathlib.Path({str(go)!r}).exists(): time.sleep(.01)"
    )
    thread = threading.Thread(target=lambda: sent(python(code), raw='{"s":"canary-payload"}'))
    thread.start()
    while not ready.exists():
        assert thread.is_alive()
        time.sleep(0.01)
    shown = b"".join(_read(path) for path in Path("/proc").glob("[0-9]*/cmdline"))
    go.touch()
    thread.join()
    assert b"canary" not in shown


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_the_environment_is_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program sees what is allowed, and none of our descriptors."""
    monkeypatch.setenv("DATABASE_URL", "secret")
    monkeypatch.setenv("NOTIFY_HOME", "yes")
    receipt = sent(python("import os, json; print(json.dumps(sorted(os.environ)))", env=["NOTIFY_HOME"]))
    assert receipt is not None
    names = set(json.loads(receipt.reference))
    assert "NOTIFY_HOME" in names
    assert "DATABASE_URL" not in names
    leak = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(leak, True)
    receipt = sent(python("import os, json; print(json.dumps(sorted(map(int, os.listdir('/proc/self/fd')))))"))
    os.close(leak)
    assert receipt is not None
    assert set(json.loads(receipt.reference)) <= {0, 1, 2, 3}


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.stdout.write('x' * 1_000_000); sys.stdout.flush(); assert len(sys.stdin.read()) > 1_000_000",
        "pass",
        "import os, time; os.close(0); time.sleep(.2)",
        "import sys; [sys.stdout.write('x' * 1_000_000) for _ in range(200)]",
    ],
    ids=["writes before it reads", "reads nothing", "closes stdin", "200 MB"],
)
def test_pipes_never_hold_anybody_up(code: str) -> None:
    """The exit code decides, whatever a program does with a megabyte on stdin and its own output."""
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sent(python(code), raw=json.dumps("y" * 1_000_000))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


def test_a_grandchild_that_holds_the_pipes(tmp_path: Path) -> None:
    """A program's end is the end: what it left behind in its group is killed."""
    pid = tmp_path / "pid"
    argv = Argv("sh", "-c", f"sleep 300 & echo $! > {pid}; exit 0")
    begun = time.monotonic()
    sent(argv)
    assert time.monotonic() - begun < 10
    wait_until_gone(int(pid.read_text()))


def test_a_grandchild_with_pipes_of_its_own(tmp_path: Path) -> None:
    """One that holds nothing of ours is killed with the group too."""
    pid = tmp_path / "pid"
    sent(Argv("sh", "-c", f"sleep 300 < /dev/null > /dev/null 2>&1 & echo $! > {pid}"))
    wait_until_gone(int(pid.read_text()))


def test_a_timeout_kills_the_group(tmp_path: Path) -> None:
    """A program that is not done in time is killed with its children, at once."""
    pid = tmp_path / "pid"
    with pytest.raises(TimeoutError):
        sent(Argv("sh", "-c", f"trap '' TERM; sleep 300 & echo $$ $! > {pid}; sleep 300"), seconds=1)
    for number in pid.read_text().split():
        wait_until_gone(int(number))


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ((), "program"), (("",), "program"), ((" ",), "program"), ((3,), "program"), (("a\0",), "NUL"),
        (("{to}",), "--"), (("say", "{to}"), "--"), (("say", "--", "x{to}"), "whole"), (("say", "--to={to}"), "whole"),
        (("say", "--", "{body}"), "stands for nothing"), (("say", "--", "{payload}"), "stdin"),
    ],
)  # fmt: skip
def test_a_command_that_is_none_is_refused(command: Any, said: str) -> None:
    """What is wrong with a command is said where it is declared."""
    with pytest.raises(InvalidInput, match=said) as caught:
        Argv(*command)
    assert caught.value.field == "command"


@pytest.mark.parametrize(("name", "value"), [("env", "PATH"), ("env", ["A=B"]), ("cwd", "here"), ("cwd", "/a\0")])
def test_an_option_that_is_none_is_refused(name: str, value: Any) -> None:
    """The same for its options."""
    about: Any = {name: value}
    with pytest.raises(InvalidInput) as caught:
        Argv("say", **about)
    assert caught.value.field == name


def test_a_thousand_sends_leave_nothing() -> None:
    """No descriptor, child or task is left behind, in whatever thread the loop runs."""
    argv = Argv("true")

    async def many() -> None:
        for _ in range(20):
            await asyncio.gather(*(argv.send(dispatch()) for _ in range(10)))

    asyncio.run(many())
    gc.collect()
    before = len(os.listdir("/proc/self/fd")), children()
    thread = threading.Thread(target=lambda: asyncio.run(many()))
    thread.start()
    thread.join()
    gc.collect()
    assert (len(os.listdir("/proc/self/fd")), children()) == before


def children() -> set[str]:
    """The children of this process, zombies too, whichever thread has started them."""
    return {pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}


def test_an_envelope_without_its_token() -> None:
    """All else stays."""
    whole, part = json.loads(envelope(dispatch())), json.loads(envelope(dispatch(), with_token=False))
    assert part == {**whole, "ack_token": None}
