"""Random lives of dispatches, through the public verbs and the harness's clock, beside a small model of them.

After each step every dispatch must stand as the model says: status, reason, attempt, epoch, due time, deadline and the
whole history. Examples are the same in each run of one version of Hypothesis. Lanes and gates
are not in it.
"""

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from postroad import Dispatch, GiveUp, KeyConflict, OutcomeUnknown, Postroad, PostroadError, Retry, RetryLater
from postroad.engine.declarations import Sender
from postroad.model.clock import moment
from postroad.model.lifecycle import Reason
from postroad.model.rows import DispatchClaim, Settlement
from postroad.store import dispatch_claims, settle
from postroad.testing import Harness
from tests.engine.conftest import Open
from tests.engine.lifecycle_model import ENDED, LEASE, SECOND, Life, Rules

KINDS = {
    "mail": Rules(attempts=3, first=60, cap=100),
    "parked": Rules(attempts=3, first=60, cap=100, parks=True),
    "hurried": Rules(attempts=6, first=40, cap=40, budget=100),
}
# What a sender does, and what that comes to; of "later" with the pause that it asks for.
WORDS = {"ok": "ok", "fail": "failed", "later": "failed", "odd": "failed", "give_up": "permanent", "unsure": "unknown"}
LATER = 90
KEYS = ("a", "b", "c")
Op = tuple[Any, ...]

key = st.sampled_from(KEYS)
kind = st.sampled_from([*KINDS])
force = st.booleans()
seconds = st.sampled_from([0, 1, 14, 15, 40, 60, 90, 100, 101, 300])
words = st.sampled_from([*WORDS])
results = st.sampled_from(["ok", "failed", "permanent", "unknown", "cut_short", "unsent"])
steps = st.one_of(
    st.tuples(st.just("send"), key, kind, st.booleans(), st.none() | seconds, st.sampled_from([0, 0, 30])),
    st.tuples(st.just("plan"), key, st.lists(words, min_size=1, max_size=4)),
    st.tuples(st.just("advance"), seconds),
    st.tuples(st.just("advance"), seconds),
    st.tuples(st.just("claim"), kind),
    st.tuples(st.just("outage"), seconds),
    st.tuples(st.just("late"), st.integers(0, 5), results),
    st.tuples(st.just("ack"), key, st.sampled_from([0, 0, -1, 1])),
    st.tuples(st.just("withdraw"), key),
    st.tuples(st.just("operator withdraw"), key),
    st.tuples(st.just("retry"), key, force, st.none() | seconds),
    st.tuples(st.just("resolve"), key, st.sampled_from(["sent", "resend", "discard"]), force),
    st.tuples(st.just("replay"), key),
    st.tuples(st.just("purge"), key, force),
)  # fmt: skip

SENT: Op = ("send", "a", "mail", False, None, 0)
ASKING: Op = ("send", "b", "mail", True, None, 0)
PARKED: Op = ("send", "c", "parked", False, None, 0)
HURRIED: Op = ("send", "a", "hurried", False, None, 0)
FAILS = ["fail", "fail", "fail"]
RETRIES: list[Op] = [("retry", "c", False, None), ("retry", "c", True, 1)]
PLAN: Op = ("plan", "c", ["unsure"])
LOSE: Op = ("claim", "mail")
LEASES: Op = ("outage", 15)
ACKS: list[Op] = [("ack", "b", -1), ("ack", "b", 1), ("ack", "b", 0), ("ack", "b", 0)]
# Each comes to reasons that random lives seldom come to.
LIVES: tuple[list[Op], ...] = (
    [SENT, ("plan", "a", FAILS), ("advance", 300), ("retry", "a", False, None), ("advance", 0), ("replay", "a")],
    [SENT, ("plan", "a", ["give_up"]), ("advance", 0), ("replay", "a"), ("withdraw", "a'"), ("retry", "a'", False, 0)],
    [SENT, LOSE, LEASES, LOSE, LEASES, ("late", 0, "failed"), LOSE, LEASES, ("advance", 0), ("late", 2, "ok")],
    [SENT, LOSE, ("late", 0, "cut_short"), ("advance", 0), ("late", 0, "ok"), ("purge", "a", False), SENT],
    [("send", "a", "mail", False, 14, 0), LOSE, ("advance", 15), ("send", "a", "parked", False, None, 0)],
    [ASKING, ("advance", 300), ("advance", 100), ("ack", "b", 0), ("retry", "b", False, 40), *ACKS],
    [ASKING, LOSE, ("ack", "b", 0), ("late", 0, "ok"), ("advance", 60), ("purge", "b", False), ("ack", "b", 0)],
    [PARKED, ("claim", "parked"), ("advance", 15), ("late", 0, "ok"), *RETRIES],
    [PARKED, ("claim", "parked"), ("advance", 15), ("late", 0, "unsent"), ("resolve", "c", "resend", False)],
    [PARKED, PLAN, ("advance", 0), ("resolve", "c", "sent", False), ("resolve", "c", "resend", True), *RETRIES],
    [PARKED, PLAN, ("advance", 0), ("resolve", "c", "discard", False), *RETRIES],
    [HURRIED, ("plan", "a", ["later", "fail", "fail"]), ("advance", 300)],
)


class World:
    """An app in a harness, whose senders do as they are told, key by key."""

    def __init__(self, open_harness: Callable[[Postroad], Harness]) -> None:
        self.post = Postroad(secret_key="the secret of this test")
        self.plans: dict[str, list[str]] = {}
        self.reasons: set[str] = set()
        self.numbers = count()
        for name, rules in KINDS.items():
            retry = Retry(attempts=rules.attempts, first=rules.first, cap=rules.cap, budget=rules.budget, jitter=False)
            how: Any = "park" if rules.parks else "resend"
            self.post.sender(name, timeout=10, lease=LEASE / SECOND, retry=retry, on_unknown=how)(self.send)
        self.harness = open_harness(self.post)

    def send(self, d: Dispatch[Any]) -> Any:
        """Do what is planned next for this key, else what every sender would like to."""
        planned = self.plans.get(d.key)
        match planned.pop(0) if planned else "ok":
            case "fail":
                raise RetryLater("not now")
            case "later":
                raise RetryLater("not for a while", after=LATER)
            case "give_up":
                raise GiveUp("never")
            case "unsure":
                raise OutcomeUnknown("who knows")
            case "odd":
                return 5
            case _:
                return None


class Play:
    """One example: the same steps through the product and through the model."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.post = world.post
        self.prefix = f"{next(world.numbers)}/"
        self.lives: dict[str, Life] = {}
        self.ids: dict[str, str] = {}
        self.claims: list[DispatchClaim] = []

    @property
    def now(self) -> int:
        """The harness's time."""
        return self.world.harness.clock.wall()

    def take(self, op: Op) -> None:
        """One step, in both; then both are compared."""
        name, *given = op
        getattr(self, "do_" + name.replace(" ", "_"))(*given)
        for key, life in self.lives.items():
            self.compare(key, life, op)

    def compare(self, key: str, life: Life, op: Op) -> None:
        """Every dispatch stands as the model says."""
        self.world.reasons.update(reason for *_, reason in life.steps)
        row = self.post.dispatches.get(self.prefix + key)
        if life.gone:
            assert row is None, op
            return
        assert row is not None, op
        due = None if life.due is None else moment(life.due)
        expires = None if life.expires is None else moment(life.expires)
        expected = (life.status, life.reason, life.attempt, life.attempts_max, life.epoch, due, expires)
        assert (row.status, row.reason, row.attempt, row.max_attempts, row.epoch, row.due_at, row.expires_at) == (
            expected
        ), f"{key} after {op}"
        told = [(step["from_status"], step["to_status"], step["reason_code"]) for step in row.history]
        assert told == life.steps, f"{key} after {op}"

    def life(self, key: str) -> Life | None:
        """The model's dispatch, unless it is gone: to an operator it is as if it had never been."""
        found = self.lives.get(key)
        return None if found is None or found.gone else found

    def do_send(self, key: str, kind: str, ack: bool, expires: int | None, after: int) -> None:
        """The same key once more is what there is, also of what is gone; of another kind it is a conflict."""
        known, conflict = self.lives.get(key), False
        try:
            with self.post.begin() as tx:
                sent = tx.send(kind, {}, key=self.prefix + key, ack=ack, expires=expires, after=after)
        except KeyConflict:
            conflict = True
        assert conflict == (known is not None and known.kind != kind)
        if conflict:
            return
        assert sent.created == (known is None)
        assert sent.id == self.ids.setdefault(key, sent.id)
        if known is None:
            ends = None if expires is None else self.now + expires * SECOND
            life = Life(kind, KINDS[kind], ack, self.now + after * SECOND, ends)
            life.attempts_max = life.rules.attempts  # this app knows them; for who does not, the first claim does
            self.lives[key] = life

    def do_plan(self, key: str, words: list[str]) -> None:
        """What its sender will do."""
        self.world.plans[self.prefix + key] = [*words]

    def do_advance(self, length: int) -> None:
        """Let time pass; loops run whenever anything is due."""
        until = self.now + length * SECOND
        plans = {key: [*words] for key, words in self.world.plans.items()}
        self._pass(self.now, until, plans)
        self.world.harness.advance(length)
        assert self.now == until

    def do_outage(self, length: int) -> None:
        """Let time pass while no process is there."""
        self.world.harness.clock.advance(length)

    def _pass(self, now: int, until: int, plans: dict[str, list[str]]) -> None:
        """The model's time."""
        while True:
            moments = {key: at for key, life in self.lives.items() if (at := life.moment()) is not None and at <= until}
            if not moments:
                return
            key = min(moments, key=lambda key: moments[key])
            now = max(now, moments[key])
            life = self.lives[key]
            if life.begin(now, "ours"):
                planned = plans.get(self.prefix + key)
                word = planned.pop(0) if planned else "ok"
                came = WORDS[word] if word != "unsure" or life.rules.parks else "failed"
                life.end(came, now, LATER if word == "later" else 0)

    def do_claim(self, kind: str) -> None:
        """A process claims what is due of a kind, and dies."""
        token = self.post.entropy.token()
        sender = self.post.declared(kind)
        assert isinstance(sender, Sender)
        won = self.world.harness._opened().database.transact(
            dispatch_claims.claim, sender.policy, names=[kind], token=token, limit=1_000
        )
        ours = [claim for claim in won.claims if claim.key.startswith(self.prefix)]
        self.claims += ours
        due = [key for key, life in self.lives.items() if life.kind == kind and self._is_due(life)]
        begun = {key for key in due if self.lives[key].begin(self.now, token)}
        assert {claim.key.removeprefix(self.prefix) for claim in ours} == begun

    def _is_due(self, life: Life) -> bool:
        # A claim looks at due times only; what expires before it is due is the pump's to end.
        return not life.gone and life.status not in ENDED and life.due is not None and life.due <= self.now

    def do_late(self, place: int, result: Any) -> None:
        """A process that was thought dead says what its attempt came to."""
        if place >= len(self.claims):
            return
        claim = self.claims[place]
        sender = self.post.declared(claim.kind)
        assert isinstance(sender, Sender)
        unsent = result == "unsent"  # it had not begun
        given = Settlement(
            id=claim.id, token=claim.token, attempt=claim.attempt, epoch=claim.epoch, policy=sender.policy,
            result="failed" if unsent else result, error="late", unsent=unsent,
        )  # fmt: skip
        self.world.harness._opened().database.transact(settle.settle, [given])
        life = self.life(claim.key.removeprefix(self.prefix))
        if life is not None:
            life.settle(claim.token, result, self.now)

    def do_ack(self, key: str, epochs: int) -> None:
        """Its consumer presents the token of this epoch, or of another one."""
        life = self.lives.get(key)
        if life is None:
            return
        epoch = max(0, life.epoch + epochs)
        try:
            with self.post.begin() as tx:
                tx.ack(self.post.keyring.token(self.ids[key], epoch))
        except PostroadError as error:
            came = type(error).__name__
        else:
            came = ""
        assert came == life.acknowledge(epoch)

    def do_withdraw(self, key: str) -> None:
        """The program no longer wants it."""
        with self.post.begin() as tx:
            gone = tx.withdraw(self.prefix + key)
        life = self.life(key)
        assert gone.done == (life is not None and life.withdraw())

    def do_operator_withdraw(self, key: str) -> None:
        """A person no longer wants it."""
        did = self.post.dispatches.withdraw(self.prefix + key, actor="ann")
        life = self.life(key)
        assert bool(did) == (life is not None and life.withdraw()), did

    def do_retry(self, key: str, force: bool, expires: int | None) -> None:
        """A person has it sent again."""
        did = self.post.dispatches.retry(self.prefix + key, actor="ann", force=force, expires=expires)
        life = self.life(key)
        assert bool(did) == (life is not None and life.retry(self.now, force=force, expires=expires)), did

    def do_resolve(self, key: str, how: Any, force: bool) -> None:
        """A person says what became of it."""
        did = self.post.dispatches.resolve(self.prefix + key, how, actor="ann", force=force)
        life = self.life(key)
        assert bool(did) == (life is not None and life.resolve(how, self.now, force=force)), did

    def do_replay(self, key: str) -> None:
        """A person sends what it says once more, under another key."""
        other = f"{key}'"
        did = self.post.dispatches.replay(self.prefix + key, actor="ann", key=self.prefix + other)
        life = self.life(key)
        assert bool(did) == (life is not None and life.status in ENDED and other not in self.lives), did
        if did and life is not None:
            assert did.id is not None
            self.ids[other] = did.id
            self.lives[other] = Life(life.kind, life.rules, life.ack, self.now, None)

    def do_purge(self, key: str, force: bool) -> None:
        """A person removes it."""
        did = self.post.dispatches.purge(self.prefix + key, actor="ann", force=force)
        life = self.life(key)
        assert bool(did) == (life is not None and life.purge(force=force)), did

    def leave(self) -> None:
        """Nothing of this example is left to the next one."""
        self.world.plans.clear()
        for key in self.lives:
            self.post.dispatches.purge(self.prefix + key, actor="ann", force=True)


@pytest.mark.parametrize("place", ["sqlite", "postgres"], indirect=True)
def test_lives_go_as_the_model_says(request: pytest.FixtureRequest, harness: Open, place: dict[str, Any]) -> None:
    """Whatever happens to dispatches, in whatever order: where they stand, why, and their history are the model's."""
    world = World(lambda post: harness(post, senders="run"))
    few = "schema" in place

    @settings(
        max_examples=15 if few else 60, deadline=None, derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )  # fmt: skip
    @given(ops=st.lists(steps, min_size=5, max_size=30))
    def lives(ops: list[Op]) -> None:
        play = Play(world)
        try:
            for op in ops:
                play.take(op)
        finally:
            play.leave()

    for ops in LIVES:
        lives = example(ops=ops)(lives)
    lives()
    assert world.reasons == {*Reason} - {Reason.HELD}, "a reason that no life came to"
