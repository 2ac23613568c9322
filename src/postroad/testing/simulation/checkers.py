"""All invariants by name. The names are those of the list of guarantees."""

import re
from collections.abc import Callable, Iterator, Mapping

from postroad.testing.simulation import (
    checks_acks,
    checks_crons,
    checks_delegations,
    checks_gates,
    checks_log,
    checks_operators,
    checks_outbox,
    checks_reports,
    checks_streams,
    checks_tools,
    checks_turns,
)
from postroad.testing.simulation.history import History

Check = Callable[[History], Iterator[str]]
_CODE = re.compile(r"[a-z]\d+")

_MODULES = (
    checks_log, checks_turns, checks_tools, checks_streams, checks_outbox, checks_acks, checks_operators, checks_gates,
    checks_reports, checks_delegations, checks_crons,
)  # fmt: skip


class InvariantBroken(AssertionError):
    """An invariant does not hold."""


def _checks() -> Iterator[tuple[str, Check]]:
    for module in _MODULES:
        for name, value in vars(module).items():
            code, _, rest = name.partition("_")
            if _CODE.fullmatch(code):
                yield f"{code.upper()} {rest.replace('_', ' ')}", value


CHECKS: Mapping[str, Check] = dict(_checks())


def violations(history: History) -> list[str]:
    """What is wrong at this moment, each with the name of its invariant."""
    return [f"{name}: {wrong}" for name, check in CHECKS.items() for wrong in check(history)]


def verify(history: History) -> None:
    """Raise InvariantBroken if anything is wrong at this moment."""
    if found := violations(history):
        raise InvariantBroken("\n".join(found))
