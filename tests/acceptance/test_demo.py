"""The demo: its services, its counting, its story, and the whole of it as real processes."""

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from rich.console import Console

from postroad.demo import cast, ledger, story
from postroad.demo.journal import Follower, Journal
from postroad.demo.ledger import Facts
from postroad.demo.processes import Processes, uninterrupted
from postroad.demo.services import Script

SECOND = 1_000_000


class Served:
    """The services as a process, and requests to them."""

    def __init__(self, processes: Processes, folder: Path, script: Script) -> None:
        (folder / "script.json").write_text(json.dumps(script))
        path = folder / "journal.jsonl"
        self.processes = processes
        self.pid = processes.start("services", "-m", "postroad.demo.services", str(folder / "script.json"), str(path))
        self.port = int(processes.first_line("services"))
        self.follower = Follower(path)

    def open(self, key: str, *, path: str = "/sms", attempt: int = 1) -> http.client.HTTPConnection:
        """A request that is sent, with its answer still to be read."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        connection.request("POST", path, b"{}", {"Idempotency-Key": key, "Attempt": str(attempt)})
        return connection

    def post(self, key: str, *, path: str = "/sms", attempt: int = 1) -> tuple[int, dict[str, Any]]:
        """A request with its answer."""
        connection = self.open(key, path=path, attempt=attempt)
        answer = connection.getresponse()
        said = answer.status, json.loads(answer.read())
        connection.close()
        return said

    def until(self, kind: str) -> dict[str, Any]:
        """The first line of a kind that the journal gets from now on."""
        end = time.monotonic() + 10
        while time.monotonic() < end:
            for line in self.follower.lines():
                if line["type"] == kind:
                    return line
            time.sleep(0.01)
        raise AssertionError(f"no line of type {kind} in the journal")


@contextmanager
def serving(folder: Path, script: Script) -> Iterator[Served]:
    with Processes(folder) as processes:
        yield Served(processes, folder, script)


class TestServices:
    def test_a_key_is_done_once(self, tmp_path: Path) -> None:
        """The second request with a key is answered like the first, and marked; both are in the journal."""
        with serving(tmp_path, {}) as served:
            first, second = served.post("k"), served.post("k", attempt=2)
            assert first == (200, {"receipt": "r-k", "deduplicated": False})
            assert second == (200, {"receipt": "r-k", "deduplicated": True})
            assert [(line["type"], line["attempt"]) for line in served.follower.lines()] == [
                ("request", 1), ("done", 1), ("answer", 1), ("request", 2), ("answer", 2),
            ]  # fmt: skip

    def test_what_was_not_done_is_no_duplicate(self, tmp_path: Path) -> None:
        """After a 500 the next request with the key is the first that counts; a 422 comes as scripted."""
        with serving(tmp_path, {"k": ["busy", "refuse"]}) as served:
            assert [served.post("k")[0] for _ in range(3)] == [500, 422, 200]
            lines = list(served.follower.lines())
            assert [line["duplicate"] for line in lines if line["type"] == "request"] == [False] * 3

    def test_a_lost_answer_was_done(self, tmp_path: Path) -> None:
        """Who gives up on an answer and asks again is told that it was done."""
        with serving(tmp_path, {"k": ["lost"]}) as served:
            waiting = served.open("k")
            assert served.until("lost")["key"] == "k"
            waiting.close()
            assert served.until("gone")["closed"] is True
            assert served.post("k", attempt=2)[1]["deduplicated"] is True

    def test_a_held_request_is_signalled(self, tmp_path: Path) -> None:
        """A held request is in the journal while it is held."""
        with serving(tmp_path, {"k": ["hold"]}) as served:
            waiting = served.open("k")
            assert served.until("held")["key"] == "k"
            waiting.close()

    def test_they_end_with_their_parent(self, tmp_path: Path) -> None:
        """When whoever started the services is gone, so are they: their stdin is closed."""
        with serving(tmp_path, {}) as served:
            process = served.processes._running["services"]
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(10) == 0


class TestProcesses:
    def test_everything_is_ended(self, tmp_path: Path) -> None:
        """What was started in the block is gone after it, what it said is kept, and a stop says if it was heeded."""
        stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True)"
        with Processes(tmp_path) as processes:
            pids = [processes.start(name, "-c", "import time; time.sleep(60)") for name in ("one", "two")]
            assert processes.stop("one")
            assert processes.stop("one"), "one that does not run is no error"
            processes.start("short", "-c", f"{stubborn}; raise SystemExit('over')")
            processes._running["short"].wait(10)
            (said,) = processes.ended()
            assert "short ended with 1" in said
            assert "over" in said
        assert not any(psutil.pid_exists(pid) for pid in pids)

    def test_an_interrupt_at_the_start_leaves_nothing_behind(self, tmp_path: Path) -> None:
        """An interrupt while a process is being started waits until it is known, and then ends it."""

        def start(processes: Processes) -> None:
            with uninterrupted():
                signal.raise_signal(signal.SIGINT)
                processes.start("one", "-c", "import time; time.sleep(60)")

        before = {child.pid for child in psutil.Process().children()}
        with pytest.raises(KeyboardInterrupt), Processes(tmp_path) as processes:
            start(processes)
        assert {child.pid for child in psutil.Process().children()} == before

    def test_a_kill_is_a_kill(self, tmp_path: Path) -> None:
        """A killed process is gone at once and is not reported as one that ended by itself."""
        with Processes(tmp_path) as processes:
            pid = processes.start("one", "-c", "import time; time.sleep(60)")
            assert processes.kill("one") == pid
            assert not psutil.pid_exists(pid)
            assert processes.ended() == []


def test_a_follower_reads_whole_lines(tmp_path: Path) -> None:
    """A line that is still being written waits until it is whole."""
    path = tmp_path / "journal"
    follower = Follower(path)
    assert list(follower.lines()) == []
    journal = Journal(path)
    journal.append({"n": 1})
    with path.open("a") as file:
        file.write('{"n":')
        file.flush()
        assert list(follower.lines()) == [{"n": 1}]
        file.write(" 2}\n")
        file.flush()
        assert list(follower.lines()) == [{"n": 2}]
    journal.close()


def row(**values: Any) -> Any:
    return SimpleNamespace(**values)


def entry(key: str, stream: str = "load/1") -> Any:
    return row(stream=stream, entry_id=key, cause=None, kind="LocationPing")


def dispatch(key: str, status: str = "delivered") -> Any:
    return row(stream="load/1", key=key, epoch=0, status=status)


def facts(**given: Any) -> Facts:
    empty: dict[str, Any] = dict.fromkeys(
        ("entries", "dead_events", "dispatches", "timers", "transitions", "alerts"), ()
    )
    return Facts(**{**empty, "turns": 0, **given})


def request(key: str, *, duplicate: bool = False) -> dict[str, Any]:
    return {"type": "request", "path": "/sms", "key": key, "attempt": 1, "duplicate": duplicate}


class TestLedger:
    WHOLE: tuple[Any, ...] = (entry("p"), entry("out:k:delivered"))
    JOURNAL = (request("k"), request("k", duplicate=True), {"type": "answer", "key": "k", "deduplicated": True})
    RETRY = row(reason_code="dispatch.pending.retry_backoff")

    def summary(self, *, kills: int = 1, journal: Any = JOURNAL, **given: Any) -> ledger.Summary:
        known = {"entries": self.WHOLE, "dispatches": [dispatch("k")], "transitions": [self.RETRY]}
        return ledger.summarise(facts(**{**known, **given}), journal, [("load/1", "p")], kills=kills)

    def test_what_is_whole_holds(self) -> None:
        """Every event landed, every dispatch arrived, and a kill, a retry and a duplicate happened."""
        summary = self.summary()
        assert summary.holds
        assert (summary.events, summary.retries, summary.duplicates, summary.lost) == (2, 1, 1, [])

    def test_a_lost_event_is_found(self) -> None:
        """An accepted event that is neither in a log nor dead is lost; a dead one is not."""
        assert self.summary(entries=self.WHOLE[1:]).lost == ["event p of load/1"]
        dead = row(stream="load/1", event_id="p")
        assert self.summary(entries=self.WHOLE[1:], dead_events=[dead]).holds

    def test_a_lost_outcome_is_found(self) -> None:
        """A dispatch that ended must have told its stream."""
        assert self.summary(entries=self.WHOLE[:1]).lost == ["event out:k:delivered of load/1"]

    def test_a_lost_dispatch_is_found(self) -> None:
        """A dispatch that never reached the services is lost, whatever the database says; so is an unfinished one."""
        journal = [request("other"), *self.JOURNAL[2:]]
        summary = self.summary(journal=journal)
        assert summary.lost == ["dispatch k (delivered)"]
        assert "other was sent, but nothing committed it" in summary.broken
        pending = self.summary(dispatches=[dispatch("k", "pending")])
        assert "dispatch k (pending)" in pending.lost

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ({"kills": 0}, "killed in the middle of a send"),
            ({"transitions": []}, "nothing was retried"),
            ({"journal": [request("k")]}, "recognised by its key"),
        ],
    )
    def test_a_demo_that_shows_nothing_fails(self, given: dict[str, Any], said: str) -> None:
        """Without a kill, a retry and a duplicate the demo has not shown what it is there to show."""
        summary = self.summary(**given)
        assert not summary.holds
        assert any(said in claim for claim in summary.broken)


class TestStory:
    def test_it_is_plain_where_there_is_no_terminal(self) -> None:
        """No colours and no cut lines in a file; colours on a terminal."""
        said = {}
        for terminal in (False, True):
            out = StringIO()
            narrator = story.Narrator(Console(file=out, force_terminal=terminal, width=40), 0)
            narrator.tell(story.Told(12 * SECOND, "sent", "481207", "A/1/send_sms " + "x" * 100))
            said[terminal] = out.getvalue()
        assert said[False] == f"  12.0s  481207 sent     A/1/send_sms {'x' * 100}\n"
        assert "\x1b[" in said[True]

    def test_what_did_not_hold_is_said(self) -> None:
        """The summary names everything that was lost."""
        out = StringIO()
        narrator = story.Narrator(Console(file=out, width=100), 0)
        summary = TestLedger().summary(entries=())
        narrator.summarise(summary, seconds=12)
        assert "lost: 2" in out.getvalue()
        assert "  lost: event p of load/1" in out.getvalue()

    @pytest.mark.parametrize(
        ("reason", "before", "after", "said"),
        [
            ("dispatch.delivered.transport_ok", "delivering", "delivered", "A/1/send_sms (attempt 2): “ETA?”"),
            ("dispatch.pending.retry_backoff", "delivering", "pending", "A/1/send_sms: why"),
            ("dispatch.delivering.attempt", "delivering", "delivering", "another dispatcher takes it (attempt 2)"),
            ("dispatch.delivering.attempt", "pending", "delivering", None),
            ("dispatch.stale.transport_ok", "delivered", "delivered", "A/1/send_sms: why"),
            ("dispatch.dead_letter.permanent", "delivering", "dead_letter", "A/1/send_sms: why"),
        ],
    )
    def test_changes_of_a_dispatch(self, reason: str, before: str, after: str, said: str | None) -> None:
        """What matters about a dispatch is a line; that an attempt begins is none."""
        told = story.of_transition(
            row(
                stream="load/481207", key="481207/A/1/send_sms", metadata='{"attempt": 2}', reason_code=reason,
                from_status=before, to_status=after, at=1, summary="why", body='{"text": "Load 481207: ETA?"}',
            )
        )  # fmt: skip
        assert told is None if said is None else told is not None and said in told.text


def test_the_cast_fits_its_script() -> None:
    """Every scripted key belongs to a load that plays."""
    for key in cast.SCRIPT:
        assert key.removeprefix("think/").partition("/")[0] in cast.PLAYERS


def demo(*options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "postroad.surfaces.cli", "demo", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": "120"},
    )


def forget(said: str) -> None:
    """Remove the folder that the demo says it has left."""
    (folder,) = re.findall(r"(/\S*/postroad-demo-\w+)(?: \(|$)", said, re.MULTILINE)
    shutil.rmtree(folder)


def pids(said: str) -> list[int]:
    return [int(pid) for pid in re.findall(r"starts the \w+, release \d \(process (\d+)\)", said)]


@pytest.mark.acceptance
@pytest.mark.parametrize("options", [(), ("--postgres",)], ids=["sqlite", "postgres"])
def test_the_whole_demo(options: tuple[str, ...]) -> None:
    """It ends by itself within a minute, loses nothing, tells its story, and leaves no process behind."""
    began = time.monotonic()
    process = demo(*options)
    said, _ = process.communicate(timeout=90)
    assert process.returncode == 0, said
    assert time.monotonic() - began < 60
    assert "lost: 0" in said
    assert "\x1b" not in said
    for part in (
        "SIGKILL to the dispatcher", "its lease is over, another dispatcher takes it", "same key, done once",
        "starts the worker, release 2", "a half-finished turn, “released”", "is a noop: operators were alerted",
        "481211/A/1/send_sms failed", "came again: it was accepted before", "postroad stream show load/481207",
    ):  # fmt: skip
        assert part in said, said
    assert len(pids(said)) == 7
    assert not any(psutil.pid_exists(pid) for pid in pids(said))
    forget(said)


@pytest.mark.acceptance
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_ends_its_processes(number: int) -> None:
    """Ctrl-C, and a polite kill, end everything that the demo has started."""
    process = demo()
    assert process.stdout is not None
    said = ""
    while " agent  " not in said:
        line = process.stdout.readline()
        assert line, said
        said += line
    process.send_signal(number)
    rest, _ = process.communicate(timeout=30)
    assert process.returncode == 130, said + rest
    assert "every process was ended" in rest
    assert len(pids(said)) == 3
    assert not any(psutil.pid_exists(pid) for pid in pids(said))
    forget(rest)
