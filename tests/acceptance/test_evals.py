"""Evals: the freight scenarios on both databases, and a runner that sees what is wrong."""

import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from postroad.agent import scenarios
from postroad.agent.scenarios import BadScenario
from postroad.demo import evaluate

ROOT = Path(__file__).parent.parent.parent
FILES = sorted((ROOT / "examples" / "freight" / "scenarios").glob("*.yaml"))
BASE = """
name: A trial
app: {app}
start: 2026-01-05T07:00Z
steps:
  - at: "07:01"
    publish:
      - {{stream: load/1, kind: LocationPing, key: p, data: {{risk: high, client: A, driver: "+15550100001"}}}}
    expect: {expect}
"""


@pytest.fixture(params=["sqlite", "postgres"])
def fresh(request: pytest.FixtureRequest) -> Iterator[Callable[[], str]]:
    """Makes empty databases."""
    if request.param == "sqlite":
        with evaluate.on_sqlite() as made:
            yield made
    else:
        with evaluate.on_postgres(request.getfixturevalue("postgres_url")) as made:
            yield made


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_scenario(file: Path, fresh: Callable[[], str]) -> None:
    """What the scenario's name says."""
    report = evaluate.evaluate(file, fresh)
    assert report.passed, str(report)


def test_what_the_scenarios_must_cover_is_there() -> None:
    """The scenarios that the ADR and its README call for exist."""
    stems = " ".join(file.stem for file in FILES)
    for part in (
        "diagram", "reply_before_step_2", "reply_after_step_2", "late_timer", "double_timer", "stale_timer",
        "dead_sms", "dead_hero_task", "dead_update_stage", "duplicate_key", "delivered_beside_failed",
        "backlog_and_budget", "fourteen_days_with_a_deploy",
    ):  # fmt: skip
        assert part in stems


def trial(folder: Path, expect: str, app: str = "postroad.demo.freight:release_1") -> Path:
    file = folder / "trial.yaml"
    file.write_text(BASE.format(expect=expect, app=app))
    return file


WRONG = {
    "{}": r"sent send_sms: expected \[\], found \['1/A/1/send_sms'\]",
    "{sent: {send_sms: [{key: 1/A/1/send_sms, attempt: 2}]}}": "expected .*'attempt': 2.*found .*'attempt': 1",
    "{sent: {send_sms: [{key: 1/A/1/send_sms, body: {text: no}}]}}": "found .*you may be late",
    "{sent: {send_sms: [1/A/1/send_sms], create_hero_task: [x]}}": r"create_hero_task: expected \['x'\], found \[\]",
    "{sent: {send_sms: [1/A/1/send_sms]}, dead: {send_sms: [y]}}": r"dead send_sms: expected \['y'\], found \[\]",
    "{sent: {send_sms: [1/A/1/send_sms]}, alerts: [a b]}": r"alerts: expected \['a b'\], found \[\]",
    '{sent: {send_sms: [1/A/1/send_sms]}, timers: {"tmr:1:A:1": "07:32"}}': "timers: .*07:32.*found .*07:31:00",
    "{sent: {send_sms: [1/A/1/send_sms]}, log: {load/1: [LocationPing]}}": "log of load/1: expected .*found",
    "{sent: {send_sms: [1/A/1/send_sms]}, inbox: {load/1: 1}}": "inbox of load/1: expected 1, found 0",
}


@pytest.mark.parametrize(("expect", "said"), WRONG.items(), ids=range(len(WRONG)))
def test_a_wrong_expectation_is_found(tmp_path: Path, expect: str, said: str) -> None:
    """Each kind of expectation can fail; the report says what was found, and the timeline follows."""
    with evaluate.on_sqlite() as fresh:
        report = evaluate.evaluate(trial(tmp_path, expect), fresh)
    assert not report.passed
    assert any(re.search(said, line) for line in report.failures), report.failures
    assert "timeline:" in str(report)
    assert "01-05 07:01:00  log   load/1 #1 LocationPing p" in str(report)


def test_main_says_what_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code is 0 only if all passed; a failing scenario prints its timeline, a bad file its name."""
    bad = tmp_path / "bad.yaml"
    bad.write_text("name: [")
    assert evaluate.main([FILES[0]]) == 0
    assert evaluate.main([FILES[0], trial(tmp_path, "{}"), bad]) == 1
    said = capsys.readouterr().out
    assert "FAIL  A trial" in said
    assert f"FAIL  {bad}" in said
    assert "1 of 3 scenarios passed" in said


@pytest.mark.parametrize(
    "app", ["nowhere:made", "postroad.demo.freight:missing", "postroad.demo.asks:letters", "postroad.demo.asks:Load"]
)
def test_an_app_that_is_none_is_refused(tmp_path: Path, app: str) -> None:
    """`app` must name a function that makes a Postroad."""
    with evaluate.on_sqlite() as fresh, pytest.raises(BadScenario, match=re.escape(app)):
        evaluate.evaluate(trial(tmp_path, "{}", app), fresh)


def test_what_an_app_raises_is_a_failure_with_its_timeline(tmp_path: Path) -> None:
    """An exception that nobody planned fails the scenario and shows where it was raised."""
    with evaluate.on_sqlite() as fresh:
        report = evaluate.evaluate(trial(tmp_path, "{}", f"{__name__}:broken"), fresh)
    assert any("ZeroDivisionError" in line for line in report.failures)


def broken() -> object:
    """An app whose turns divide by zero."""
    from postroad import Postroad, Turn

    post = Postroad()

    @post.turn("load")
    def decide(turn: Turn) -> None:
        raise ZeroDivisionError

    return post


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("steps: []", "name"),
        ("name: x\napp: a:b\nstart: 2026-01-05T07:00Z\nsteps: [{at: '07:00', expct: {}}]", "expct"),
        ("- a\n- b", "Expected `object`"),
        ("name: [", "while parsing"),
    ],
)
def test_a_misspelt_scenario_is_refused(tmp_path: Path, text: str, said: str) -> None:
    """What a scenario has no place for is named, never ignored."""
    file = tmp_path / "x.yaml"
    file.write_text(text)
    with pytest.raises(BadScenario, match=said):
        scenarios.load(file)


def test_scalars_are_what_they_look_like(tmp_path: Path) -> None:
    """A time without quotes is no number of minutes, and `on` and `no` are words."""
    file = tmp_path / "x.yaml"
    data = "{a: 10:30, b: on, c: no, d: true, e: -3, f: 0.5, g: null, h: 0123x}"
    event = f"{{stream: s/1, kind: k, key: e, data: {data}}}"
    step = f"{{at: 10:30, publish: [{event}]}}"
    file.write_text(f"name: x\napp: a:b\nstart: 2026-01-05T07:00Z\nsteps: [{step}]")
    (step,) = scenarios.load(file).steps
    assert step.at == "10:30"
    assert step.publish[0].data == {
        "a": "10:30", "b": "on", "c": "no", "d": True, "e": -3, "f": 0.5, "g": None, "h": "0123x",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("08:00", "2026-01-05T08:00"),
        ("07:30", "2026-01-05T07:30"),
        ("07:29", "2026-01-06T07:29"),
        ("07:30:15", "2026-01-05T07:30:15"),
        ("+90s", "2026-01-05T07:31:30"),
        ("+14d", "2026-01-19T07:30"),
        ("2026-02-01T00:00Z", "2026-02-01T00:00"),
        ("2026-02-01T00:00+02:00", "2026-01-31T22:00"),
    ],
)
def test_times(said: str, expected: str) -> None:
    """A time of day is the next such moment; spans count from the step before; dates are as they are."""
    now = datetime(2026, 1, 5, 7, 30, tzinfo=UTC)
    assert scenarios.moment(said, now) == datetime.fromisoformat(expected).replace(tzinfo=UTC)


def test_no_time_is_refused() -> None:
    """What is no time is named."""
    with pytest.raises(BadScenario, match="'soon' is no time"):
        scenarios.moment("soon", datetime(2026, 1, 5, tzinfo=UTC))


def test_time_does_not_run_backwards(tmp_path: Path) -> None:
    """A step in the past fails, with what had happened until then."""
    file = trial(tmp_path, "null")
    file.write_text(file.read_text() + "  - at: 2026-01-04T00:00Z\n")
    with evaluate.on_sqlite() as fresh:
        report = evaluate.evaluate(file, fresh)
    assert any("2026-01-04T00:00Z is over" in line for line in report.failures)
