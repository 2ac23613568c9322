"""Tokens: what they are made of, who can verify them, and that nothing shows them."""

import ast
import base64
import hashlib
import hmac
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroad import Postroad
from postroad.engine.config import HIDDEN
from postroad.model import acks
from postroad.model.acks import Keyring, key_texts
from postroad.model.dispatches import Dispatch
from postroad.model.errors import BadAckToken, InvalidInput, Refused
from tests.style.sources import SRC, parse

OLD, NEW = "the key of last year", "the key of this year"
ID = f"{7:032x}"
keys = st.text(min_size=16, max_size=40)
ids = st.integers(0, 16**32 - 1).map(lambda number: f"{number:032x}")
epochs = st.integers(0, 10**9)


def test_a_token_can_be_made_by_the_book() -> None:
    """A token is key version, dispatch id and HMAC-SHA256 over label, id and epoch, as the documentation says."""
    signed = hmac.new(OLD.encode(), f"postroad.ack\0{ID}\0003".encode(), hashlib.sha256).digest()
    version = hashlib.sha256(b"postroad.key\0" + OLD.encode()).hexdigest()[:8]
    proof = base64.urlsafe_b64encode(signed).decode().rstrip("=")
    assert Keyring([OLD]).token(ID, 3) == f"{version}.{ID}.{proof}"


@given(keys, ids, epochs)
def test_a_token_proves_its_dispatch_and_epoch(key: str, dispatch: str, epoch: int) -> None:
    """What a key signs it verifies: for this dispatch and this epoch, and the same again each time."""
    ring = Keyring([key])
    token = ring.token(dispatch, epoch)
    presented = ring.read(token)
    assert (presented.dispatch, presented.proves(epoch), presented.proves(epoch + 1)) == (dispatch, True, False)
    assert Keyring([key]).token(dispatch, epoch) == token


@given(keys, ids, ids, epochs)
def test_a_token_proves_nothing_else(key: str, dispatch: str, other: str, epoch: int) -> None:
    """A token with another dispatch's id in it proves nothing."""
    ring = Keyring([key])
    moved = ring.token(dispatch, epoch).replace(dispatch, other)
    assert ring.read(moved).proves(epoch) is (other == dispatch)


@given(st.data(), keys, ids)
def test_a_token_that_was_tampered_with_proves_nothing(data: st.DataObject, key: str, dispatch: str) -> None:
    """Any other character anywhere in a token: it is no token, or proves nothing."""
    token = Keyring([key]).token(dispatch, 0)
    place = data.draw(st.integers(0, len(token) - 1))
    forged = token[:place] + data.draw(st.characters().filter(lambda c: c != token[place])) + token[place + 1 :]
    try:
        presented = Keyring([key]).read(forged)
    except BadAckToken:
        return
    assert not presented.proves(0)


def test_keys_are_exchanged_without_a_gap() -> None:
    """The first key signs and all verify; once a key is gone, so is what it signed."""
    before, between, after = Keyring([OLD]), Keyring([NEW, OLD]), Keyring([NEW])
    old = before.token(ID, 0)
    assert between.token(ID, 0) == after.token(ID, 0) != old
    assert between.read(old).proves(0)
    assert between.read(between.token(ID, 0)).proves(0)
    assert not after.read(old).proves(0)


def test_nobody_signs_with_the_key_that_there_is_not() -> None:
    """A token of an unknown key version is held against no key: not even against the empty one."""
    proof = base64.urlsafe_b64encode(hmac.digest(b"", f"postroad.ack\0{ID}\0000".encode(), "sha256"))
    forged = f"00000000.{ID}.{proof.decode().rstrip('=')}"
    assert not Keyring([OLD]).read(forged).proves(0)


@pytest.mark.parametrize(
    "token", [None, 7, b"x", "", ".", ID, f"00000000.{ID}.", "a" * 10_000, f"00000000.{ID}.{'a' * 42}é"]
)
def test_what_is_no_token(token: object) -> None:
    """Whatever is no token is refused without being shown."""
    with pytest.raises(BadAckToken) as refusal:
        Keyring([OLD]).read(token)
    assert str(refusal.value) == "This token acknowledges nothing."


@pytest.mark.parametrize("end", ["\n", " ", "\0", "="])
def test_a_token_ends_where_it_ends(end: str) -> None:
    """A token with anything behind it is none."""
    with pytest.raises(BadAckToken):
        Keyring([OLD]).read(Keyring([OLD]).token(ID, 0) + end)


@pytest.mark.parametrize("key", ["", "short", "x" * 15, None, 7, b"the key of last year"])
def test_a_key_is_a_text_of_some_length(key: object) -> None:
    """A short key, or none, is refused with what to do, and is not shown."""
    with pytest.raises(InvalidInput, match=r"at least 16 characters.*token_hex") as refusal:
        Keyring([OLD, key])  # type: ignore[list-item]
    assert refusal.value.about == {"field": "secret_key"}
    assert "short" not in str(refusal.value)


def test_without_a_key_there_is_no_token() -> None:
    """An empty ring neither signs nor verifies, and says where a key goes."""
    for use in (lambda: Keyring().token(ID, 0), lambda: Keyring().read("x")):
        with pytest.raises(Refused, match="POSTROAD_SECRET_KEY"):
            use()


@pytest.mark.parametrize(("given", "expected"), [(OLD, (OLD,)), ([NEW, OLD], (NEW, OLD)), ((NEW,), (NEW,))])
def test_one_key_or_several(given: object, expected: tuple[str, ...]) -> None:
    """A program gives one key, or several in the order in which they are preferred."""
    assert key_texts(given) == expected


@pytest.mark.parametrize("given", [[], 7, b"the key of last year", {OLD}, ["short"]])
def test_no_keys(given: object) -> None:
    """What are no keys is refused when the app is made."""
    with pytest.raises(InvalidInput):
        Postroad(secret_key=given)  # type: ignore[arg-type]


def test_an_apps_keys_are_those_of_its_code_else_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code goes before the environment, whose key goes before none; what is shown of them is masked."""
    monkeypatch.delenv("POSTROAD_SECRET_KEY", raising=False)
    with pytest.raises(Refused):
        Postroad("sqlite:///x.db").keyring.require()
    monkeypatch.setenv("POSTROAD_SECRET_KEY", OLD)
    monkeypatch.setenv("POSTROAD_SECRET_KEYS_FORMER", '["the key of two years ago"]')
    assert Postroad("sqlite:///x.db").keyring.token(ID, 0) == Keyring([OLD]).token(ID, 0)
    post = Postroad("sqlite:///x.db", secret_key=NEW)
    assert post.keyring.token(ID, 0) == Keyring([NEW]).token(ID, 0)
    assert not post.keyring.read(Keyring([OLD]).token(ID, 0)).proves(0)
    found = post.settings()
    assert (found["secret_key"].shown, found["secret_key"].source) == (HIDDEN, "code")
    assert found["secret_keys_former"].value == []


def test_a_dispatch_does_not_show_its_token() -> None:
    """The repr of a dispatch, which may end up in a log, has all its fields but the token."""
    shown = {field.name for field in fields(Dispatch) if field.repr}
    assert {field.name for field in fields(Dispatch)} - shown == {"ack_token"}


def test_nothing_shows_what_was_presented() -> None:
    """Neither a ring's repr nor a presented token's has anything of keys or tokens in it."""
    token = Keyring([OLD]).token(ID, 0)
    shown = repr(Keyring([OLD])) + repr(Keyring([OLD]).read(token))
    assert OLD not in shown
    assert token.rpartition(".")[2] not in shown


def test_only_compare_digest_compares_tokens() -> None:
    """In the module of tokens nothing is compared by an operator, except with None and by length."""
    tree = parse(SRC / "model/acks.py")
    compared = [node for node in ast.walk(tree) if isinstance(node, ast.Compare)]
    plain = [node for node in compared if not all(isinstance(op, ast.Is | ast.IsNot | ast.Lt) for op in node.ops)]
    assert compared
    assert plain == []
    assert "hmac.compare_digest(expected, self._proof)" in ast.unparse(tree)
    assert acks.KEY_CHARACTERS_MIN == 16
