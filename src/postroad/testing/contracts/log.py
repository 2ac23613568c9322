"""What the log promises: dense versions, a compare-and-set that writes nothing when it fails, each entry once.

It cannot catch what only a broken database or other isolation levels show.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Connection

from postroad.model.clock import FakeClock
from postroad.model.errors import ConcurrencyConflict, DuplicateEntry, InvalidInput, StreamDeleted
from postroad.model.events import Entry
from postroad.model.rows import NewEntry
from postroad.store import log
from postroad.store.database import Database
from postroad.testing.contracts.dispatches import Waiting, another, in_threads
from postroad.testing.contracts.streams import (
    STREAM,
    Run,
    append_until_it_fits,
    delete_stream,
    entry,
    everything,
    logged,
)


def keys(entries: Sequence[Entry]) -> str:
    return "".join(one.key for one in entries)


class LogContract:
    """Appending and reading."""

    def append(self, run: Run, names: str, expected: Any, stream: str = STREAM) -> int:
        version: int = run(log.append, stream, [entry(name) for name in names], expected_version=expected)
        return version

    def test_versions_are_dense(self, run: Run) -> None:
        """A stream starts at 0 and its version is the number of its entries, in the order appended."""
        assert run(log.version, STREAM) == 0
        assert self.append(run, "ab", 0) == 2
        assert self.append(run, "c", 2) == 3
        assert run(log.version, STREAM) == 3
        assert run(logged) == [(1, "a"), (2, "b"), (3, "c")]

    def test_what_is_read_is_what_was_written(self, run: Run, clock: FakeClock) -> None:
        """An entry comes back with its exact text, kind, version, times and cause."""
        raw = '{ "ä": 1.50,"b":[]}'
        given = NewEntry(entry_id="a", kind="k", version=3, data=raw, received_at=7, run_id="r", cause="t")
        run(log.append, STREAM, [given, entry("b")], expected_version=0)
        first, second = run(log.read, STREAM)
        assert (first.stream, first.key, first.kind, first.version, first.raw) == (STREAM, "a", "k", 3, raw)
        assert (first.seq, first.cause, second.cause) == (1, "t", None)
        assert first.recorded_at == second.received_at == clock.now
        assert first.received_at.timestamp() == 7e-6

    def test_reading_is_bounded(self, run: Run) -> None:
        """`read` goes on after a place, `last` gives the newest in order, `find` those with the ids."""
        self.append(run, "abcde", 0)
        self.append(run, "x", 0, "load/2")
        assert keys(run(log.read, STREAM, after=1, limit=2)) == "bc"
        assert keys(run(log.read, STREAM, after=5)) == ""
        assert keys(run(log.last, STREAM, limit=2)) == "de"
        assert keys(run(log.find, STREAM, ["d", "b", "x", "nothing"])) == "bd"

    @pytest.mark.parametrize("expected", [0, 1, 3, 99, -1])
    def test_only_the_exact_version_is_accepted(self, run: Run, expected: int) -> None:
        """Any other version is a conflict that names the stream and writes nothing."""
        self.append(run, "ab", 0)
        before = run(everything)
        with pytest.raises(ConcurrencyConflict) as refused:
            self.append(run, "c", expected)
        assert refused.value.stream == STREAM
        assert run(everything) == before

    @pytest.mark.parametrize("expected", [1, -1, 99])
    def test_a_stream_without_entries_stands_at_0(self, run: Run, expected: int) -> None:
        """A stream that nobody wrote to has no other version than 0, and a refused append does not begin it."""
        before = run(everything)
        with pytest.raises(ConcurrencyConflict):
            self.append(run, "a", expected)
        assert run(everything) == before

    @pytest.mark.parametrize("expected", [None, "0", 0.0, True])
    def test_a_version_is_an_int(self, run: Run, expected: Any) -> None:
        """Anything else than an int is refused."""
        with pytest.raises(InvalidInput):
            self.append(run, "a", expected)

    def test_a_conflict_writes_nothing_even_if_swallowed(self, run: Run) -> None:
        """A refused append leaves nothing behind in a transaction that goes on and commits."""

        def go_on(conn: Connection, *, now: int) -> None:
            with pytest.raises(ConcurrencyConflict):
                log.append(conn, STREAM, [entry("c")], expected_version=1, now=now)
            with pytest.raises(DuplicateEntry):
                log.append(conn, STREAM, [entry("d"), entry("a")], expected_version=2, now=now)

        self.append(run, "ab", 0)
        before = run(everything)
        run(go_on)
        assert run(everything) == before

    def test_an_entry_is_there_once(self, run: Run) -> None:
        """Ids that are in the log already are refused, all of them named; another stream may have the same."""
        self.append(run, "abc", 0)
        with pytest.raises(DuplicateEntry) as refused:
            self.append(run, "cxa", 3)
        assert (refused.value.stream, refused.value.entry_ids) == (STREAM, ("a", "c"))
        with pytest.raises(DuplicateEntry) as refused:
            self.append(run, "yzy", 3)
        assert refused.value.entry_ids == ("y",)
        assert self.append(run, "abc", 0, "load/2") == 3
        assert run(log.version, STREAM) == 3

    def test_nothing_to_append(self, run: Run) -> None:
        """No entries are fine at the right version, and begin no stream."""
        before = run(everything)
        assert self.append(run, "", 0) == 0
        assert run(everything) == before

    def test_a_deleted_stream_is_not_begun_again(self, run: Run) -> None:
        """A deleted stream refuses entries at any version."""
        self.append(run, "a", 0)
        run(delete_stream, STREAM)
        with pytest.raises(StreamDeleted) as refused:
            self.append(run, "b", 1)
        assert refused.value.stream == STREAM

    def test_streams_are_appended_together(self, run: Run) -> None:
        """Several streams in one call: all of them, or none."""

        def both(conn: Connection, second: int, *, now: int) -> None:
            several: Sequence[log.Append] = [
                log.Append(stream="load/2", entries=[entry("x")], expected_version=second),
                log.Append(stream=STREAM, entries=[entry(f"y{second}")], expected_version=second),
            ]
            log.append_all(conn, several, now=now)

        run(both, 0)
        with pytest.raises(DuplicateEntry):
            run(both, 1)
        assert (run(log.version, "load/2"), run(log.version, STREAM)) == (1, 1)


class LogRaces:
    """Several writers of one stream. They need a database of their own, not a way to run."""

    def test_eight_threads_leave_no_gap(self, database: Database, clock: FakeClock) -> None:
        """Eight threads that append to one stream until each got through leave a dense log."""
        others = [another(database, clock) for _ in range(8)]
        mine = [[f"{place}/{n}" for n in range(5)] for place in range(8)]

        def work(place: int) -> None:
            for name in mine[place]:
                append_until_it_fits(partial(others[place].transact), STREAM, name)

        results = in_threads(*(partial(work, place) for place in range(8)))
        for other in others:
            other.close()
        assert results == [None] * 8
        entries = database.read(log.read, STREAM)
        assert [one.seq for one in entries] == list(range(1, 41))
        for names in mine:
            assert [one.key for one in entries if one.key in names] == names

    @pytest.mark.parametrize("begun", [False, True])
    def test_the_second_writer_conflicts(self, database: Database, clock: FakeClock, begun: bool) -> None:
        """A writer that waited for another one's append finds the version moved and writes nothing."""
        base = int(begun)
        if begun:
            database.transact(log.append, STREAM, [entry("first")], expected_version=0)
        other = another(database, clock)

        def second() -> object:
            try:
                return other.transact(log.append, STREAM, [entry("b")], expected_version=base)
            except ConcurrencyConflict as refused:
                return refused.stream

        with database.engine.connect() as conn, conn.begin() as transaction:
            log.append(database.bind(conn), STREAM, [entry("a")], expected_version=base, now=1)
            waiting = Waiting(database, second)
            waiting.blocked()
            transaction.commit()
        assert waiting.result() == STREAM
        other.close()
        assert [one.key for one in database.read(log.read, STREAM)][base:] == ["a"]

    def test_a_reader_skips_nothing(self, database: Database) -> None:
        """A reader that keeps a place in one stream sees every entry: places are given in order of commit."""
        seen: list[str] = []

        def read_on() -> None:
            seen.extend(one.key for one in database.read(log.read, STREAM, after=len(seen)))

        with database.engine.connect() as conn, conn.begin() as transaction:
            log.append(database.bind(conn), STREAM, [entry("a")], expected_version=0, now=1)
            read_on()
            transaction.commit()
        read_on()
        database.transact(log.append, STREAM, [entry("b")], expected_version=1)
        read_on()
        assert seen == ["a", "b"]
