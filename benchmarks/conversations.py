"""Long conversations: what a turn costs in a conversation that has had ten thousand of them, against its tenth.

From `begin` of the publish to the turn's commit: publish, claim, the log's window, a fold, record, commit. In a process
that knows the conversation, and, without a mark, in one that has just started and must fold it anew.
"""

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing
from multiprocessing.connection import Connection as Pipe
from statistics import median
from time import perf_counter
from typing import Any

from benchmarks import seeds, work
from benchmarks.children import child
from benchmarks.figures import Figure, Plan, Progress, rounded
from benchmarks.ours import DECIDED, EVENT
from benchmarks.places import Kind, Place
from postroad import Entry, Fold, Postroad, Turn

NAME = "conversations"
LATE, EARLY = 10_000, 10  # which turn of a conversation
FRESH_ENTRIES = 10_000
WINDOWS = (20, 200)  # the shorter one is full at the tenth turn, the longer one only later
PROCESSES_MAX = 2
TIMEOUT_SECONDS = 60


def measure(kind: Kind, ours: Place, limit: Place, plan: Plan, progress: Progress) -> Iterator[Figure]:
    """Medians in milliseconds, a late turn and an early one by turns; the first ones in fresh processes."""
    for window in WINDOWS:
        late, early = _warm(ours, window, plan.conversations)
        case = f"turn {LATE:,}, log(last={window})"
        yield Figure(work=NAME, database=kind, case=case, unit="ms", ours=late, against=early)
    progress(f"{kind}: {NAME}, fresh processes")
    late, early = _fresh(ours, min(plan.rounds, PROCESSES_MAX))
    case = f"first turn of a process, {FRESH_ENTRIES:,} entries"
    yield Figure(work=NAME, database=kind, case=case, unit="ms", ours=late, against=early)


class Talk:
    """An app whose turns read their log and a fold, and what a whole turn of it takes."""

    def __init__(self, url: str, schema: str | None, window: int) -> None:
        self.post = Postroad(url, schema=schema)
        self._window = window
        self._ended = threading.Semaphore(0)
        self.post.turn(work.TYPE)(self._decide)
        self.post.observe(self._observe)

    def _decide(self, turn: Turn) -> None:
        told = turn.fold(TOLD)
        entries = turn.log(last=self._window)
        turn.record(DECIDED, work.decision(f"{told}/{len(entries)}"))

    def _observe(self, name: str, values: Mapping[str, Any]) -> None:
        if name == "turn.ended":
            self._ended.release()

    def turn(self, stream: str, key: str) -> float:
        """A message and its turn: milliseconds."""
        began = perf_counter()
        with self.post.begin() as tx:
            tx.publish(stream, EVENT, work.event(0), key=key)
        if not self._ended.acquire(timeout=TIMEOUT_SECONDS):
            raise TimeoutError(f"no turn of {stream} has ended")
        return (perf_counter() - began) * 1_000


def _count(told: int, entry: Entry) -> int:
    return told + (DECIDED.of(entry) is not None)


TOLD: Fold[int] = Fold("told", lambda: 0, _count)


def _warm(place: Place, window: int, turns: int) -> tuple[float, float]:
    """A turn of one long conversation, and one of a short one that is not used again, `turns` times.

    Each conversation has had a turn in this process before, which doesn't count.
    """
    place.clear()
    long = _stream("long")
    seeds.conversation(place, long, 2 * (LATE - 1))
    for number in range(turns):
        seeds.conversation(place, _stream(f"short{number}"), 2 * (EARLY - 2))
    late, early = [], []
    talk = Talk(place.url, place.schema, window)
    with closing(talk.post), talk.post.running():
        talk.turn(long, "first")
        for number in range(turns):
            short = _stream(f"short{number}")
            talk.turn(short, "first")
            early.append(talk.turn(short, "e"))
            late.append(talk.turn(long, f"e{number}"))
    return rounded(median(late)), rounded(median(early))


def _fresh(place: Place, processes: int) -> tuple[float, float]:
    """The first turns in new processes: of a long conversation, and before it of a short one."""
    place.clear()
    found: dict[int, list[float]] = {2 * EARLY: [], FRESH_ENTRIES: []}
    for entries in found:
        seeds.conversation(place, _stream(f"of{entries}"), entries)
    for number in range(processes):
        with child(_first_turns, place) as fresh:
            for entries, lengths in found.items():
                lengths.append(float(fresh.ask((_stream(f"of{entries}"), f"e{number}"))))
    early, late = (rounded(median(lengths)) for lengths in found.values())
    return late, early


def _first_turns(url: str, schema: str | None, pipe: Pipe) -> None:
    """A process that has had a turn of another conversation, and answers with what one of these takes."""
    talk = Talk(url, schema, WINDOWS[0])
    with closing(talk.post), talk.post.running():
        talk.turn(_stream("warm"), f"of process {os.getpid()}")
        pipe.send("ready")
        while True:
            pipe.send(talk.turn(*pipe.recv()))


def _stream(name: str) -> str:
    return f"{work.TYPE}/{name}"
