"""The freight agent: what it decides, what its gate refuses, what it declares."""

import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from postroad import GiveUp, Postroad, Turn
from postroad.demo import asks, kinds
from postroad.demo.actions import (
    Action,
    CallOff,
    CreateHeroTask,
    FollowUp,
    PostHeroSlack,
    SendSms,
    UpdateStage,
    objection,
)
from postroad.demo.app import freight
from postroad.demo.asks import Ask, Load
from postroad.demo.freight import Carrier, handlers, release_1, release_2
from postroad.demo.journal import Follower, Journal
from postroad.demo.kinds import FIRST, HERO, REPLY, SECOND, SLACK, STAGE, DriverSms
from postroad.demo.policy import Decider, Failed, Inbound, Pinged, Plan, Replied, RulePolicy, TimerRang, plan
from postroad.demo.services import Script, Server, Services
from postroad.store import runs
from postroad.testing import Harness

PHONE = "+15550100207"
STREAM = "load/481207"


def ask(step: int, *, short: str = "A", is_open: bool = True, client: str = "A") -> Ask:
    return Ask("ask:eta_request:ping_0700", short, client, PHONE, step, is_open)


def load(*known: Ask) -> Load:
    return Load().after(known)


class TestPolicy:
    def test_a_high_risk_opens_an_ask(self) -> None:
        """The first step: an SMS to the driver, and a follow-up behind it."""
        decided = plan("481207", Load(), Pinged("ping_0700", "A", PHONE))
        opened = ask(1)
        assert decided.asks == (opened,)
        assert [type(action) for action in decided.actions] == [SendSms, FollowUp]
        assert decided.actions[0].about == opened

    def test_an_open_ask_is_not_asked_again(self) -> None:
        """A second risk while an ask is open changes nothing."""
        decided = plan("481207", load(ask(1)), Pinged("ping_0800", "A", PHONE))
        assert (decided.actions, decided.asks) == ((), ())
        assert "open already" in decided.reason

    def test_a_reply_resolves_the_newest_open_ask(self) -> None:
        """The follow-up is called off, the stage updated, and the words are passed on; keyed by the event."""
        decided = plan("481207", load(ask(1)), Replied("sms_1", "16:30"))
        assert decided.asks == (ask(1, is_open=False),)
        assert [type(action) for action in decided.actions] == [CallOff, UpdateStage, PostHeroSlack]
        assert [action.about for action in decided.actions[1:]] == [None, None]

    def test_a_reply_after_the_last_step_calls_nothing_off(self) -> None:
        """There is no timer behind the last step."""
        decided = plan("481207", load(ask(3)), Replied("sms_1", "16:30"))
        assert [type(action) for action in decided.actions] == [UpdateStage, PostHeroSlack]

    def test_an_unasked_reply_is_passed_on(self) -> None:
        """Without an open ask a driver's words still reach a person."""
        decided = plan("481207", load(ask(1, is_open=False)), Replied("sms_2", "flat tyre"))
        assert [type(action) for action in decided.actions] == [PostHeroSlack]

    @pytest.mark.parametrize(
        ("step", "expected"),
        [(1, [SendSms, FollowUp]), (2, [CreateHeroTask, UpdateStage])],
    )
    def test_a_timer_takes_the_next_step(self, step: int, expected: list[type]) -> None:
        """SMS again after the first, a person after the second."""
        decided = plan("481207", load(ask(step)), TimerRang("evt:x", "A", step))
        assert [type(action) for action in decided.actions] == expected
        assert decided.asks == (ask(step + 1),)

    @pytest.mark.parametrize(
        "state",
        [load(), load(ask(2)), load(ask(1, is_open=False)), load(ask(1, short="B"))],
        ids=["unknown", "step already passed", "resolved", "another ask"],
    )
    def test_a_stale_timer_is_a_noop(self, state: Load) -> None:
        """Nothing happens for a timer whose ask is resolved, or whose step was taken."""
        decided = plan("481207", state, TimerRang("evt:x", "A", 1))
        assert (decided.actions, decided.asks) == ((), ())
        assert "stale" in decided.reason

    def test_a_failure_makes_an_urgent_task(self) -> None:
        """A person hears of an SMS that did not arrive, however long its error is."""
        decided = plan("481207", load(ask(1)), Failed("out:x", "481207/A/1/send_sms", "send_sms", "e" * 900))
        (task,) = decided.actions
        assert isinstance(task, CreateHeroTask)
        assert task.urgent
        assert objection(task) is None


class TestIds:
    def test_letters_count_on(self) -> None:
        """The short names of a load's asks go from A to Z, then AA."""
        assert [asks.letters(n) for n in (0, 1, 25, 26, 51, 52, 701, 702)] == [
            "A", "B", "Z", "AA", "AZ", "BA", "ZZ", "AAA",
        ]  # fmt: skip

    def test_ids_are_those_of_the_adr(self) -> None:
        """Ask, action and timer are named as the ADR names them."""
        opened = Load().opened("ping_0700", "A", PHONE)
        assert (opened.id, opened.short) == ("ask:eta_request:ping_0700", "A")
        assert asks.action_key("481207", ask(1), "send_sms") == "481207/A/1/send_sms"
        assert asks.action_key("481207", "ping_0700", "create_hero_task") == "481207/ping_0700/create_hero_task"
        assert asks.timer_key("481207", ask(1)) == "tmr:481207:A:1"

    @pytest.mark.parametrize(("client", "minutes"), [("A", 30), ("B", 60), ("C", 45), ("new", 30)])
    def test_each_client_has_its_wait(self, client: str, minutes: int) -> None:
        """Clients A, B and C wait 30, 60 and 45 minutes between attempts; the last step has no wait."""
        assert ask(1, client=client).wait_minutes == minutes
        assert ask(3, client=client).wait_minutes is None


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        (SendSms(PHONE, "ETA?"), None),
        (SendSms("ask the yard", "ETA?"), "not a phone number"),
        (SendSms(PHONE + "\n", "ETA?"), "not a phone number"),
        (SendSms(PHONE, "  "), "text is empty"),
        (SendSms(PHONE, "x" * 481), "longer than 480"),
        (CreateHeroTask("call"), None),
        (CreateHeroTask("x" * 201), "longer than 200"),
        (PostHeroSlack(""), "text is empty"),
        (UpdateStage("eta_confirmed"), None),
        (UpdateStage("teleported"), "no such stage"),
        (FollowUp(ask(1)), None),
        (FollowUp(ask(3)), "the last one"),
        (CallOff(ask(3)), None),
    ],
)
def test_the_gate(action: Action, reason: str | None) -> None:
    """The gate says why an action must not be carried out."""
    said = objection(action)
    assert said is None if reason is None else said is not None and reason in said


@dataclass
class Proposes:
    """A decider that always has the same idea, and counts how often it was asked."""

    idea: Plan
    asked: list[Inbound] = field(default_factory=list)

    async def decide(self, turn: Turn, load: Load, inbound: Inbound) -> Plan:
        self.asked.append(inbound)
        return self.idea


def app(decider: Decider, carrier: Carrier | None = None) -> Postroad:
    post = Postroad()
    post.include(handlers(FIRST, decider=decider, carrier=carrier))
    return post


def ping(post: Postroad, key: str = "ping_0700", *, risky: bool = True) -> None:
    with post.begin() as tx:
        tx.publish(STREAM, FIRST.ping, FIRST.ping_body(risky=risky, client="A", driver=PHONE), key=key)


class TestAgent:
    def test_another_decider_fits(self) -> None:
        """Whoever decides, the gate looks: what it refuses is recorded and a person told, the rest goes out."""
        idea = Plan("a model's idea", (UpdateStage("teleported"), PostHeroSlack("hello"), SendSms("?", "?")))
        with Harness(app(Proposes(idea))) as h:
            ping(h.post)
            h.drain()
            assert [d.key for d in h.sent(SLACK)] == ["481207/ping_0700/post_hero_slack"]
            (task,) = h.sent(HERO)
            assert task.key == "481207/ping_0700/create_hero_task"
            assert "UpdateStage refused, no such stage" in task.body.title
            assert not h.sent(STAGE)
            decided = h.entries(STREAM)[1].data
            assert [r["action"] for r in decided["refused"]] == ["UpdateStage", "SendSms"]

    def test_a_task_that_was_decided_is_not_doubled(self) -> None:
        """If the decision holds a task of its own for the event, a refusal adds no second one under its key."""
        idea = Plan("both", (CreateHeroTask("call"), UpdateStage("teleported")))
        with Harness(app(Proposes(idea))) as h:
            ping(h.post)
            h.drain()
            assert [d.body.title for d in h.sent(HERO)] == ["call"]

    def test_filtered_events_ask_no_decider(self) -> None:
        """A delivered outcome and a low risk are two entries each, and the decider is not called."""
        decider = Proposes(Plan("noted", (PostHeroSlack("hello"),)))
        with Harness(app(decider)) as h:
            ping(h.post)
            ping(h.post, "ping_0701", risky=False)
            h.drain()
            assert [inbound.event for inbound in decider.asked] == ["ping_0700"]
            found = [entry.kind for entry in h.entries(STREAM)]
            assert found.count("postroad.noop") == 2

    def test_events_of_one_turn_build_on_each_other(self) -> None:
        """Of two risks and an answer in one set, one ask is opened and answered."""
        with Harness(release_1()) as h:
            ping(h.post)
            ping(h.post, "ping_0701")
            with h.post.begin() as tx:
                tx.publish(STREAM, REPLY, DriverSms("16:30"), key="sms_1")
            h.drain()
            reasons = [e.data["reason"] for e in h.entries(STREAM) if e.kind == "DecisionRecorded"]
            assert [reason.partition(":")[0] for reason in reasons] == [
                "the risk is high", "high risk, but ask A is open already", "the driver answered ask A",
            ]  # fmt: skip

    def test_a_turn_has_two_minutes(self) -> None:
        """Decision and delivery together stay under five minutes."""
        assert release_1()._registry.deciders["load"].timeout == 120_000_000

    def test_the_second_release_reads_what_the_first_wrote(self) -> None:
        """Payloads of version 1 come out as today's."""
        old_ping = FIRST.ping.encode(FIRST.ping_body(risky=True, client="A", driver=PHONE))
        assert SECOND.ping.decode(old_ping, 1) == kinds.ScoredPing(0.9, "A", PHONE)
        assert kinds.is_risky(SECOND.ping.decode(old_ping, 1))
        old_sms = FIRST.sms.encode(FIRST.sms_body("ETA?"))
        assert SECOND.sms.decode(old_sms, 1) == kinds.SignedSms("ETA?", kinds.SENDER)

    def test_importing_the_demo_s_app_connects_to_nothing(self) -> None:
        """Both releases can be made without a database or services."""
        assert release_2()._registry.senders.keys() == freight("http://127.0.0.1:9", 2)._registry.senders.keys()


@pytest.fixture
def services(tmp_path: Path) -> Iterator[tuple[str, Script, Follower]]:
    """The services in a thread: their URL, their script (to be filled before the first request), their journal."""
    script: Script = {}
    path = tmp_path / "journal.jsonl"
    with closing(Journal(path)) as journal, Server(Services(script, journal)) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", script, Follower(path)
        server.shutdown()
        thread.join()


class TestCarrier:
    """The senders as the demo runs them, over real HTTP, in a harness that runs real senders."""

    @pytest.mark.parametrize(
        ("words", "status", "attempts"),
        [([], "delivered", 1), (["busy", "busy"], "delivered", 3), (["refuse"], "dead_letter", 1)],
    )
    def test_answers_are_told_apart(
        self, services: tuple[str, Script, Follower], words: list[str], status: str, attempts: int
    ) -> None:
        """200 is a receipt, 5xx is tried again, 4xx is final; the services get the key and the attempt."""
        url, script, journal = services
        script["481207/A/1/send_sms"] = words
        with Harness(freight(url, 1), senders="run") as h:
            ping(h.post)
            h.advance(2.5)
            row = h.post.dispatches.get("481207/A/1/send_sms")
            assert row is not None
            assert (row.status, row.attempt) == (status, attempts)
        seen = [(line["key"], line["attempt"]) for line in journal.lines() if line["type"] == "request"]
        sms = [attempt for key, attempt in seen if key == "481207/A/1/send_sms"]
        assert sms == list(range(1, attempts + 1))
        assert ("think/481207/ping_0700", 0) in seen

    def test_lost_services_are_tried_again(self) -> None:
        """A connection that cannot be made is worth another attempt, of a send and of a turn."""
        from postroad.demo.carrier import HttpCarrier, ModelDecider

        with Harness(app(ModelDecider("http://127.0.0.1:9", RulePolicy()))) as h:
            ping(h.post)
            h.drain()
            (failed,) = h.post.database.read(runs.of_stream, STREAM)
            assert "the model is away" in (failed.error or "")
        post = app(RulePolicy(), HttpCarrier("http://127.0.0.1:9"))
        with Harness(post, senders="run") as h:
            ping(h.post)
            h.drain()
            row = h.post.dispatches.get("481207/A/1/send_sms")
            assert row is not None
            assert row.status == "pending"
            assert "ConnectError" in str(row.last_error)

    def test_a_captured_failure_is_not_an_exception(self) -> None:
        """A planned permanent failure of an SMS comes back as an event, and becomes an urgent task."""
        with Harness(release_1()) as h:
            h.fail(FIRST.sms, GiveUp("no such number"))
            ping(h.post)
            h.drain()
            (task,) = h.sent(HERO)
            assert task.key == "481207/out:481207/A/1/send_sms:dead_letter/create_hero_task"
