"""What an operator may do to dispatches: the same functions for code and for the command line. No loop is needed."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import wraps
from typing import Any

import msgspec
from sqlalchemy import Connection

from postroad.engine.declarations import one_of
from postroad.model.clock import SECOND, span
from postroad.model.dispatches import Changed, DispatchFilter, DispatchRow
from postroad.model.entropy import Entropy
from postroad.model.errors import InvalidInput, Span, shown
from postroad.model.lifecycle import Status
from postroad.model.payload import text
from postroad.store import audit, dispatch_filters, dispatch_views, operators
from postroad.store.database import Database
from postroad.store.dispatch_filters import Chosen
from postroad.store.operators import Answered, Due, How, Many, Orders

CHUNK = 500
SAMPLE = 10
RATE = 50.0
RATE_MAX = 1_000_000.0
_OLDEST_FIRST = "ORDER BY o.created_at, o.id LIMIT :limit"
_NEWEST = "ORDER BY o.created_at DESC, o.id DESC LIMIT 1"
_PLACE = "o.created_at, o.id"
_CRITERIA = "status, kind, to, key, reason, origin, since or before"

Verb = Callable[..., Answered]


class Dispatches:
    """What an operator may look at and do. Whatever changes anything is audited: who, why, what.

    A dispatch is named by its id or key; where many may be meant, a DispatchFilter takes the place of the name. Those
    are done in chunks, each a transaction of its own: a command that is cut short has done a part, and the same command
    once more does the rest.
    """

    def __init__(
        self, database: Callable[[], Database], entropy: Callable[[], Entropy], wake: Callable[[], None]
    ) -> None:
        self._database = database
        self._entropy = entropy
        self._wake = wake

    def get(self, id: str) -> DispatchRow | None:
        """One dispatch by its id or key, with its history; None if there is no such."""
        return self._database().read(dispatch_views.get, id)

    def list(
        self,
        *,
        status: str | None = None,
        kind: str | None = None,
        to: str | None = None,
        key: str | None = None,
        reason: str | None = None,
        origin: Mapping[str, str] | None = None,
        since: datetime | None = None,
        before: datetime | None = None,
        limit: int = 50,
        after: str | None = None,
    ) -> Sequence[DispatchRow]:
        """Dispatches, the newest first, without bodies; `after` a row's cursor goes on behind it.

        The other arguments are a DispatchFilter's.
        """
        wanted = DispatchFilter(
            status=status, kind=kind, to=to, key=key, reason=reason, origin=origin or {}, since=since, before=before
        )
        return self._database().read(dispatch_views.list_, wanted, limit=limit, after=after)

    def retry(
        self,
        which: str | DispatchFilter,
        *,
        actor: str,
        reason: str = "",
        force: bool = False,
        expires: Span | None = None,
        rate: float = RATE,
        dry_run: bool = False,
    ) -> Changed:
        """Send dead letters and expired dispatches again: a new epoch, attempt 0, the same key.

        Of many, `rate` a second become due, so that other traffic keeps its share, and those that a person has to think
        about (parked, resolved, withdrawn) are left alone unless the filter names their reason.

        Args:
            force: Even if the history says that it has arrived.
            expires: No attempt starts later than this after it is due; None: no such bound.
            dry_run: Only say which are meant.
        """
        due = Due(expires=_expires(expires), gap=_gap(rate))
        orders = Orders(by=audit.operator(actor, reason), force=force)
        if isinstance(which, str):
            return self._named(_one_of(operators.retry), which, "retried", dry_run=dry_run, orders=orders, due=due)
        wanted = _criteria(which, operators.RETRIABLE, "retried")
        return self._many(operators.retry, wanted, "retried", orders=orders, dry_run=dry_run, due=due)

    def withdraw(self, which: str | DispatchFilter, *, actor: str, reason: str = "", dry_run: bool = False) -> Changed:
        """End pending dispatches that are no longer wanted: expired, and their streams are told."""
        orders = Orders(by=audit.operator(actor, reason))
        if isinstance(which, str):
            return self._named(_one_of(operators.withdraw), which, "withdrawn", dry_run=dry_run, orders=orders)
        wanted = _criteria(which, (Status.PENDING,), "withdrawn")
        return self._many(operators.withdraw, wanted, "withdrawn", orders=orders, dry_run=dry_run)

    def purge(
        self,
        which: str | DispatchFilter,
        *,
        actor: str,
        reason: str = "",
        force: bool = False,
        history: bool = False,
        dry_run: bool = False,
    ) -> Changed:
        """Delete finished dispatches; their keys stay taken by tombstones.

        Args:
            force: Those in flight, too; they are withdrawn first.
            history: Delete their history as well.
            dry_run: Only say which are meant.
        """
        orders = Orders(by=audit.operator(actor, reason), force=force)
        if isinstance(which, str):
            verb = _one_of(operators.purge)
            return self._named(verb, which, "purged", dry_run=dry_run, orders=orders, history=history)
        wanted = _criteria(which, tuple(Status) if force else operators.FINISHED, "purged")
        return self._many(operators.purge, wanted, "purged", orders=orders, dry_run=dry_run, history=history)

    def resolve(
        self,
        id: str,
        how: How,
        *,
        actor: str,
        reason: str = "",
        force: bool = False,
        expires: Span | None = None,
    ) -> Changed:
        """Say what became of a dead letter that may have arrived (dispatch.dead_letter.unknown_outcome).

        Args:
            how: "sent": it did, and its stream is told so. "discard": nobody minds. "resend": as `retry`.
            force: Resend it even if the history says that it has arrived.
            expires: Of a resend: no attempt starts later than this from now.
        """
        one_of(how, operators.HOW, "how")
        orders = Orders(by=audit.operator(actor, reason), force=force)
        due = Due(expires=_expires(expires))
        return self._named(operators.resolve, id, f"resolved ({how})", how=how, due=due, orders=orders)

    def replay(
        self, id: str, *, actor: str, reason: str = "", key: str | None = None, expires: Span | None = None
    ) -> Changed:
        """Send what a finished dispatch says once more, as a new one whose origin names the old as `replay_of`.

        Args:
            key: The new one's key; None: its id. The destination will take it for another message.
            expires: No attempt starts later than this from now.
        """
        return self._named(
            operators.replay,
            id,
            "replayed",
            new_id=self._entropy().token(),
            key="" if key is None else text(key, "key"),
            expires=_expires(expires),
            orders=Orders(by=audit.operator(actor, reason)),
        )

    def _named(self, verb: Verb, id: str, said: str, *, dry_run: bool = False, **how: Any) -> Changed:
        """Do it to one dispatch: `verb(conn, id, now=…, **how)`."""
        found = self._database().read(dispatch_views.find, id)
        if found is None:
            return _missing(id)
        if dry_run:
            sample = [dispatch_views.view(found)]
            return Changed(found=1, done=0, said=f"1 would be {said}", id=found.id, sample=sample)
        answered = _transact(self._database(), verb, found.id, [found.id], **how)
        if answered.refused:
            (why,) = answered.refused.values()
            return Changed(found=1, done=0, said=f"{found.key} was not {said}: {why}", refused={why: 1}, id=found.id)
        if not answered.done:
            return _missing(id)
        self._wake()
        made = f" as {answered.made}" if answered.made else ""
        return Changed(found=1, done=1, said=f"{found.key} was {said}{made}", id=answered.made or found.id)

    def _many(self, verb: Verb, wanted: "_Wanted", said: str, *, orders: Orders, dry_run: bool, **how: Any) -> Changed:
        """Do it to all that fit and are there when it begins, oldest first, in chunks."""
        database = self._database()
        number, sample = database.read(dispatch_views.oldest, wanted.where, limit=SAMPLE)
        if not number:
            return Changed(found=0, done=0, said="no dispatch fits", sample=sample)
        orders = msgspec.structs.replace(orders, many=wanted.many)
        found, done, refused = 0, 0, Counter[str]()
        for ids in _chunks(database, wanted.where):
            answered = _transact(database, verb, ids, ids, dry_run=dry_run, orders=orders, **how)
            found += len(ids)
            done += len(answered.done)
            refused.update(answered.refused.values())
            if "due" in how:
                how["due"] = how["due"].further(len(answered.done), began=answered.now)
            self._wake()
        if dry_run:
            would = f"{done} would be {said}" if done == found else f"{done} of {found} would be {said}"
            return Changed(found=found, done=0, said=would, refused=refused, sample=sample)
        return Changed(found=found, done=done, said=f"{done} of {found} were {said}", refused=refused, sample=sample)


class _Wanted(msgspec.Struct, frozen=True):
    """What a filter chooses: as conditions, and as the verbs want to know it."""

    where: Chosen
    many: Many


class _Undone(Exception):
    """What a verb would have answered; its transaction is taken back."""

    def __init__(self, answered: Answered) -> None:
        super().__init__("a dry run")
        self.answered = answered


def _transact(
    database: Database, verb: Verb, given: str | list[str], ids: list[str], *, dry_run: bool = False, **how: Any
) -> Answered:
    """Do it; in a dry run also take it back, so that what it says is what would come of it."""

    @wraps(verb)
    def tried(*args: Any, **more: Any) -> Answered:
        answered: Answered = verb(*args, **more)
        if dry_run:
            raise _Undone(answered)
        return answered

    try:
        return database.transact(tried, given, lock=lambda conn: operators.hold(conn, ids), **how)
    except _Undone as undone:
        return undone.answered


def _one_of(verb: Verb) -> Verb:
    """A verb that takes ids, for one of them."""
    return lambda conn, id, **how: verb(conn, [id], **how)


def _criteria(wanted: DispatchFilter, statuses: Sequence[Status], said: str) -> _Wanted:
    """What a filter chooses among dispatches in these statuses; refused if it chooses nothing in particular."""
    if wanted == DispatchFilter():
        raise InvalidInput(f"Give a dispatch's id or key, or {_CRITERIA}.", field="filter")
    where = dispatch_filters.chosen(wanted, statuses=statuses)
    if wanted.status is not None and wanted.status not in statuses:
        raise InvalidInput(
            f"Only what is {', '.join(statuses)} can be {said}, not {wanted.status}"
            f"{' unless forced' if said == 'purged' else ''}.",
            field="status",
        )
    return _Wanted(where, Many(filter=_as_text(wanted), fitting=where, cautious=wanted.reason is None))


def _as_text(wanted: DispatchFilter) -> str:
    """A filter as people read it."""
    given = {name: getattr(wanted, name) for name in DispatchFilter.__dataclass_fields__}
    return " ".join(f"{name}={_value(value)}" for name, value in given.items() if value)


def _value(value: object) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    return ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, Mapping) else str(value)


def _chunks(database: Database, where: Chosen) -> Iterator[list[str]]:
    """The ids of all that fit and are there now, by chunks, oldest first, each looked up while nothing is locked."""
    newest = database.read(_places, where, _NEWEST)
    if not newest:
        return
    where &= dispatch_filters.upto(*newest[0])
    following = where
    while places := database.read(_places, following, _OLDEST_FIRST, limit=CHUNK):
        yield [id for _, id in places]
        following = where & dispatch_filters.newer(*places[-1])


def _places(conn: Connection, where: Chosen, order: str, **limit: int) -> list[tuple[int, str]]:
    return [(row.created_at, row.id) for row in dispatch_filters.query(conn, _PLACE, where, order, **limit)]


def _missing(id: str) -> Changed:
    return Changed(found=0, done=0, said=f"No dispatch has the id or key {shown(id)}")


def _expires(expires: Span | None) -> int | None:
    return None if expires is None else span(expires, "expires")


def _gap(rate: float) -> int:
    """Microseconds between two due times at so many a second."""
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate <= RATE_MAX:
        raise InvalidInput(
            f"rate must be above 0 and at most {RATE_MAX:.0f} a second, got {shown(rate)}.", field="rate"
        )
    return round(SECOND / rate)
