"""Bugs to plant in delegations and crons; `mutants` has the others, and says what a mutant is."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

from postroad.engine import crons as engine_crons
from postroad.engine.delegations import Delegating
from postroad.model import crons
from postroad.model.lifecycle import RunEnd
from postroad.store import delegations, reports
from postroad.store.statements import Statement
from postroad.testing.simulation.planting import Mutant, into
from postroad.testing.simulation.ticking import PERIOD

MUTANTS: dict[str, Mutant] = {}
planted = into(MUTANTS)


@planted("a delegation with two ends")
def ends_again() -> AbstractContextManager[object]:
    """What is finished has that end, whatever it had before."""
    blind = Statement(delegations._LOCK._sql.replace("d.status FROM", "'open' AS status FROM"))
    return patch.object(delegations, "_LOCK", blind)


@planted("a delegation's end is lost")
def loses_ends() -> AbstractContextManager[object]:
    """What a crew finishes is not written down; it is timed out in the end."""
    return patch.object(delegations, "end", lambda conn, ends, *, now: None)


@planted("a delegation's end is not reported")
def reports_no_end() -> AbstractContextManager[object]:
    """A delegation ends, and nobody is told."""
    return patch.object(reports, "tell", lambda conn, events, *, now: [])


@planted("a delegation is timed out early")
def times_out_early() -> AbstractContextManager[object]:
    """The pump ends whatever it finds open, whether or not its time is over."""
    early = Statement(delegations._LOCK_DUE._sql.replace("d.deadline_at <= :now", "d.created_at <= :now"))
    return patch.object(delegations, "_LOCK_DUE", early)


@planted("a stop leaves tasks open")
def stops_without_cancelling() -> AbstractContextManager[object]:
    """Nobody learns that the work that he wanted was withdrawn."""
    return patch.object(delegations, "_stops", lambda turns: {})


@planted("no bounds for delegations")
def delegates_without_bounds() -> AbstractContextManager[object]:
    """Whatever is open, and however deep, more may be delegated."""
    real = Delegating.check

    def check(self: Any, child: str, task: Any, timeout: Any, key: str | None) -> Any:
        self._limits = type(self._limits)(depth=1_000, fan_out=1_000)
        return real(self, child, task, timeout, key)

    return patch.object(Delegating, "check", check)


@planted("a cron fires twice")
def fires_again() -> AbstractContextManager[object]:
    """Every other time is armed again by the run that it was for."""
    real = engine_crons.follow

    def follow(cron: Any, commit: Any, *, now: int, since: int) -> Any:
        fires = [event for event in (*commit.consumed, *commit.dead) if crons.is_fire(event)]
        again = any(int(event.event_id.partition("#")[2] or 0) % 2 == 0 for event in fires)
        with patch.object(crons, "following", _same) if again else nullcontext():
            return real(cron, commit, now=now, since=since)

    return patch.object(engine_crons, "follow", follow)


def _same(schedule: Any, missed: Any, last: int, now: int) -> tuple[int, int]:
    return last, 0


@planted("a cron slips")
def slips() -> AbstractContextManager[object]:
    """The next time is one period after the run, not after the time that it was for."""
    return patch.object(crons, "following", lambda schedule, missed, last, now: (now + PERIOD, 0))


@planted("a cron forgets what it missed")
def forgets_what_was_missed() -> AbstractContextManager[object]:
    """The next time is the next one from now on, whatever the policy."""
    return patch.object(crons, "following", lambda schedule, missed, last, now: (schedule.after(now), 0))


@planted("a cron ends with a run that fails")
def arms_after_success_only() -> AbstractContextManager[object]:
    """Only a run that does not fail arms the next one."""
    real = engine_crons.follow

    def follow(cron: Any, commit: Any, *, now: int, since: int) -> Any:
        return commit if commit.end == RunEnd.FAILED else real(cron, commit, now=now, since=since)

    return patch.object(engine_crons, "follow", follow)
