"""A database in which every verb on dispatches finds something to do, and what must hold of its rows.

| kind | how its dispatches stand |
|---|---|
| over | dead (also parked, in a lane that waits for a person, in one that went on), expired, delivered, purged |
| held | being sent under `held`, whose lease runs: of a stream and of none, in a lane, at the last attempt, asking |
| due | pending, expired, lost with their claimants, unheard of by their consumer, beyond the budget; in lanes too |
| parked | lost with its claimant, where nobody sends again what may have arrived |
| idle | pending and not due: what is withdrawn or acknowledged |
"""

from typing import Any

import msgspec

from postroad.model.acks import Keyring, Presented
from postroad.model.clock import FakeClock
from postroad.model.retry import Retry
from postroad.model.rows import DispatchClaim, NewDispatch, SendPolicy, Settlement
from postroad.store import dispatch_claims, lanes, moves, outbox, purging, settle
from postroad.store.database import Database
from postroad.testing.contracts.dispatches import LEASE, dispatch

KEYS = Keyring(["the secret of this scene"])
RETRY = Retry(attempts=3, first=60, budget=3_000, jitter=False)
POLICIES = {
    kind: SendPolicy(kind=kind, lease=LEASE, retry=RETRY, park_unknown=kind == "parked")
    for kind in ("over", "held", "due", "parked", "idle")
}
SKIPS = msgspec.structs.replace(POLICIES["over"], on_dead="skip")
LATER = 4 * 10**15  # in the year 2096
NUMBERS: dict[str, int] = {}


def id_of(key: str) -> str:
    """The id of a dispatch of the scene."""
    return f"{NUMBERS.setdefault(key, len(NUMBERS) + 1):032x}"


def made(key: str, **more: Any) -> NewDispatch:
    """A dispatch `<kind>/<name>`, due long ago."""
    number = int(id_of(key), 16)
    return dispatch(number, **{"key": key, "kind": key.partition("/")[0], **more})


def token(key: str) -> Presented:
    """What acknowledges a dispatch of the scene."""
    return KEYS.read(KEYS.token(id_of(key), 0))


def result(held: DispatchClaim, came: Any, policy: SendPolicy | None = None) -> Settlement:
    """The result of an attempt."""
    error = "" if came == "ok" else f"{held.key} {came}"
    return Settlement(
        id=held.id, token=held.token, attempt=held.attempt, epoch=held.epoch, result=came, error=error,
        policy=policy or POLICIES[held.kind], lane=held.lane, receipt="{}" if came == "ok" else None,
    )  # fmt: skip


class Scene:
    """Builds the scene; `held` are the claims of `held` by key, `lost` a claim that was taken over."""

    def __init__(self, database: Database, clock: FakeClock) -> None:
        self.database = database
        self.clock = clock
        self.call = "at first"
        self._spend_a_budget()
        self._end_some()
        self._lose_some()
        clock.advance(4_000)
        self._wait_in_idle()
        self.held = self._hold_some()
        self._wait_in_due()

    def id(self, key: str) -> str:
        """The id for a new dispatch: another one for each `call`, as programs have it."""
        return id_of(f"{key}, {self.call}")

    def new(self, key: str, **more: Any) -> NewDispatch:
        """A dispatch that a program sends, whether its key is taken or not."""
        return made(key, id=self.id(key), **more)

    def _send(self, *dispatches: NewDispatch) -> None:
        self.database.transact(outbox.insert, dispatches, source="app", actor="", in_turn=False)

    def _claim(self, kind: str, token: str, **more: Any) -> dict[str, DispatchClaim]:
        policy = POLICIES[kind]
        found = self.database.transact(
            dispatch_claims.claim, policy, names=[kind], token=token, limit=100, takeover=False, **more
        )
        return {held.key: held for held in found.claims}

    def _promote(self, kind: str) -> None:
        self.database.transact(lanes.promote, [kind], limit=100)

    def _settle(self, *results: Settlement) -> None:
        self.database.transact(settle.settle, results)

    def _spend_a_budget(self) -> None:
        self._send(made("due/spent", stream="s/1"))
        for number in range(2):
            (held,) = self._claim("due", f"spent-{number}").values()
            self._settle(result(held, "failed"))
            self.clock.advance(60)

    def _end_some(self) -> None:
        self._send(
            made("over/dead"), made("over/unknown", stream="s/1"), made("over/delivered", stream="s/2"),
            made("over/blocking", lane="blocked"), made("over/blocked", lane="blocked"),
            made("over/skipped", lane="passed"), made("over/next", lane="passed"),
            made("over/again", lane="alone"), made("over/purged"),
        )  # fmt: skip
        self._promote("over")
        held = self._claim("over", "over")
        ends = {"over/unknown": "unknown", "over/delivered": "ok", "over/purged": "ok"}
        for key, one in held.items():
            skips = key in ("over/skipped", "over/again")
            self._settle(result(one, ends.get(key, "permanent"), SKIPS if skips else None))
        self._send(made("over/expired", stream="s/1", expires_at=1))
        self.database.transact(settle.expire, limit=10)
        self.database.transact(self._purge, id_of("over/purged"))

    @staticmethod
    def _purge(conn: Any, id: str, *, now: int) -> None:
        purging.purge(conn, list(moves.lock(conn, [id]).values()), history=False, now=now)

    def _lose_some(self) -> None:
        self._send(
            made("due/lost"), made("due/last", stream="s/1", max_attempts=1), made("parked/lost", stream="s/1"),
            made("due/unheard", ack_required=1, max_attempts=1), made("held/taken", stream="s/1"),
        )  # fmt: skip
        lost = {**self._claim("due", "lost"), **self._claim("parked", "lost"), **self._claim("held", "lost")}
        self._settle(result(lost["due/unheard"], "ok"))
        self.lost = lost["held/taken"]

    def _wait_in_idle(self) -> None:
        self._send(
            made("idle/plain", due_at=LATER), made("idle/stream", stream="s/1", due_at=LATER),
            made("idle/first", lane="calm", due_at=LATER), made("idle/second", lane="calm"),
            made("idle/asking", stream="s/2", ack_required=1, due_at=LATER),
            made("idle/asking too", lane="quiet", ack_required=1, due_at=LATER), made("idle/behind", lane="quiet"),
        )  # fmt: skip
        self._promote("idle")

    def _hold_some(self) -> dict[str, DispatchClaim]:
        self._send(
            made("held/stream", stream="s/1"), made("held/plain"), made("held/last", max_attempts=1),
            made("held/first", lane="open"), made("held/second", lane="open"),
            made("held/asking", stream="s/2", ack_required=1),
        )  # fmt: skip
        self._promote("held")
        won = self.database.transact(dispatch_claims.claim, POLICIES["held"], names=["held"], token="held", limit=100)
        return {held.key: held for held in won.claims}

    def _wait_in_due(self) -> None:
        self._send(
            made("due/plain"), made("due/stream", stream="s/1"), made("due/late", expires_at=1),
            made("due/first", lane="busy"), made("due/second", lane="busy"),
            made("due/too late", lane="tired", stream="s/2", expires_at=1), made("due/behind", lane="tired"),
        )  # fmt: skip
        self._promote("due")
        self._send(made("due/unseen", lane="new"), made("due/unseen too", lane="new"), made("due/joins", lane="busy"))
