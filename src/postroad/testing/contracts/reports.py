"""What reports promise: once for each key, never with messages in one set, ended by their stream only.

It cannot catch what an engine does with a set of them; `now` is given.
"""

from collections.abc import Callable
from itertools import count
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from sqlalchemy import Connection

from postroad.model import reports
from postroad.model.clock import FakeClock
from postroad.model.errors import KeyConflict, StreamDeleted
from postroad.model.events import REPORT_NAME
from postroad.model.retention import DAY
from postroad.model.rows import NewEvent, TurnClaim
from postroad.store import log, stopping, streams, watching
from postroad.store.reports import NewReport, accept
from postroad.store.watching import Asked, News
from postroad.testing.contracts.retention import sweep
from postroad.testing.contracts.streams import (
    STREAM,
    Run,
    Uses,
    commit,
    decided,
    entry,
    event,
    everything,
    hold,
    logged,
    names,
    waits,
)

OTHER = "load/2"


def report(number: int, stream: str = STREAM, said: str = "done", **more: Any) -> NewEvent:
    """A report `r<number>`."""
    return reports.event(stream, f"r{number}", msgspec.json.encode(said).decode(), **more)


def strict(number: int, said: str) -> NewEvent:
    """One that no other takes the place of."""
    return replace(report(number, said=said), keep=False)


def given(number: int, **more: Any) -> list[NewReport]:
    """A report as a caller gives it."""
    return [NewReport(event=report(number), **more)]


def parents(conn: Connection, stream: str = STREAM) -> list[tuple[str, str | None]]:
    """(key, parent) of the reports in a log."""
    return [(one.key, one.data["parent"]) for one in log.read(conn, stream) if one.kind == REPORT_NAME]


def said(conn: Connection, stream: str = STREAM) -> list[tuple[str, Any]]:
    """(key, what was reported) of a log's reports."""
    return [(one.key, one.data["data"]) for one in log.read(conn, stream) if one.kind == REPORT_NAME]


def waiting(run: Run) -> list[str]:
    """The ids of what waits."""
    return [name for _, name, _ in run(waits)]


def ended(conn: Connection, *keys: str) -> dict[str, News]:
    """What has ended of these, as those who wait are told."""
    found = watching.look(conn, [Asked(STREAM, event=key) for key in keys], now=0)
    return {asked.event: news for asked, news in found.items()}


class Claims(Uses):
    """Each pass of claiming has a token of its own, as workers' have."""

    _tokens = count()

    def claim(self, run: Run, token: str = "", **how: Any) -> list[TurnClaim]:
        return super().claim(run, token or f"t{next(self._tokens)}", **how)

    def claim_one(self, run: Run, token: str = "", **how: Any) -> TurnClaim:
        return super().claim_one(run, token or f"t{next(self._tokens)}", **how)

    def drain(self, run: Run, token: str = "") -> None:
        super().drain(run, token or f"t{next(self._tokens)}.")


class SetContract(Claims):
    """Which of what waits is one set."""

    def sets(self, run: Run, *, batch: int = 10) -> list[list[str]]:
        """The sets in which all that waits is taken, each committed before the next."""
        found = []
        while won := self.claim(run, batch=batch):
            (held,) = won
            found.append(names(held.events))
            commit(run, decided(held))
        return found

    def test_reports_and_messages_are_never_in_one_set(self, run: Run) -> None:
        """A set ends where the other sort begins, and several of one sort in a row are one set."""
        self.publish(run, event(1), report(1), event(2), event(3), report(2), report(3), event(4))
        assert self.sets(run) == [["e1"], ["r1"], ["e2", "e3"], ["r2", "r3"], ["e4"]]
        assert [name for _, name in run(logged)] == ["e1", "r1", "e2", "e3", "r2", "r3", "e4"]

    def test_a_set_of_reports_has_its_bound_too(self, run: Run) -> None:
        """No more are taken at once than a batch, wherever the other sort begins."""
        self.publish(run, *(report(n) for n in range(5)), event(1))
        assert self.sets(run, batch=2) == [["r0", "r1"], ["r2", "r3"], ["r4"], ["e1"]]

    def test_a_set_that_is_tried_again_stays(self, run: Run) -> None:
        """What came meanwhile, of either sort, waits behind a set that backs off, is released, parked or split."""
        self.publish(run, report(1), report(2))
        first = self.claim_one(run)
        self.publish(run, event(1), report(3))
        run(self.queue.back_off, hold(first), delay=0, error="x")
        again = self.claim_one(run)
        assert (names(again.events), again.turn_id) == (["r1", "r2"], first.turn_id)
        run(self.queue.release, hold(again))
        again = self.claim_one(run)
        assert names(again.events) == ["r1", "r2"]
        run(self.queue.split, hold(again), error="x")
        assert self.sets(run) == [["r1"], ["r2"], ["e1"], ["r3"]]

    def test_a_failing_turn_keeps_its_place(self, run: Run, clock: FakeClock) -> None:
        """Reports behind a set that backs off do not overtake it, and land once it has ended."""
        self.publish(run, event(1), report(1))
        held = self.claim_one(run)
        run(self.queue.back_off, hold(held), delay=60, error="x")
        assert self.claim(run) == []
        clock.advance(60)
        assert self.sets(run) == [["e1"], ["r1"]]

    def test_a_stop_withdraws_no_report(self, run: Run) -> None:
        """What people had published before it is withdrawn; reports before and behind it land in their order."""
        self.publish(run, event(1), report(1), event(2), report(2))
        self.publish(run, stopping.event(STREAM, "s"), report(3), event(3))
        assert self.sets(run) == [["r1", "r2"], ["postroad.stop:s"], ["r3"], ["e3"]]
        assert run(waits) == [
            (STREAM, "e1", stopping.WITHDRAWN), (STREAM, "e2", stopping.WITHDRAWN),
        ]  # fmt: skip

    def test_a_deleted_stream_drops_them_with_a_record(self, run: Run) -> None:
        """What waits in a stream that is deleted is dropped, with its reason; what comes then is refused."""
        self.publish(run, report(1))
        run(streams.delete, [STREAM])
        assert self.claim(run) == []
        assert run(waits) == [(STREAM, "r1", "stream_deleted")]
        with pytest.raises(StreamDeleted):
            run(accept, given(2))


class EntryContract(Claims):
    """What lands."""

    def test_the_entry_says_what_a_conversation_needs(self, run: Run, clock: FakeClock) -> None:
        """The assistant says it, behind the newest entry, without tools; its key says of what kind it is."""
        run(log.append, STREAM, [entry("a"), entry("b")], expected_version=0)
        self.publish(run, reports.event(STREAM, "cron:backup:1", '{ "disk" : 1.50 }', source=OTHER))
        accepted = clock.wall()
        clock.advance(5)
        self.drain(run)
        (landed,) = run(log.find, STREAM, ["cron:backup:1"])
        assert (landed.seq, landed.kind, landed.cause) == (3, REPORT_NAME, None)
        assert landed.raw == (
            '{"data":{ "disk" : 1.50 },"role":"assistant","source":"load/2","origin_surface":"scheduled-task",'
            '"tools":[],"turn_kind":"cron","parent":"b"}'
        )
        assert landed.received_at < landed.recorded_at
        assert (landed._received, landed._recorded) == (accepted, clock.wall())

    def test_each_is_the_child_of_the_one_before(self, run: Run) -> None:
        """The first entry has no parent; of several that land together each follows the other, in several streams."""
        self.publish(run, report(1), report(2), report(1, OTHER), event(1, "load/3"))
        commit(run, *(decided(held, "said") for held in self.claim(run)))
        assert run(parents) == [("r1", None), ("r2", "r1")]
        assert run(parents, OTHER) == [("r1", None)]
        self.publish(run, report(3))
        held = self.claim_one(run)
        commit(run, decided(held))
        before = next(name for _, name in run(logged) if name.endswith("/said"))
        assert run(parents)[-1] == ("r3", before)

    @pytest.mark.parametrize("key, kind", [("cron:a:1", "cron"), ("alone", "report"), (":x", "report"), ("a:", "a")])
    def test_the_turn_kind_comes_from_the_key(self, key: str, kind: str) -> None:
        """It is what stands in front of the first colon, if anything does."""
        assert reports.turn_kind_of(key) == kind


def queued(suite: "KeyContract", run: Run) -> None:
    """The first one waits."""


def claimed(suite: "KeyContract", run: Run) -> None:
    """A worker has it."""
    suite.claim_one(run)


def landed(suite: "KeyContract", run: Run) -> None:
    """It stands in the log, with its parent."""
    suite.drain(run)


def dead(suite: "KeyContract", run: Run) -> None:
    """It has ended without an entry, by whatever went wrong."""
    held = suite.claim_one(run)
    commit(run, decided(held, consumed=[], dead=held.events, dead_reason="poison"))


FATES = pytest.mark.parametrize("fate", [queued, claimed, landed, dead])


class KeyContract(Claims):
    """Once for each key."""

    @FATES
    def test_other_words_add_nothing(self, run: Run, fate: Callable[..., None]) -> None:
        """Whatever became of the first one, a retry with other content is taken for it, and changes nothing."""
        run(accept, given(1))
        fate(self, run)
        before = run(everything)
        (found,) = run(accept, [NewReport(event=report(1, said="something else"))])
        assert (found is not None) == (fate is landed)
        assert found is None or (found.key, found.data["data"]) == ("r1", "done")
        assert run(everything) == before

    @FATES
    def test_other_words_are_refused_if_they_matter(self, run: Run, fate: Callable[..., None]) -> None:
        """Without `keep` other content is refused by the key's name in every state; the same content never is."""
        run(log.append, STREAM, [entry("a")], expected_version=0)  # its entry will have a parent
        run(accept, [NewReport(event=strict(1, "done"))])
        fate(self, run)
        before = run(everything)
        with pytest.raises(KeyConflict) as refused:
            run(accept, [NewReport(event=strict(1, "something else"))])
        assert (refused.value.key, refused.value.about["stream"]) == ("r1", STREAM)
        run(accept, [NewReport(event=strict(1, "done"))])
        assert run(everything) == before

    @FATES
    def test_a_message_is_not_taken_for_a_report(self, run: Run, fate: Callable[..., None]) -> None:
        """A key that a message has taken is refused: the report would be lost."""
        self.publish(run, event(1))
        fate(self, run)
        taken = reports.event(STREAM, "e1", '"done"')
        with pytest.raises(KeyConflict):
            run(accept, [NewReport(event=taken)])

    def test_what_retention_has_deleted_stays_taken(self, run: Run, clock: FakeClock) -> None:
        """The key of one that died and went is known, and so is what it said."""
        run(accept, given(1))
        dead(self, run)
        clock.advance_to(clock.wall() + 31 * DAY)
        sweep(run)
        assert waiting(run) == []
        assert run(accept, [NewReport(event=report(1, said="else"))]) == [None]
        run(accept, [NewReport(event=strict(1, "done"))])
        with pytest.raises(KeyConflict):
            run(accept, [NewReport(event=strict(1, "else"))])
        assert waiting(run) == []
        assert run(ended, "r1")["r1"].entries == []

    def test_twice_at_once(self, run: Run) -> None:
        """The same key twice in one transaction is one report, the first one's."""
        one, other = self.publish(run, report(1, said="first"), report(1, said="second"))
        assert (one.created, other.created, one.position) == (True, False, other.position)
        self.drain(run)
        assert run(said) == [("r1", "first")]
