"""What reports promise to who makes them and to who waits: their sources, their ends, and no failure of others.

It cannot catch what an engine makes of a look; `now` is given.
"""

import threading
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Connection

from postroad.model import reports
from postroad.model.clock import FakeClock
from postroad.model.errors import SourceRefused
from postroad.model.events import Entry
from postroad.store import alerts, log, streams, watching
from postroad.store.database import Database
from postroad.store.reports import accept, tell
from postroad.store.watching import Asked
from postroad.testing.contracts.dispatches import Waiting, another, in_threads
from postroad.testing.contracts.reports import Claims, ended, given, report, said, waiting
from postroad.testing.contracts.streams import (
    STREAM,
    Run,
    commit,
    decided,
    entry,
    event,
    everything,
    waits,
)

OTHER = "load/2"


class SourceContract(Claims):
    """Whose report it is."""

    def refused(self, run: Run, **more: Any) -> None:
        """It is refused, and nothing is stored, of those beside it neither."""
        before = run(everything)
        with pytest.raises(SourceRefused) as refused:
            run(accept, [*given(7), *given(1, source=OTHER, **more)])
        assert refused.value.about["source"] == OTHER
        assert run(everything) == before

    def test_a_source_that_is_missing(self, run: Run) -> None:
        """A stream that has no entries, and will have none, is no source; one whose first event waits is."""
        self.refused(run)
        self.publish(run, event(1, OTHER))
        run(accept, given(1, source=OTHER))
        self.drain(run)
        run(accept, given(2, source=OTHER))
        assert [key for key, _ in run(said)] == ["r1"]

    def test_a_source_whose_events_have_died(self, run: Run) -> None:
        """It has no entries and will have none."""
        self.publish(run, event(1, OTHER))
        held = self.claim_one(run)
        commit(run, decided(held, consumed=[], dead=held.events, dead_reason="poison"))
        self.refused(run)

    def test_a_source_that_was_thrown_away(self, run: Run) -> None:
        """A deleted stream is no source, whoever says whose it is."""
        self.publish(run, event(1, OTHER))
        self.drain(run)
        run(streams.delete, [OTHER])
        self.refused(run)
        with pytest.raises(SourceRefused):
            run(accept, given(1, source=OTHER, owner="ann"), owner_of=lambda conn, stream: "ann")

    def test_a_source_of_another_owner(self, run: Run) -> None:
        """Without anybody to say so, a stream belongs to whom its name says, up to the next slash."""
        self.publish(run, event(1, "load/ann/1"))
        run(accept, given(1, source="load/ann/1", owner="ann"))
        for owner in ("bob", "an", ""):
            with pytest.raises(SourceRefused) as refused:
                run(accept, given(2, source="load/ann/1", owner=owner))
            assert refused.value.about == {"source": "load/ann/1", "owner": owner}
        assert waiting(run) == ["e1", "r1"]

    def test_somebody_says_whose_it_is(self, run: Run) -> None:
        """The application's own word counts, read in the same transaction; None means that there is no such stream."""
        owners = {OTHER: "ann"}

        def owner_of(conn: Connection, stream: str) -> str | None:
            assert conn.in_transaction()
            return owners.get(stream)

        run(accept, given(1, source=OTHER, owner="ann"), owner_of=owner_of)
        run(accept, given(2, source=OTHER), owner_of=owner_of)
        for source, owner in ((OTHER, "bob"), ("load/9", None), ("load/9", "ann")):
            with pytest.raises(SourceRefused):
                run(accept, given(3, source=source, owner=owner), owner_of=owner_of)
        assert waiting(run) == ["r1", "r2"]

    def test_an_owner_without_a_source(self, run: Run) -> None:
        """There is nothing to hold it against."""
        run(accept, given(1, owner="ann"))
        assert waiting(run) == ["r1"]


class TellContract(Claims):
    """Reports that come of another stream's turn, or of whatever else must not fail for them."""

    def test_they_come_with_the_turn(self, run: Run) -> None:
        """What a turn reports to other streams waits there once it has committed."""
        self.publish(run, event(1))
        held = self.claim_one(run)
        commit(run, decided(held, reports=[report(1, OTHER), report(2, OTHER)]))
        assert run(waits) == [(OTHER, "r1", None), (OTHER, "r2", None)]

    def test_the_first_end_stands(self, run: Run) -> None:
        """Of several ends of one thing the first one is the report; the others are no error."""
        assert run(tell, [report(1, said="done"), report(2)]) == []
        assert run(tell, [report(1, said="timed out")]) == []
        self.drain(run)
        assert run(tell, [report(1, said="failed")]) == []
        assert run(said) == [("r1", "done"), ("r2", "done")]
        assert run(alerts.unrung) == []

    def test_what_nobody_takes_is_dropped(self, run: Run) -> None:
        """A deleted stream, and a key that is a message's, cost these reports only; an alert says so."""
        run(streams.delete, [OTHER])
        self.publish(run, event(1), event(2, "load/3"))
        held = next(one for one in self.claim(run) if one.stream == "load/3")
        taken = reports.event(STREAM, "e1", '"done"')
        commit(run, decided(held, reports=[report(1, OTHER), taken, report(2, OTHER), report(3)]))
        assert waiting(run) == ["e1", "r3"]
        assert [(one.code, one.subject) for _, one in run(alerts.unrung)] == [
            ("report.dropped", STREAM), ("report.dropped", OTHER),
        ]  # fmt: skip

    def test_nothing_is_nothing(self, run: Run) -> None:
        """No reports are fine."""
        before = run(everything)
        assert run(tell, []) == []
        assert run(everything) == before


class EndContract(Claims):
    """What those who wait are told."""

    def test_nothing_while_it_waits(self, run: Run) -> None:
        """Not what else becomes of the stream, and not that a worker has it."""
        self.publish(run, event(1), report(1))
        commit(run, decided(self.claim_one(run), "said"))
        assert run(ended, "r1") == {}
        self.claim_one(run)
        assert run(ended, "r1") == {}

    def test_its_entry(self, run: Run) -> None:
        """Each is told of its own entry, as it stands in the log, however many landed together."""
        self.publish(run, report(1), report(2), event(1), report(3))
        commit(run, decided(self.claim_one(run)))
        found = run(ended, "r1", "r2", "r3")
        assert {key: [one.seq for one in news.entries] for key, news in found.items()} == {"r1": [1], "r2": [2]}
        (told,) = found["r2"].entries
        (stands,) = run(log.find, STREAM, ["r2"])
        assert (told.raw, told.kind, told.recorded_at) == (stands.raw, stands.kind, stands.recorded_at)
        assert isinstance(told, Entry)

    def test_its_death(self, run: Run) -> None:
        """One that died, and one that nobody knows any more, have no entry."""
        self.publish(run, report(1))
        held = self.claim_one(run)
        commit(run, decided(held, consumed=[], dead=held.events, dead_reason="poison"))
        assert {key: news.entries for key, news in run(ended, "r1", "r9").items()} == {"r1": [], "r9": []}

    def test_the_streams_deletion(self, run: Run) -> None:
        """It ends all that wait in it, at once; what had landed before is told of."""
        self.publish(run, report(1), event(1), report(2))
        commit(run, decided(self.claim_one(run)))
        run(streams.delete, [STREAM])
        found = run(ended, "r1", "r2")
        assert [(len(found[key].entries), found[key].deleted) for key in ("r1", "r2")] == [(1, True), (0, True)]

    def test_beside_those_who_watch(self, run: Run) -> None:
        """One look tells both, each of its own."""
        self.publish(run, report(1))
        commit(run, decided(self.claim_one(run)))
        found = run(watching.look, [Asked(STREAM, 0), Asked(STREAM, event="r1"), Asked(STREAM, 1)])
        assert {(one.after, one.event): news.upto for one, news in found.items()} == {(0, ""): 1, (0, "r1"): 1}


class ReportRaces(Claims):
    """Several at once, each in a transaction of its own."""

    def test_many_report_the_same(self, run: Run, database: Database, clock: FakeClock) -> None:
        """Twenty at one instant, half of them beside something else of theirs: one report, and nobody fails."""

        def both(conn: Connection, *, now: int) -> list[Entry | None]:
            log.append(conn, f"other/{threading.get_ident()}", [entry("a")], expected_version=0, now=now)
            return accept(conn, given(1), now=now)

        others = [another(database, clock) for _ in range(20)]
        calls = [
            partial(other.transact, both) if number % 2 else partial(other.transact, accept, given(1))
            for number, other in enumerate(others)
        ]
        assert in_threads(*calls) == [[None]] * 20
        assert waiting(run) == ["r1"]
        self.drain(run)
        assert run(said) == [("r1", "done")]
        for other in others:
            other.close()

    def test_one_that_is_taken_back(self, run: Run, database: Database, clock: FakeClock) -> None:
        """Whoever finds the key taken by a transaction that then comes to nothing has reported by itself."""
        with database.engine.connect() as conn:
            transaction = conn.begin()
            accept(database.bind(conn), given(1), now=clock.wall())
            second = Waiting(database, lambda: another(database, clock).transact(accept, given(1)))
            second.blocked()
            transaction.rollback()
            assert second.result() == [None]
        assert waiting(run) == ["r1"]
