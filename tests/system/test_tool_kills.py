"""Processes killed at every place of a turn that calls a tool: what is done again, what is shown and logged."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from postroad import Postroad
from tests.contracts.schemas import Schemas
from tests.system.tool_kills import EFFECTS, IN_COMMIT, PLACES

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::postroad.store.sqlite_version.SQLiteVersionWarning"),
]

Found = dict[tuple[str, str], dict[str, Any]]
# Where a tool has certainly not begun, where that is not known or known to be false, and where its result is known.
NOT_BEGUN = ("queues.claim", "turn.after_claim_commit", "model", "tool.before_start")
BEGUN = ("tool.started", "tool", "tool.returned")
KNOWN = ("tool.recorded", "turn.before_commit")
COMMITTED = ("turn.after_commit",)


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Found]:
    """What came of each death, by effect and place."""
    folder = tmp_path_factory.mktemp("tools")
    if request.param == "sqlite":
        yield killed(f"sqlite:///{folder / 'app.db'}", "", folder)
        return
    url: str = request.getfixturevalue("postgres_url")
    schemas: Schemas = request.getfixturevalue("schemas")
    with schemas.lent(lambda name: migrated(url, name)) as schema:
        yield killed(url, schema, folder)


def migrated(url: str, schema: str | None) -> None:
    post = Postroad(url, schema=schema, migrate=True)
    post.check_schema()
    post.close()


def killed(url: str, schema: str, folder: Path) -> Found:
    migrated(url, schema or None)
    command = [sys.executable, "-m", "tests.system.tool_kills", url, schema, str(folder)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return {(case["effect"], case["place"]): case for case in json.loads(ran.stdout.splitlines()[-1])}


def did(case: dict[str, Any], what: str) -> int:
    return sum(one == what for one, _ in case["did"])


def kinds(case: dict[str, Any]) -> list[str]:
    return [kind for kind, _ in case["log"]]


@pytest.mark.parametrize("effect", EFFECTS)
def test_a_turn_that_had_called_nothing_is_run_again(found: Found, effect: str) -> None:
    """Before a call is recorded nothing stands in another run's way, whatever the tool may do."""
    for place in NOT_BEGUN:
        case = found[effect, place]
        assert kinds(case) == ["note", "reply"], place
        assert did(case, "tool") == 1, place


@pytest.mark.parametrize("effect", ["read", "idempotent", "keyed"])
def test_what_may_be_done_again_is_done_again(found: Found, effect: str) -> None:
    """A call whose end is not known is made again, by a keyed tool with the same key; a known result is not."""
    for place in (*BEGUN, *KNOWN):
        case = found[effect, place]
        assert kinds(case) == ["note", "reply"], place
        assert did(case, "model") == 2, place
        keys = [key for what, key in case["did"] if what == "tool"]
        assert len(keys) == (1 if place in (*KNOWN, "tool.started") else 2), place
        assert len(set(keys)) == 1, place
        assert case["operations"][-1][1] == ("reused" if place in KNOWN else "finished"), place


def test_what_must_not_be_done_again_is_shown(found: Found) -> None:
    """Once an unsafe call has begun neither tool nor handler runs again: the log says what is known, an alert tells."""
    for place in (*BEGUN, *KNOWN, *IN_COMMIT):
        case = found["unsafe", place]
        assert kinds(case) == ["note", "postroad.interrupted"], place
        assert did(case, "model") == 1, place
        assert did(case, "tool") == (0 if place == "tool.started" else 1), place
        said = case["log"][-1][1]
        assert said["events"] == ["a"]
        known = [(o["tool"], o["status"], o.get("result")) for o in said["operations"]]
        assert known == [("act", "started", None) if place in BEGUN else ("act", "finished", place.upper())], place
        assert case["alerts"] == ["turn.interrupted"], place


def test_a_commit_is_there_whole_or_not_at_all(found: Found) -> None:
    """Killed at any statement of the commit: reply, consumed event and attached call are there together, once."""
    for place in IN_COMMIT:
        case = found["keyed", place]
        assert kinds(case) == ["note", "reply"], place
        assert did(case, "tool") == 1, place
        first, last = case["operations"]
        assert (first[1], first[4]) == ("finished", None), place
        assert (last[1], last[4] is not None) == ("reused", True), place


@pytest.mark.parametrize("effect", EFFECTS)
def test_what_is_committed_is_over(found: Found, effect: str) -> None:
    """After the commit nothing is run again."""
    for place in COMMITTED:
        case = found[effect, place]
        assert kinds(case) == ["note", "reply"], place
        assert (did(case, "model"), did(case, "tool")) == (1, 1), place


def test_every_call_belongs_to_one_run(found: Found) -> None:
    """Each operation is of a run that there was; those of a run that did not commit are attached to nothing."""
    for case in found.values():
        ends = dict(case["runs"])
        for _, _, _, run, entry in case["operations"]:
            assert (entry is not None) == (ends[run] in ("committed", "stopped")), case


def test_nothing_is_left_out(found: Found) -> None:
    """Every place and every class was reached, and every stream has come to its end."""
    assert {place for _, place in found} == {*PLACES, *IN_COMMIT}
    assert {effect for effect, _ in found} == set(EFFECTS)
