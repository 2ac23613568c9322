"""What `postroad doctor` sees of an app's crons: whether each has its timer, and whether it runs when it is due."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from postroad.model.clock import SECOND, micros
from postroad.model.crons import Cron
from postroad.store import crons
from postroad.store.database import Database
from postroad.surfaces import cron_reading
from postroad.surfaces.checks import Check
from postroad.surfaces.cron_reading import CronView
from postroad.surfaces.output import length, when

if TYPE_CHECKING:
    from postroad.engine.app import Postroad

LATE_MAX = 60 * SECOND
LISTED_MAX = 10_000
_RUNS = "is `postroad run` up?"


def of_crons(post: "Postroad", database: Database, *, now: int) -> Iterator[Check]:
    """Of each cron that the app declares how it stands; of others those whose last fire nobody takes."""
    declared = {cron.stream: cron for cron in post.crons}
    known = {one.stream: one for one in database.read(cron_reading.crons, limit=LISTED_MAX, now=now)}
    standing = database.read(crons.standing, list(declared)) if declared else {}
    for stream, cron in sorted(declared.items()):
        if standing[stream].deleted:
            found = f"{cron.name}: its stream {stream} was deleted, so that it never runs"
            yield Check("error", "cron", found, "give it another name")
        else:
            yield _declared(cron, known.get(stream), now)
    for one in known.values():
        if one.stream not in declared and one.state == "waiting" and (late := _late(one, now)) > LATE_MAX:
            found = f"{one.name}: due for {length(late)}, and this app does not declare it"
            yield Check("note", "cron", found, f"if no other does, `postroad stream delete {one.stream}` ends it")


def _declared(cron: Cron, one: CronView | None, now: int) -> Check:
    if one is None:
        return Check("note", "cron", f"{cron.name}: it has no timer yet", "the first process that runs it arms one")
    if one.state == "cancelled":
        found = f"{cron.name}: it has no timer any more, and no process has armed one again"
        return Check("warning", "cron", found, _RUNS)
    late = _late(one, now)
    if one.state != "running" and late > LATE_MAX:
        return _of_late(cron, one, late, now)
    if one.unseen:
        return Check("warning", "cron", f"{cron.name}: for minutes no process has said that it declares it", _RUNS)
    if one.spec and (one.spec, one.tz, one.missed) != (cron.spec, cron.tz, cron.missed):
        theirs = f"{cron.name}: processes have it as {one.spec!r} in {one.tz}, missed={one.missed!r}"
        return Check("note", "cron", theirs, "this code's holds once it runs")
    return Check("ok", "cron", f"{cron.name}: {_going(one)}")


def _of_late(cron: Cron, one: CronView, late: int, now: int) -> Check:
    """A fire that is late: nobody fires its timer, nobody takes it, or its run fails."""
    over = ", and the next one is due too" if cron.schedule.after(now - late) <= now else ""
    if one.state == "backing_off":
        found = f"{cron.name}: due for {length(late)}, its run fails: {one.last_error or 'see its runs'}{over}"
        return Check("warning", "cron", found, f"`postroad stream show {one.stream}`")
    what = "its timer has not fired" if one.state == "due" else "no process has taken it"
    return Check("warning", "cron", f"{cron.name}: due for {length(late)}, and {what}{over}", _RUNS)


def _late(one: CronView, now: int) -> int:
    """For how long a fire has been due that nobody is done with; 0: the next one is to come."""
    at = one.next_at if one.state == "due" else one.previous_at if one.state != "scheduled" else None
    return 0 if at is None else max(0, now - micros(at, "at"))


def _going(one: CronView) -> str:
    if one.state == "scheduled":
        return f"next at {when(one.next_at)}"
    return "it is run" if one.state == "running" else "it is due now"
