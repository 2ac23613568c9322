"""When a cron expression is due: on each local date once, whatever the clocks of its zone do."""

import random
from bisect import bisect_right
from collections import Counter
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise, takewhile
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from postroad import InvalidInput
from postroad.engine.schedules import NEVER, Schedule, cron_of
from postroad.model.clock import SECOND, micros, moment

BERLIN, NEW_YORK, LORD_HOWE = "Europe/Berlin", "America/New_York", "Australia/Lord_Howe"


def fires(spec: str, tz: str, since: str, until: str) -> list[str]:
    """Every fire between two local times, as local time with offset."""
    schedule, zone = Schedule(spec, tz), ZoneInfo(tz)
    at, end = (micros(datetime.fromisoformat(said).replace(tzinfo=zone), "at") for said in (since, until))
    found = takewhile(lambda due: due <= end, schedule.fires(at))
    return [schedule.local(due).isoformat(timespec="minutes") for due in found]


# Written by hand from the zones' own rules.
CHANGES = [
    ("0 0 * * *", "America/Los_Angeles", "2022-03-11T12:00", "2022-03-15T12:00",
     ["2022-03-12T00:00-08:00", "2022-03-13T00:00-08:00", "2022-03-14T00:00-07:00", "2022-03-15T00:00-07:00"]),
    ("0 0 * * MON-FRI", "America/Chicago", "2021-03-11T12:00", "2021-03-16T12:00",
     ["2021-03-12T00:00-06:00", "2021-03-15T00:00-05:00", "2021-03-16T00:00-05:00"]),
    ("30 1 * * *", NEW_YORK, "2025-11-01T12:00", "2025-11-03T12:00",
     ["2025-11-02T01:30-04:00", "2025-11-03T01:30-05:00"]),
    ("30 2 * * *", NEW_YORK, "2025-11-01T12:00", "2025-11-03T12:00",
     ["2025-11-02T02:30-05:00", "2025-11-03T02:30-05:00"]),
    ("30 1 * * *", NEW_YORK, "2026-03-07T12:00", "2026-03-09T12:00",
     ["2026-03-08T01:30-05:00", "2026-03-09T01:30-04:00"]),
    ("30 2 * * *", NEW_YORK, "2026-03-07T12:00", "2026-03-09T12:00",
     ["2026-03-08T03:00-04:00", "2026-03-09T02:30-04:00"]),
    ("0 7 * * *", BERLIN, "2026-03-28T00:00", "2026-03-30T12:00",
     ["2026-03-28T07:00+01:00", "2026-03-29T07:00+02:00", "2026-03-30T07:00+02:00"]),
    ("30 2 * * *", BERLIN, "2026-03-28T12:00", "2026-03-30T12:00",
     ["2026-03-29T03:00+02:00", "2026-03-30T02:30+02:00"]),
    ("30 2 * * *", BERLIN, "2026-10-24T12:00", "2026-10-26T12:00",
     ["2026-10-25T02:30+02:00", "2026-10-26T02:30+01:00"]),
    ("45 1 * * *", LORD_HOWE, "2026-04-04T12:00", "2026-04-06T12:00",
     ["2026-04-05T01:45+11:00", "2026-04-06T01:45+10:30"]),
    ("15 2 * * *", LORD_HOWE, "2026-10-03T12:00", "2026-10-05T12:00",
     ["2026-10-04T02:30+11:00", "2026-10-05T02:15+11:00"]),
    # What is due every hour follows the time that passes: 23 of them in one day, 25 in the other.
    ("0 * * * *", BERLIN, "2026-03-29T00:30", "2026-03-29T04:30",
     ["2026-03-29T01:00+01:00", "2026-03-29T03:00+02:00", "2026-03-29T04:00+02:00"]),
    ("*/30 * * * *", BERLIN, "2026-10-25T01:45", "2026-10-25T03:00",
     ["2026-10-25T02:00+02:00", "2026-10-25T02:30+02:00", "2026-10-25T02:00+01:00", "2026-10-25T02:30+01:00",
      "2026-10-25T03:00+01:00"]),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "tz", "since", "until", "expected"), CHANGES)
def test_each_local_date_has_its_fire(spec: str, tz: str, since: str, until: str, expected: list[str]) -> None:
    """Where an hour is left out a fixed time is due at its end, where one comes twice it is due the first time."""
    assert fires(spec, tz, since, until) == expected


# Each with another way to write the same times: what is due at certain hours, then what is due in every hour.
SPELLINGS = [
    ("*/20 2 * * *", "0,20,40 2 * * *"),
    ("* 2 * * *", "0-59 2 * * *"),
    ("*/30,5 1-3 * * *", "0,5,30 1,2,3 * * *"),
    ("0 */2 * * *", "0 0-23/2 * * *"),
    ("30 */2 * * *", "30 0,2,4,6,8,10,12,14,16,18,20,22 * * *"),
    ("0 2-23,*/12 * * *", "0 0,2-23 * * *"),
    ("0 * * * *", "0 0-23 * * *"),
    ("15 */1 * * *", "15 0-11,12-23 * * *"),
    ("*/10 0-23 * * *", "0,10,20,30,40,50 * * * *"),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "other"), SPELLINGS)
@pytest.mark.parametrize("tz", [BERLIN, NEW_YORK, LORD_HOWE])
def test_however_it_is_written(spec: str, other: str, tz: str) -> None:
    """Two expressions that mean the same times are due at the same times, on the days on which clocks change too."""
    for since, until in (("2026-03-01", "2026-04-15"), ("2026-09-25", "2026-11-10")):  # in all three zones
        found = fires(spec, tz, f"{since}T00:00", f"{until}T00:00")
        assert found == fires(other, tz, f"{since}T00:00", f"{until}T00:00")
        offsets = {each[-6:] for each in found}
        assert len(offsets) == 2


@pytest.mark.parametrize("tz", [BERLIN, NEW_YORK])
def test_a_certain_hour_is_due_on_every_date(tz: str) -> None:
    """Twenty minutes apart in one hour: thrice a date, but once where that hour is left out."""
    found = [datetime.fromisoformat(each) for each in fires("*/20 2 * * *", tz, "2026-01-01T00:00", "2026-12-31T23:59")]
    daily = Counter(each.date() for each in found)
    assert len(daily) == 365
    (spring,) = (day for day, times in daily.items() if times != 3)
    assert [each.hour for each in found if each.date() == spring] == [3]


@pytest.mark.parametrize("tz", [BERLIN, NEW_YORK, LORD_HOWE, "America/Havana", "UTC"])
@pytest.mark.parametrize(
    "spec",
    ["30 1 * * *", "30 2 * * *", "0 0 * * *", "15 2 * * 0", "0 * * * *", "*/20 * * * *", "*/20 2 * * *", "5 */2 * * *"],
)
def test_where_one_looks_from_makes_no_difference(spec: str, tz: str) -> None:
    """From any moment of a year the next fire is the first later one of the whole list; none is skipped or repeated."""
    schedule, seed = Schedule(spec, tz), random.randrange(2**32)
    draw = random.Random(seed)
    start, end = (micros(datetime(year, 1, 1, tzinfo=UTC), "at") for year in (2026, 2027))
    listed = list(takewhile(lambda due: due <= end, schedule.fires(start)))
    assert len(listed) >= 52
    days = range(start, listed[-1], 24 * 3_600 * SECOND)
    changes = [a for a, b in pairwise(days) if schedule.local(a).utcoffset() != schedule.local(b).utcoffset()]
    assert len(changes) == (0 if tz == "UTC" else 2)
    near = [day + n * 600 * SECOND for day in changes for n in range(144)]
    for since in [*near, *(draw.randrange(start, listed[-1]) for _ in range(100))]:
        expected = listed[bisect_right(listed, since)]
        assert schedule.after(since) == expected, (seed, moment(since), moment(expected))


@pytest.mark.parametrize("tz", [BERLIN, NEW_YORK, LORD_HOWE])
def test_a_fixed_time_is_due_once_on_every_date(tz: str) -> None:
    """Over two years each local date has exactly one fire of a daily schedule, at each quarter of an hour."""
    for hour in range(5):
        for minute in (0, 15, 30, 45):
            found = fires(f"{minute} {hour} * * *", tz, "2025-01-01T12:00", "2026-12-31T12:00")
            dates = [datetime.fromisoformat(each).date() for each in found]
            first = dates[0]
            assert dates == [first + timedelta(days=n) for n in range(len(dates))], (hour, minute)
            assert len(dates) == 729


def test_what_is_due_every_minute_follows_the_time_that_passes() -> None:
    """Every minute of the days on which clocks change is due, as many as pass."""
    for day, minutes in (("2026-03-29", 23 * 60), ("2026-10-25", 25 * 60)):
        found = fires("* * * * *", BERLIN, f"{day}T00:00", f"{day}T23:59")
        stamps = [micros(datetime.fromisoformat(each), "at") for each in found]
        assert len(stamps) == minutes - 1
        assert {late - early for early, late in pairwise(stamps)} == {60 * SECOND}


def test_six_fields_begin_with_the_seconds() -> None:
    """With six fields the first are the seconds."""
    schedule, at = Schedule("*/15 30 7 * * *", "UTC"), micros(datetime(2026, 1, 1, tzinfo=UTC), "at")
    found = [at := schedule.after(at) for _ in range(5)]
    assert [moment(each).strftime("%d %H:%M:%S") for each in found] == [
        "01 07:30:00", "01 07:30:15", "01 07:30:30", "01 07:30:45", "02 07:30:00",
    ]  # fmt: skip


def test_what_comes_to_an_end_is_due_in_the_year_9999() -> None:
    """A schedule that has no fire in the next fifty years is as good as over."""
    schedule = Schedule("0 0 * 2 MON#5", "UTC")
    assert moment(schedule.after(micros(datetime(2026, 1, 1, tzinfo=UTC), "at"))).year == 2044
    assert schedule.after(micros(datetime(9990, 1, 1, tzinfo=UTC), "at")) == NEVER


@pytest.mark.parametrize(
    ("given", "field", "said"),
    [
        ({"spec": "0 7 * *"}, "spec", "Wrong number of fields"),
        ({"spec": "0 25 * * *"}, "spec", "Bad hour"),
        ({"spec": "@daily"}, "spec", "such as '0 7 \\* \\* \\*'"),
        ({"spec": ""}, "spec", "must not be empty"),
        ({"spec": "0 0 30 2 *"}, "spec", "Bad day-of-month"),
        ({"spec": "* * */20 * 1L"}, "spec", "never due"),
        ({"spec": "0 0 * * 1L/2"}, "spec", "cron expression"),
        ({"spec": "0 " * 300}, "spec", "longer than"),
        ({"spec": "9" * 200 + " 7 * * *"}, "spec", "Bad minute"),
        ({"spec": 7}, "spec", "must be a str"),
        ({"tz": "Europe/Berlim"}, "tz", "such as 'Europe/Berlin'"),
        ({"tz": "../etc/passwd"}, "tz", "time zone"),
        ({"tz": "America"}, "tz", "time zone"),
        ({"tz": "CEST+1"}, "tz", "time zone"),
        ({"tz": ""}, "tz", "must not be empty"),
        ({"tz": None}, "tz", "must be a str"),
        ({"missed": "last"}, "missed", "one of"),
        ({"name": "a/b"}, "name", "slash"),
        ({"name": "n" * 251}, "name", "longer than"),
        ({"name": print}, "name", "must be a str"),
    ],
    ids=str,
)
def test_what_is_no_cron_is_refused_at_the_door(given: dict[str, Any], field: str, said: str) -> None:
    """A wrong name, expression, zone or policy is refused by a sentence that names it."""
    right: dict[str, Any] = {"name": "report", "spec": "0 7 * * *", "tz": "UTC", "missed": "once"}
    with pytest.raises(InvalidInput, match=said) as refused:
        cron_of(**{**right, **given})
    assert refused.value.about["field"] == field


def test_one_can_look_back_about_so_far() -> None:
    """The n-th time before a moment is found, but for one or two of them where clocks have changed meanwhile."""
    for tz, off in (("UTC", 0), (BERLIN, 2)):
        schedule, now = Schedule("30 * * * *", tz), micros(datetime(2026, 4, 1, tzinfo=UTC), "now")
        for count in (1, 2, 1_000):
            since = schedule.back(now, count)
            found = sum(due <= now for due in islice(schedule.fires(since - 1), count + 9))
            assert abs(found - count) <= off, (tz, count)
    assert Schedule("0 0 29 2 *", "UTC").back(micros(datetime(1, 1, 2, tzinfo=UTC), "now"), 3) == 0
