"""What may be declared, and what is refused before anything runs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from postroad import InvalidInput, Kind, Postroad

MAIL = Kind("mail", dict[str, str])
Declare = Callable[[Postroad, Any], object]


PLAIN: dict[str, Declare] = {
    "filter": lambda post, fn: post.filter("chat", MAIL)(fn),
    "on_duplicate": lambda post, fn: post.turn("chat", on_duplicate=fn),
    "alert_sink": lambda post, fn: post.alert_sink(fn),
    "fn": lambda post, fn: post.observe(fn),
}
ANY: dict[str, Declare] = {
    "sender": lambda post, fn: post.sender(MAIL)(fn),
    "turn": lambda post, fn: post.turn("chat")(fn),
}


async def sleepy(*given: Any) -> None: ...


class Sleepy:
    """An object whose call is async."""

    async def __call__(self, *given: Any) -> None: ...


def yielding(*given: Any) -> Any:
    yield 1


@pytest.mark.parametrize("field", [*PLAIN, *ANY])
@pytest.mark.parametrize("given", [5, "name", yielding], ids=["int", "text", "generator"])
def test_what_cannot_be_called_is_refused(field: str, given: Any) -> None:
    """Whatever is no function, or would run nothing when called, is refused where it is declared, by name."""
    with pytest.raises(InvalidInput) as refused:
        (PLAIN | ANY)[field](Postroad(), given)
    assert refused.value.about["field"] == field


@pytest.mark.parametrize("given", [None], ids=str)
@pytest.mark.parametrize("field", [name for name in [*PLAIN, *ANY] if name != "on_duplicate"])
def test_none_is_no_function(field: str, given: Any) -> None:
    """Only `on_duplicate` may be None."""
    with pytest.raises(InvalidInput):
        (PLAIN | ANY)[field](Postroad(), given)


@pytest.mark.parametrize("field", list(PLAIN))
@pytest.mark.parametrize("given", [sleepy, Sleepy(), partial(sleepy, 1)], ids=["function", "object", "partial"])
def test_async_functions_that_nobody_awaits_are_refused(field: str, given: Any) -> None:
    """An async function is refused where nothing awaits it, and the error says what to do."""
    with pytest.raises(InvalidInput, match="plain `def`") as refused:
        PLAIN[field](Postroad(), given)
    assert refused.value.about["field"] == field


@pytest.mark.parametrize("field", list(ANY))
@pytest.mark.parametrize(
    "given", [sleepy, Sleepy(), partial(sleepy, 1), print], ids=["fn", "object", "partial", "plain"]
)
def test_handlers_may_be_either(field: str, given: Any) -> None:
    """Senders and turns are sync or async, functions or objects."""
    ANY[field](Postroad(), given)


@pytest.mark.parametrize("bare", [lambda post: post.sender, lambda post: post.turn], ids=["sender", "turn"])
def test_a_bare_decorator_is_refused(bare: Callable[[Postroad], Callable[[Any], Any]]) -> None:
    """`@post.sender` without a kind would declare nothing; the error shows how it is written."""
    with pytest.raises(InvalidInput, match=r"@post\."):
        bare(Postroad())(print)


@pytest.mark.parametrize("given", [5, None, object()], ids=["int", "none", "object"])
def test_a_transport_has_a_send(given: Any) -> None:
    """What has no method `send` is no transport."""
    with pytest.raises(InvalidInput) as refused:
        Postroad().transport(MAIL, given)
    assert refused.value.about["field"] == "transport"


@pytest.mark.parametrize("given", [5, None, sleepy, Sleepy()], ids=["int", "none", "function", "object"])
def test_write_takes_plain_functions(given: Any, sqlite_path: Any) -> None:
    """What `write` could not call, or would not await, is refused at the verb."""
    post = Postroad(f"sqlite:///{sqlite_path}")
    try:
        with pytest.raises(InvalidInput) as refused, post.begin() as tx:
            tx.write(given)
        assert refused.value.about["field"] == "fn"
        with pytest.raises(InvalidInput), post.begin() as tx:
            tx.write(lambda conn: sleepy(conn))
    finally:
        post.close()
