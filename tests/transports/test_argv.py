"""The argv transport against real programs."""

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postroad import Argv, Dispatch, GiveUp, InvalidInput, OutcomeUnknown, Receipt, RetryLater
from postroad.testing.contracts.transports import dispatch
from postroad.transports.argv import INHERITED, UNREAD
from postroad.transports.envelope import envelope

ECHO = "import sys, json; print(json.dumps(sys.argv[1:]))"


def note(to: str = "ann", raw: str = '{"n":1}', *, seconds: float = 30, **more: Any) -> Dispatch[Any]:
    """A third attempt, which may last so long, with a token that nobody else may read."""
    deadline = datetime.now(UTC) + timedelta(seconds=seconds)
    about = {"attempt": 3, "possible_duplicate": True, "ack_token": "canary-token", "deadline": deadline, **more}
    return dispatch(to, raw=raw, body=json.loads(raw), **about)


def python(code: str, *arguments: str, **more: Any) -> Argv:
    return Argv(sys.executable, "-c", code, *arguments, **more)


def sent(argv: Argv, **about: Any) -> Receipt | None:
    return asyncio.run(argv.send(note(**about)))


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
    """The program reads the whole envelope, byte for byte, and then the end."""
    out = tmp_path / "out"
    about = note(raw='{"b":  1.50, "a": "ü"}')
    argv = python(f"import sys; open({str(out)!r}, 'wb').write(sys.stdin.buffer.read())")
    asyncio.run(argv.send(about))
    assert out.read_bytes() == envelope(about)


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


def test_arguments_that_cannot_be_handed_over() -> None:
    """What the system takes no argument of, a NUL and a huge payload are permanent, and say so."""
    with pytest.raises(GiveUp, match="too long"):
        sent(python(ECHO, "--", "{to}"), to="x" * 131_072)
    assert sent(python("import sys; print(len(sys.argv[2]))", "--", "{to}"), to="x" * 131_071) is not None
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
    shown = command_lines()
    go.touch()
    thread.join()
    assert b"canary" not in shown


def command_lines() -> bytes:
    """The arguments of every process of this machine."""
    return b"".join(_read(path) for path in Path("/proc").glob("[0-9]*/cmdline"))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended
        return b""


def test_the_environment_is_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program sees what is allowed, and none of our descriptors."""
    monkeypatch.setenv("DATABASE_URL", "secret")
    monkeypatch.setenv("NOTIFY_HOME", "yes")
    receipt = sent(python("import os, json; print(json.dumps(sorted(os.environ)))", env=["NOTIFY_HOME"]))
    assert receipt is not None
    names = set(json.loads(receipt.reference))
    assert "NOTIFY_HOME" in names
    assert {name for name in names if not name.startswith("LC_")} <= {*INHERITED, "NOTIFY_HOME"}
    leak = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(leak, True)
    receipt = sent(python("import os, json; print(json.dumps(sorted(map(int, os.listdir('/proc/self/fd')))))"))
    os.close(leak)
    assert receipt is not None
    assert set(json.loads(receipt.reference)) <= {0, 1, 2, 3}


def test_a_program_runs_in_a_fixed_place(tmp_path: Path) -> None:
    """Its working directory is the root or the one that was declared, and what it makes is its user's only."""
    code = "import os; print(os.getcwd(), oct(os.umask(0)))"
    assert sent(python(code)) == Receipt("/ 0o77")
    assert sent(python(code, cwd=str(tmp_path))) == Receipt(f"{tmp_path} 0o77")
    with pytest.raises(RetryLater, match="working directory"):
        sent(python(code, cwd=str(tmp_path / "gone")))


DEAF = """
import asyncio, signal
from postroad import Argv, OutcomeUnknown
from tests.transports.test_argv import note

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
try:
    asyncio.run(Argv("false").send(note()))
except OutcomeUnknown as error:
    print(error.reason)
"""


def test_an_end_that_was_told_to_somebody_else_is_unknown() -> None:
    """Where ends of children are ignored nobody knows the exit code: no success, and nothing else is claimed."""
    run = subprocess.run([sys.executable, "-W", "error", "-c", DEAF], capture_output=True, text=True, check=True)
    assert "exit code was told to something else" in run.stdout
    assert run.stderr == ""


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

    about = note(raw=json.dumps("y" * 1_000_000))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    asyncio.run(python(code).send(about))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


def test_unread_stdin_is_noted() -> None:
    """A program that does not read all of a large envelope is judged by its exit code; the record says so."""
    raw = json.dumps("y" * 1_000_000)
    assert sent(python("pass"), raw=raw) == Receipt("", {"note": UNREAD})
    with pytest.raises(RetryLater) as caught:
        sent(python("import sys; sys.exit(1)"), raw=raw)
    assert caught.value.reason == f"exit 1, {UNREAD}"


def test_a_grandchild_that_holds_the_pipes(tmp_path: Path) -> None:
    """A program's end is the end: what it left behind in its group is killed."""
    pid = tmp_path / "pid"
    argv = Argv("sh", "-c", f"sleep 300 & echo $! > {pid}; exit 0")
    begun = time.monotonic()
    sent(argv)
    assert time.monotonic() - begun < 10
    wait_until_gone(int(pid.read_text()))


def test_a_program_that_leaves_its_session_escapes() -> None:
    """A grandchild in a session of its own is not waited for, and lives: that is how a program starts a service."""
    code = "import subprocess; print(subprocess.Popen(['sleep', '300'], start_new_session=True).pid)"
    receipt = sent(python(code))
    assert receipt is not None
    escaped = int(receipt.reference)
    assert not gone(escaped)
    os.kill(escaped, signal.SIGKILL)


def test_a_grandchild_with_pipes_of_its_own(tmp_path: Path) -> None:
    """One that holds nothing of ours is killed with the group too."""
    pid = tmp_path / "pid"
    sent(Argv("sh", "-c", f"sleep 300 < /dev/null > /dev/null 2>&1 & echo $! > {pid}"))
    wait_until_gone(int(pid.read_text()))


GROUP = "trap '' TERM; sleep 300 & echo $$ $! > {pid}; sleep 300"


def test_an_attempt_ends_by_its_deadline(tmp_path: Path) -> None:
    """A program that is not done in time is killed with its children; what it did meanwhile nobody knows."""
    pid = tmp_path / "pid"
    begun = time.monotonic()
    with pytest.raises(OutcomeUnknown, match="timeout: sh was not done after 0"):
        sent(Argv("sh", "-c", GROUP.format(pid=pid)), seconds=1)
    assert time.monotonic() - begun < 1.5
    for number in pid.read_text().split():
        wait_until_gone(int(number))


def test_a_cancelled_send_kills_the_group(tmp_path: Path) -> None:
    """A send that is told to end kills its program and the program's children first."""
    pid = tmp_path / "pid"

    async def cancelled() -> None:
        sending = asyncio.ensure_future(Argv("sh", "-c", GROUP.format(pid=pid)).send(note()))
        while not (pid.exists() and pid.read_text().endswith("\n")):
            assert not sending.done()
            await asyncio.sleep(0.01)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending

    asyncio.run(cancelled())
    first, second = map(int, pid.read_text().split())
    assert not Path(f"/proc/{first}").exists()  # reaped too
    wait_until_gone(second)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ((), "program"), (("",), "program"), ((" ",), "program"), ((3,), "program"), (("a\0",), "NUL"),
        (("{to}",), "--"), (("say", "{to}"), "--"), (("say", "--", "x{to}"), "whole"), (("say", "--to={to}"), "whole"),
        (("say", "--", "{body}"), "stands for nothing"), (("{to}", "--"), "--"), (("--", "{to}"), "--"),
        (("say", "--", "{payload}"), "stdin"),
    ],
)  # fmt: skip
def test_a_command_that_is_none_is_refused(command: Any, said: str) -> None:
    """What is wrong with a command is said where it is declared."""
    with pytest.raises(InvalidInput, match=said) as caught:
        Argv(*command)
    assert caught.value.field == "command"


def test_braces_that_mean_nothing_here_are_the_program_s() -> None:
    """Only the two names are data; what looks alike inside an argument is handed over as it is."""
    receipt = sent(python(ECHO, "{}", '{"a": 1}', "x{y}"))
    assert receipt is not None
    assert json.loads(receipt.reference) == ["{}", '{"a": 1}', "x{y}"]


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
        for _ in range(50):
            await asyncio.gather(*(argv.send(note()) for _ in range(10)))

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
