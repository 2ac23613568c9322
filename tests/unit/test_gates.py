"""Gates and rates as arithmetic."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroad.model import gates
from postroad.model.clock import SECOND

HOSTS = {
    "https://api.example": "api.example",
    "https://API.Example/a?b#c": "api.example",
    "http://api.example:8080/": "api.example:8080",
    "https://user:word@api.example/x": "api.example",
    "https://[2001:db8::1]:8443/": "[2001:db8::1]:8443",
    "HTTPS://a.example?x": "a.example",
    "ann@example.org": None,
    "+49 30 1": None,
    "": None,
    "https://": None,
    "ftp://api.example/": None,
    "https://a b/": None,
    "see https://api.example/": None,
    "https://" + "a" * 300: None,
}


@pytest.mark.parametrize("destination", HOSTS)
def test_the_host_of_a_destination(destination: str) -> None:
    """An http or https URL has a host, with its port if it names one and without its user; nothing else has."""
    assert gates.host_of(destination) == HOSTS[destination]


@given(st.integers(0, 10**6), st.floats(0, 1, exclude_max=True))
def test_a_hold_is_bounded(failures: int, fraction: float) -> None:
    """From half a second to a minute, whatever happened before."""
    assert SECOND // 2 <= gates.hold(failures, fraction) <= 60 * SECOND


@given(
    rate=st.floats(1 / 86_400, 100_000),
    looks=st.lists(st.tuples(st.integers(0, 2 * SECOND), st.integers(0, 1_000)), max_size=40),
)
def test_no_window_has_more_than_its_rate(rate: float, looks: list[tuple[int, int]]) -> None:
    """Whenever it is asked and however much is wanted: from any start to any later one no more than rate and saving."""
    now, next_at = 10**15, 0
    starts: list[tuple[int, int]] = []
    for length, wanted in looks:
        now += length
        started = min(wanted, gates.allowed(next_at, rate, now=now))
        if started:
            next_at = gates.after(next_at, rate, started, now=now)
            starts.append((now, started))
    for place, (began, _) in enumerate(starts):
        number = 0
        for at, started in starts[place:]:
            number += started
            assert (number - 1) * gates.gap(rate) <= at - began + gates.saved(rate)


@given(rate=st.floats(1 / 86_400, 100_000))
def test_a_rate_is_reached(rate: float) -> None:
    """Who asks again when told to is allowed to start as many as the rate says in the time that has passed."""
    now, next_at, started = 10**15, 0, 0
    began = now
    for _ in range(50):
        number = gates.allowed(next_at, rate, now=now)
        assert number >= 1
        next_at = gates.after(next_at, rate, number, now=now)
        started += number
        now = next_at + gates.saved(rate)
    assert started >= (now - began) // gates.gap(rate) - 1
