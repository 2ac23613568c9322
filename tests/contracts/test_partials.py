"""What running turns say, and the look for news of many streams, over both databases."""

from typing import Any

import pytest
from sqlalchemy import Connection

from postroad.model.clock import SECOND, FakeClock
from postroad.model.rows import TurnClaim
from postroad.store import partials, queues, watching
from postroad.store.database import Database
from postroad.store.partials import Said
from postroad.store.statements import Statement
from postroad.store.watching import Asked, News
from postroad.testing.contracts.streams import (
    LEASE,
    STREAM,
    Run,
    Uses,
    append_next,
    commit,
    decided,
    delete_stream,
    entry,
    event,
    hold,
)

OTHER = "load/2"
_ROWS = Statement("SELECT stream, run_id, said FROM {p}partials ORDER BY stream")
_LOCK = Statement("SELECT stream FROM {p}queues WHERE stream = :stream {for_update}")


def says(held: TurnClaim, words: str, *, token: str | None = None) -> Said:
    """What a claim's run has said so far."""
    return Said(name=held.stream, token=token or held.token, run=held.run_id, turn=held.turn_id, words=words)


def say(run: Run, held: TurnClaim, words: str) -> None:
    """Have these words of a run written."""
    assert run(partials.carry, [says(held, words)], {}) == {held.run_id}


def news(run: Run, stream: str = STREAM, after: int = 0, heard: str = "", **more: Any) -> News | None:
    """What is new in one stream."""
    asked = Asked(stream, after, heard)
    found: dict[Asked, News] = run(watching.look, [asked], **more)
    return found.get(asked)


def heard(run: Run, stream: str = STREAM) -> str | None:
    """What the running turn of a stream is heard to say."""
    found = news(run, stream)
    return None if found is None or found.partial is None else found.partial.text


def rows(conn: Connection) -> list[tuple[str, str]]:
    """(stream, words) of all rows, whatever they count for."""
    return [(row.stream, row.said) for row in _ROWS(conn)]


class TestPartials(Uses):
    """Words are written under a claim, and count for nobody without it."""

    def claimed(self, run: Run, token: str = "t1", **how: Any) -> TurnClaim:
        self.publish(run, event(1))
        return self.claim_one(run, token, **how)

    def test_what_a_run_says_is_heard(self, run: Run) -> None:
        """A running turn's words are news, the same ones are none, and other ones are again, even if no time passes."""
        held = self.claimed(run)
        assert news(run) is None
        say(run, held, "Hel")
        first = news(run)
        assert first is not None
        assert first.partial is not None
        assert (first.partial.stream, first.partial.turn, first.partial.text) == (STREAM, held.turn_id, "Hel")
        assert news(run, heard=first.heard) is None
        say(run, held, "Hello")
        second = news(run, heard=first.heard)
        assert second is not None
        assert second.partial is not None
        assert second.partial.text == "Hello"
        assert news(run, heard=second.heard) is None

    def test_many_are_written_at_once(self, run: Run) -> None:
        """The words of several runs are written in one transaction, those of a run without a claim are left out."""
        self.publish(run, event(1), event(1, OTHER), event(1, "load/3"))
        one, two, three = self.claim(run)
        said = [says(one, "a"), says(two, "b", token="not mine"), says(three, "c")]
        assert run(partials.carry, said, {}) == {one.run_id, three.run_id}
        assert run(rows) == [(one.stream, "a"), (three.stream, "c")]

    def test_a_zombie_s_words_change_nothing(self, run: Run, clock: FakeClock) -> None:
        """Whoever lost the claim is not heard any more, and cannot write over the words of the new claimant."""
        zombie = self.claimed(run)
        say(run, zombie, "from the grave")
        clock.advance(LEASE // SECOND + 1)
        owner = self.claim_one(run, "t2")
        assert heard(run) is None
        assert run(partials.carry, [says(zombie, "boo")], {}) == set()
        assert heard(run) is None
        say(run, owner, "alive")
        assert run(partials.carry, [says(zombie, "boo")], {}) == set()
        assert heard(run) == "alive"

    def test_the_words_of_the_dead_are_heard_for_their_lease(self, run: Run, clock: FakeClock) -> None:
        """A killed process' words count until its lease is over; whoever had heard them is told that they are void."""
        held = self.claimed(run)
        say(run, held, "last words")
        known = news(run)
        assert known is not None
        clock.advance(LEASE // SECOND - 1)
        assert heard(run) == "last words"
        clock.advance(1)
        assert news(run) is None
        void = news(run, heard=known.heard)
        assert void is not None
        assert (void.partial, void.heard) == (None, "")

    def test_a_commit_takes_the_words_along(self, run: Run) -> None:
        """The commit of a turn that spoke removes its row: the entries come and the words go in one look."""
        held = self.claimed(run)
        say(run, held, "I think")
        known = news(run)
        assert known is not None
        commit(run, decided(held, "reply", spoke=True))
        assert run(rows) == []
        found = news(run, heard=known.heard)
        assert found is not None
        assert [one.seq for one in found.entries] == [1, 2]
        assert found.partial is None

    def test_a_commit_of_a_set_that_is_tried_again_takes_old_words_along(self, run: Run, clock: FakeClock) -> None:
        """What a killed process has left goes with the commit of whoever runs its turn again and says nothing."""
        say(run, self.claimed(run), "half a")
        clock.advance(LEASE // SECOND + 1)
        commit(run, decided(self.claim_one(run, "t2"), "reply"))
        assert run(rows) == []

    @pytest.mark.parametrize("spoke", [False, True])
    def test_a_commit_leaves_other_streams_words_alone(self, run: Run, spoke: bool) -> None:
        """A commit, whether its turn spoke or not, removes nobody else's words."""
        self.publish(run, event(1), event(1, OTHER))
        one, two = sorted(self.claim(run), key=lambda held: held.stream)
        say(run, two, "still here")
        if spoke:
            say(run, one, "gone")
        commit(run, decided(one, "reply", spoke=spoke))
        assert run(rows) == [(OTHER, "still here")]

    def test_words_of_a_run_that_ended_otherwise_are_removed(self, run: Run) -> None:
        """What is over is removed by its run: the words that a later run of the stream says stay."""
        first = self.claimed(run)
        say(run, first, "one")
        run(queues.release, hold(first))
        assert heard(run) is None
        second = self.claim_one(run, "t2")
        assert second.attempt == 1
        say(run, second, "two")
        assert run(partials.carry, [], {first.run_id: STREAM}) == set()
        assert heard(run) == "two"
        run(queues.release, hold(second))
        assert run(partials.carry, [], {second.run_id: STREAM}) == set()
        assert run(rows) == []

    def test_nothing_to_carry_is_no_error(self, run: Run) -> None:
        """Nothing said and nothing over writes nothing."""
        assert run(partials.carry, [], {}) == set()
        assert run(partials.carry, [], {"no such run": STREAM}) == set()


class TestNews(Uses):
    """The look for news of many streams."""

    def log(self, run: Run, stream: str, count: int) -> None:
        run(append_next, stream, *(entry(f"n{number}") for number in range(count)))

    def test_entries_behind_the_place_are_news(self, run: Run) -> None:
        """Entries behind the place that was asked for are told in order, with the stream's version."""
        self.log(run, STREAM, 4)
        found = news(run, after=2)
        assert found is not None
        assert [(one.stream, one.seq, one.key) for one in found.entries] == [(STREAM, 3, "n2"), (STREAM, 4, "n3")]
        assert (found.upto, found.version, found.deleted) == (4, 4, False)
        assert news(run, after=4) is None
        assert news(run, after=5) is None
        assert news(run, "load/none") is None

    def test_each_question_gets_its_own_answer(self, run: Run) -> None:
        """Several who stand at different places of one stream, and others, are answered in one look."""
        self.log(run, STREAM, 3)
        self.log(run, OTHER, 1)
        asked = [Asked(STREAM, 0), Asked(OTHER, 0), Asked(STREAM, 2), Asked(OTHER, 1)]
        found = run(watching.look, asked)
        assert {one: [e.seq for e in told.entries] for one, told in found.items()} == {
            asked[0]: [1, 2, 3], asked[1]: [1], asked[2]: [3],
        }  # fmt: skip

    def test_a_look_is_bounded(self, run: Run) -> None:
        """A look tells of so many entries, to those who asked first; what is left out is told by the next looks."""
        self.log(run, STREAM, 5)
        self.log(run, OTHER, 5)
        places = {STREAM: 0, OTHER: 0}
        told: list[tuple[str, int]] = []
        while asked := [Asked(stream, place) for stream, place in places.items() if place < 5]:
            found = run(watching.look, asked, limit=3)
            assert sum(len(one.entries) for one in found.values()) <= 3
            for one, news_ in found.items():
                assert (news_.upto == news_.version) == (news_.upto == 5)
                told += [(one.stream, e.seq) for e in news_.entries]
                places[one.stream] = news_.upto
        assert told == [(stream, seq) for stream in (STREAM, OTHER) for seq in range(1, 6)]

    def test_words_are_told_beside_a_full_look(self, run: Run) -> None:
        """Where there is no room for entries any more, words of streams without new entries are told all the same."""
        self.publish(run, event(1, OTHER))
        held = self.claim_one(run)
        say(run, held, "hello")
        self.log(run, STREAM, 2)
        found = run(watching.look, [Asked(STREAM, 0), Asked(OTHER, 0)], limit=2)
        assert [one.partial and one.partial.text for one in found.values()] == [None, "hello"]

    def test_a_deletion_is_news(self, run: Run) -> None:
        """That a stream was deleted is told whatever was asked for, beside the entries that it had."""
        self.log(run, STREAM, 2)
        run(delete_stream, STREAM)
        for after in (1, 2):
            found = news(run, after=after)
            assert found is not None
            assert ([one.seq for one in found.entries], found.deleted) == ([2][after - 1 :], True)


def test_words_wait_for_nobody(database: Database) -> None:
    """While somebody has a claim locked, the words of others are written, and this one's the next time."""
    uses = Uses()

    def run(fn: Any, *args: Any, **kwargs: Any) -> Any:
        return database.transact(lambda conn, *, now: fn(conn, *args, now=now, **kwargs))

    uses.publish(run, event(1), event(1, OTHER))
    one, two = sorted(uses.claim(run), key=lambda held: held.stream)
    said = [says(one, "a"), says(two, "b")]
    if database.is_sqlite:  # its one lock is waited for, for a moment: nobody holds it for longer than a transaction
        assert run(partials.carry, said, {}) == {one.run_id, two.run_id}
        return
    with database.engine.begin() as conn:
        assert _LOCK(database.bind(conn), stream=STREAM).scalars() == [STREAM]
        assert run(partials.carry, said, {}) == {two.run_id}
    assert run(partials.carry, said, {}) == {one.run_id, two.run_id}
