"""What every command that leaves something as it is answers to a program: one shape, on both databases."""

import json
from pathlib import Path
from typing import Any

import pytest

from postroad import Kind, Postroad
from tests.acceptance.test_operating import LATER, MAIL, Place, empty, place

__all__ = ["empty", "place"]
pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.filterwarnings("ignore::postroad.store.sqlite_version.SQLiteVersionWarning"),
]
NOTE: Kind[Any] = Kind("note", Any)
SECRET = "k" * 32
NAMED = "its reason is dispatch.dead_letter.unknown_outcome, which has to be named"


def refused(place: Place, *command: str) -> Any:
    """The `refused` of a conflict, whose document is as promised."""
    done = place.call(*command, "--json")
    assert done.returncode == 1, (done.stdout, done.stderr)
    document = json.loads(done.stdout)
    assert list(document) == ["ok", "contract_version", "data", "error"]
    error = document["error"]
    assert (document["ok"], error["kind"]) == (False, "conflict")
    assert all(isinstance(value, str) for name, value in error["detail"].items() if name != "refused")
    told = error["detail"]["refused"]
    assert all(isinstance(why, str) and isinstance(number, int) for why, number in told.items())
    return told


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (("retry", "good/1"), {"it is delivered; only dead_letter and expired can be retried": 1}),
        (("replay", "waits/1"), {"it is pending: it is still to be sent": 1}),
        (("replay", "good/1", "--key", "bad/1"), {"the key bad/1 is taken": 1}),
        (("withdraw", "good/1"), {"too late: it is delivered": 1}),
        (("purge", "waits/1"), {"it is pending, and not finished": 1}),
        (("retry", "--key", "parked/"), {NAMED: 3}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_dispatches_that_are_left_as_they_are(place: Place, command: tuple[str, ...], told: dict[str, int]) -> None:
    """Each verb, on one dispatch and on many: a sentence, and of how many it holds."""
    assert refused(place, "dispatch", *command) == told


def test_a_dispatch_that_is_not_to_be_resolved(place: Place) -> None:
    """The sentence says what there is instead."""
    [(why, number)] = refused(place, "dispatch", "resolve", "bad/1", "--discard").items()
    assert ("only what may have arrived" in why, number) == (True, 1)


def test_what_is_done_in_part_says_it_alike(place: Place) -> None:
    """An answer that did some of it has the same `refused` among its data."""
    done = place.answer("dispatch", "retry", "--kind", "mail")
    assert (done["done"], done["refused"]) == (3, {NAMED: 3})


def test_a_stream_that_is_not_parked(place: Place) -> None:
    """The stream commands say it in the same place."""
    post = Postroad(place.url, schema=place.schema)
    with post.begin() as tx:
        tx.publish("chat/1", NOTE, {})
    post.close()
    assert refused(place, "stream", "resolve", "chat/1", "--retry") == {"The stream is not parked (it is free).": 1}


def test_an_acknowledgement_that_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`ack` of what asked for none, or has ended otherwise, too."""
    monkeypatch.setenv("POSTROAD_SECRET_KEY", SECRET)
    post = Postroad(place.url, schema=place.schema, secret_key=SECRET)
    post.elsewhere(MAIL, LATER)
    with post.begin() as tx:
        asked = tx.send(LATER, {}, key="asked", ack=True)
    assert post.dispatches.withdraw("asked", actor="ann")
    plain = post.dispatches.get("good/1")
    assert plain is not None
    tokens = [post.keyring.token(id, 0) for id in (asked.id, plain.id)]
    post.close()
    [ended], [never] = (list(refused(place, "ack", token)) for token in tokens)
    assert "can no longer be acknowledged. It is expired by dispatch.expired.withdrawn" in ended
    assert "asked for no acknowledgement" in never
