"""What the dispatch commands ask of a database."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import Connection

from postroad.engine.dispatches import Dispatches
from postroad.model import lengths
from postroad.model.dispatches import DispatchFilter, DispatchRow
from postroad.model.entropy import SystemEntropy
from postroad.model.lifecycle import Reason, Status
from postroad.store import dispatch_views, dispatch_why, moves, transitions
from postroad.store.dispatch_why import Takes
from postroad.surfaces import reading
from postroad.surfaces.output import NotFound, WrongUse

if TYPE_CHECKING:
    from postroad.engine.app import Postroad

BODY_CHARACTERS = 2_000
_AGO = re.compile(r"\d{1,7} ?[a-z]+")


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt, read out of the history. `ended_at` None: under way. `late`: heard of after its claim was over."""

    number: int
    epoch: int
    started_at: datetime
    ended_at: datetime | None = None
    end: str = ""
    summary: str = ""
    late: str = ""


class DispatchView(msgspec.Struct, frozen=True, kw_only=True):
    """A dispatch with all there is to see. `horizon_seconds`: the retry horizon, where an app tells its policy."""

    row: DispatchRow
    why: str
    attempts: Sequence[Attempt]
    body: str
    body_size: int
    receipt: str | None
    horizon_seconds: float | None

    def plain(self) -> dict[str, Any]:
        """As programs see it: one object."""
        rest = {name: getattr(self, name) for name in self.__struct_fields__ if name != "row"}
        found: dict[str, Any] = msgspec.to_builtins({**asdict(self.row), **rest})
        return found


class Policies(msgspec.Struct, frozen=True):
    """What an app knows of its kinds: the newest version it takes, and the retry horizon in seconds."""

    takes: Takes
    horizons: Mapping[str, float]


def policies(post: "Postroad") -> Policies:
    """What this app knows of the kinds that it carries out."""
    senders = post.senders
    return Policies(
        Takes({name: sender.policy.version for name, sender in senders.items()}),
        {name: sender.policy.retry.horizon(sender.timeout) / 1_000_000 for name, sender in senders.items()},
    )


@contextmanager
def acting(url: str | None, schema: str | None) -> Iterator[Dispatches]:
    """Operators' verbs on the database that the command line or the settings name, whose schema must fit."""
    with reading.changing(url, schema) as database:
        yield Dispatches(lambda: database, SystemEntropy, lambda: None)


def dispatches(
    conn: Connection, wanted: DispatchFilter, *, limit: int, after: str | None, now: int
) -> Sequence[DispatchRow]:
    """A page of dispatches, the newest first."""
    return dispatch_views.list_(conn, wanted, limit=limit, after=after)


def dispatch(conn: Connection, name: str, *, whole: bool, known: Policies | None, now: int) -> DispatchView:
    """A dispatch by id or key; its body cut after 2,000 characters unless `whole`.

    Raises:
        NotFound: There is none.
    """
    row, content = dispatch_views.get(conn, name), dispatch_views.content(conn, name)
    if row is None or content is None:
        raise NotFound(f"No dispatch has the id or key {name!r}.", dispatch=name)
    return DispatchView(
        row=row,
        why=dispatch_why.why(conn, row.id, takes=known.takes if known else None, now=now),
        attempts=attempts(row.history),
        body=content.body if whole else content.body[:BODY_CHARACTERS],
        body_size=len(content.body.encode()),
        receipt=content.receipt,
        horizon_seconds=known.horizons.get(row.kind) if known else None,
    )


def why(conn: Connection, name: str, *, known: Policies | None, now: int) -> str:
    """One sentence on why a dispatch is not moving; NotFound if there is none."""
    if dispatch_views.find(conn, name) is None:
        raise NotFound(f"No dispatch has the id or key {name!r}.", dispatch=name)
    return dispatch_why.why(conn, name, takes=known.takes if known else None, now=now)


def attempts(history: Sequence[Mapping[str, Any]]) -> list[Attempt]:
    """The attempts that a history tells of, oldest first."""
    found: list[Attempt] = []
    for change in history:
        about = msgspec.json.decode(change["metadata"])
        if change["reason_code"] in transitions.STALE:
            found = [_late(each, change, about) for each in found]
        elif change["from_status"] == Status.DELIVERING and found:
            found[-1] = _ended(found[-1], change)
        if change["reason_code"] == Reason.ATTEMPT and change["summary"] != moves.NO_ATTEMPT:
            found.append(Attempt(number=about["attempt"], epoch=about["epoch"], started_at=change["at"]))
    return found


def _ended(attempt: Attempt, change: Mapping[str, Any]) -> Attempt:
    if attempt.ended_at is not None:
        return attempt
    lost = change["reason_code"] == Reason.ATTEMPT
    summary = "its lease was lost" if lost else change["summary"]
    end = Reason.LEASE_LOST.rpartition(".")[2] if lost else change["reason_code"]
    return msgspec.structs.replace(attempt, ended_at=change["at"], end=end, summary=summary)


def _late(attempt: Attempt, change: Mapping[str, Any], about: Mapping[str, Any]) -> Attempt:
    same = (attempt.number, attempt.epoch) == (about["attempt"], about["epoch"])
    return msgspec.structs.replace(attempt, late=change["summary"]) if same else attempt


def instant(said: str | None, field: str) -> datetime | None:
    """A time as the command line names it: ISO 8601 (UTC unless it says so), or how long ago, such as 30m, 12h, 7d."""
    if said is None:
        return None
    if _AGO.fullmatch(said):
        return datetime.now(UTC) - length(said, field)
    try:
        named = datetime.fromisoformat(said)
    except ValueError:
        raise WrongUse(f"{field} must be an ISO time, or how long ago, as 30m, 12h or 7d; got {said!r}.") from None
    return named if named.tzinfo else named.replace(tzinfo=UTC)


def length(said: str, field: str) -> timedelta:
    """A length of time as the command line names it: 90s, 30m, 12h, 7d, 2w."""
    return timedelta(microseconds=lengths.read(said, field))


def pairs(given: Sequence[str]) -> dict[str, str]:
    """The pairs of options such as `--origin session=7`."""
    split = [pair.partition("=") for pair in given]
    if wrong := [name for name, equals, _ in split if not equals or not name]:
        raise WrongUse(f"origin must look like name=value, got {wrong[0]!r}.", field="origin")
    return {name: value for name, _, value in split}
