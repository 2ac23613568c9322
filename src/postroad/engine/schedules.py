"""Cron expressions in a time zone: an adapter of the library that reads them as Debian's cron does."""

from collections.abc import Iterator
from datetime import UTC, datetime, tzinfo
from functools import lru_cache
from zoneinfo import ZoneInfo

from postroad.engine.declarations import one_of
from postroad.model.clock import micros, moment
from postroad.model.crons import MISSED, TYPE_PREFIX, Cron, Missed
from postroad.model.errors import InvalidInput, shown
from postroad.model.payload import NAME_BYTES_MAX, text

NEVER = micros(datetime(9999, 1, 1, tzinfo=UTC), "never")
_LONG_AGO = datetime(2000, 1, 1, tzinfo=UTC)


class Schedule:
    """When something is due: five fields, or six with the seconds first, read in an IANA time zone.

    Where clocks are set ahead, what would be due in the hour that is left out is due at its end; where they are set
    back, what is due at a certain hour is due once, the first time. What is due every hour or more often follows the
    time that passes.
    """

    def __init__(self, spec: str, tz: str) -> None:
        self.spec = text(spec, "spec", bytes_max=NAME_BYTES_MAX)
        self.zone = _zone(tz)
        self._read = _as_read(self.spec)
        try:
            first = next(self._fires(_LONG_AGO), None)
        except Exception as error:  # the library's own, and whatever else odd characters bring about
            said = str(error) or type(error).__name__
            raise InvalidInput(
                f"spec must be a cron expression such as '0 7 * * *', got {shown(spec)}: {said}.", field="spec"
            ) from None
        if first is None:
            raise InvalidInput(f"spec {shown(spec)} is never due.", field="spec")

    def after(self, at: int) -> int:
        """The first time later than `at` at which it is due; the year 9999 if it never is again."""
        return next(self.fires(at), NEVER)

    def fires(self, at: int) -> Iterator[int]:
        """All times later than `at`, in order."""
        found = self._fires(self.local(at))
        while (local := _next(found)) is not None:
            due = micros(local, "fire")
            if due > at:  # where an hour comes twice the library may begin in the first one
                yield (at := due)

    def back(self, at: int, count: int) -> int:
        """The `count`-th time before `at`, about: near a change of the clocks it may be one or two off."""
        found = self._fires(self.local(at), reverse=True)
        for _ in range(count - 1):
            _next(found)
        local = _next(found)
        return 0 if local is None else micros(local, "fire")

    def local(self, at: int) -> datetime:
        """A time in the schedule's zone."""
        return moment(at).astimezone(self.zone)

    def _fires(self, since: datetime, *, reverse: bool = False) -> Iterator[datetime]:
        from cronsim import CronSim

        return CronSim(self._read, since, reverse)


def _as_read(spec: str) -> str:
    """The expression so that the library takes it as we do: it goes by a star in front of the minutes or hours.

    `*/20 2` and `0,20,40 2` are the same times and due at a certain hour; `0 0-23` is due in every hour, like `0 *`.
    """
    from cronsim.cronsim import RANGES, CronSimError, Field

    fields = spec.split()
    if len(fields) != 5:
        return spec
    minutes, hours, *days = fields
    try:
        every_hour = Field.HOUR.parse(hours) == set(RANGES[Field.HOUR])
    except (CronSimError, ValueError):
        return spec  # refused as a whole
    if every_hour:
        return " ".join([minutes, "*", *days])
    return " ".join([minutes.replace("*", "0-59"), hours.replace("*", "0-23"), *days])


def _next(found: Iterator[datetime]) -> datetime | None:
    """The next one, if there is one in fifty years, and Python's calendar goes as far."""
    try:
        return next(found, None)
    except OverflowError:
        return None


@lru_cache(maxsize=256)
def schedule(spec: str, tz: str) -> Schedule:
    """The schedule that these two say.

    Raises:
        InvalidInput: The expression is none, or never due; the zone is not known here.
    """
    return Schedule(spec, tz)


def cron_of(name: str, spec: str, tz: str, missed: Missed) -> Cron:
    """A cron as a program declares it.

    Raises:
        InvalidInput: The name, the expression, the zone or the policy is none; the message names it.
    """
    checked = text(name, "name", bytes_max=NAME_BYTES_MAX - len(TYPE_PREFIX))
    if "/" in checked:
        raise InvalidInput(f"name must not hold a slash, got {shown(checked)}.", field="name")
    policy = one_of(missed, MISSED, "missed")
    return Cron(name=checked, spec=spec, tz=tz, missed=policy, schedule=schedule(spec, tz))


def _zone(tz: str) -> tzinfo:
    name = text(tz, "tz", bytes_max=NAME_BYTES_MAX)
    try:
        return ZoneInfo(name)
    except (OSError, ValueError, KeyError):  # no such zone, a folder of zones, or a path that leads elsewhere
        raise InvalidInput(
            f"tz must be a time zone such as 'Europe/Berlin' or 'UTC', got {shown(tz)}.", field="tz"
        ) from None
