"""Group commit: what waits to be written is written together, in one real transaction.

Whatever was put in while the database was busy makes the next group, so nobody waits for company. A group has
members of one verb only, which takes many items as it takes one; no two of them name the same thing, so that
writing them in one go is writing them one after the other. If that is refused, or meets a lock, the group is written
again member by member under savepoints: a refusal then leaves nothing behind and stops nobody. Every answer, a
refusal too, comes after COMMIT, since it may have seen what other members wrote.
"""

import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from postroad.model.errors import CommitUnknown, PostroadError
from postroad.model.failpoints import failpoint
from postroad.store import dialects

Item = TypeVar("Item")
Answer = TypeVar("Answer")
Name = tuple[str, ...]

GROUP_MAX = 64
LOOK_MAX = 4 * GROUP_MAX  # how many of those that wait are looked at for a group


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb(Generic[Item, Answer]):
    """A verb that writes many items as it writes one.

    Attributes:
        run: `run(conn, items, *, now)` writes them all and gives an answer for each, in order; or it refuses them all.
        names: What an item is about: rows that it locks or may find taken. Two items with a name in common are
            never in one group; the least of them says where an item stands in its group, so that two groups
            meet what they share in one order.
    """

    run: Callable[..., Sequence[Answer]]
    names: Callable[[Item], Sequence[Name]]


@dataclass(slots=True, eq=False)
class Member:
    """An item that waits to be written, and where its answer goes."""

    verb: Verb[Any, Any]
    item: Any
    names: list[Name] = field(init=False)
    answer: Future[Any] = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.names = sorted(self.verb.names(self.item))
        self.answer.set_running_or_notify_cancel()  # what waits is never taken back

    def settle(self, found: object) -> None:
        """Give the answer; an exception is raised where it is awaited."""
        if isinstance(found, BaseException):
            self.answer.set_exception(found)
        else:
            self.answer.set_result(found)


class Waiting:
    """The members that wait, from any thread."""

    def __init__(self) -> None:
        self._members: deque[Member] = deque()
        self._lock = threading.Lock()

    def add(self, member: Member) -> None:
        """Put a member at the end."""
        with self._lock:
            self._members.append(member)

    def __len__(self) -> int:
        return len(self._members)

    def remove(self, member: Member) -> bool:
        """Take a member back; whether it was still there."""
        with self._lock:
            if member not in self._members:
                return False
            self._members.remove(member)
            return True

    def take(self, most: int = GROUP_MAX) -> list[Member]:
        """The next group, in its order; those that it leaves keep their place. Empty: nobody waits."""
        group: list[Member] = []
        left: list[Member] = []
        named: set[Hashable] = set()
        with self._lock:
            for _ in range(min(len(self._members), LOOK_MAX)):
                if len(group) == most:
                    break
                member = self._members.popleft()
                fits = not group or (member.verb is group[0].verb and named.isdisjoint(member.names))
                (group if fits else left).append(member)
                named.update(member.names)  # of one that is left too: what comes after it stays after it
            self._members.extendleft(reversed(left))
        return sorted(group, key=lambda member: member.names[:1])


Transact = Callable[[Callable[..., list[object]]], list[object]]
_ALONE = object()


def run(members: Sequence[Member], transact: Transact) -> list[Member]:
    """Write a group and answer its members, except those that are returned: they must be written alone.

    `transact(fn)` runs `fn(conn, now=…)` in one transaction; again only if the first one failed for a reason that
    lies in nothing that was written in it.
    """
    try:
        found = _write(members, transact)
    except BaseException as error:  # nobody is left waiting, whatever this is
        found = [error for _ in members]
    return _answer(members, found)


def _write(members: Sequence[Member], transact: Transact) -> Sequence[object]:
    """The answer of each member, or that it must be written alone."""
    for way in (_together, _one_by_one) if len(members) > 1 else (_together,):
        try:
            found = transact(partial(way, members))
        except CommitUnknown as error:
            return [CommitUnknown(*error.args) for _ in members]
        except Exception as error:
            refused = len(members) == 1 and isinstance(error, PostroadError)
            if refused or (dialects.is_away(error) and not dialects.is_cancelled(error)):
                return [error for _ in members]
            # Nothing was written.
        else:
            failpoint("group.committed")
            return found
    return [_ALONE for _ in members]


def _answer(members: Sequence[Member], found: Sequence[object]) -> list[Member]:
    for member, answer in zip(members, found, strict=True):
        if answer is not _ALONE:
            member.settle(answer)
    return [member for member, answer in zip(members, found, strict=True) if answer is _ALONE]


def _together(members: Sequence[Member], conn: Connection, *, now: int) -> list[object]:
    found: Sequence[object] = members[0].verb.run(conn, [member.item for member in members], now=now)
    assert len(found) == len(members), "a verb answers each of its items"
    return list(found)


def _one_by_one(members: Sequence[Member], conn: Connection, *, now: int) -> list[object]:
    return [_guarded(member, conn, now=now) for member in members]


def _guarded(member: Member, conn: Connection, *, now: int) -> object:
    """The answer, or the refusal, of one member of a group; a refused one has written nothing."""
    failpoint("group.member")
    try:
        with conn.begin_nested():
            (found,) = member.verb.run(conn, [member.item], now=now)
    except PostroadError as refusal:
        return refusal
    except DBAPIError as error:
        if dialects.is_lock_timeout(error):
            dialects.bound_lock_waits(conn, milliseconds=1)  # once is enough: the others wait too
            return _ALONE
        raise
    return found
