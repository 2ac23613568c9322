"""An operator, who retries, resolves, replays, withdraws and purges what the lists show, with force now and then."""

from collections.abc import Callable, Mapping
from random import Random

from postroad.engine.dispatches import Dispatches
from postroad.model.dispatches import Changed, DispatchFilter, DispatchRow
from postroad.model.lifecycle import Reason, Status
from postroad.store.operators import How
from postroad.testing.simulation.deeds import Deed
from postroad.testing.simulation.process import Process
from postroad.testing.simulation.workload import KINDS

ACTOR = "operator"
LISTED = 20
FORCED = 0.4
ASTRAY = 0.15  # how often something is chosen that the verb may refuse
MANY = 0.25
HOWS: tuple[How, ...] = ("sent", "resend", "discard")
FINISHED = (Status.DELIVERED, Status.ACKED, Status.DEAD_LETTER, Status.EXPIRED)
IN_FLIGHT = (Status.PENDING, Status.DELIVERING)
RETRIED = (Status.DEAD_LETTER, Status.DEAD_LETTER, Status.EXPIRED)
VERBS = (*["retry"] * 4, *["resolve"] * 3, *["purge"] * 2, "replay", "withdraw")
_NAMES = [kind.name for kind in KINDS]
_Verb = Callable[[Dispatches, Deed, str | DispatchFilter], Changed]


class Operator:
    """Draws what to do, and does it through a process."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._made = 0
        self._verbs: Mapping[str, _Verb] = {
            "retry": self._retry, "resolve": self._resolve, "replay": self._replay,
            "withdraw": self._withdraw, "purge": self._purge,
        }  # fmt: skip

    def deed(self) -> Deed:
        """What to do next; to what, a look will show."""
        verb, force = self._rng.choice(VERBS), self._rng.random() < FORCED
        how = self._rng.choice(HOWS) if verb == "resolve" else ""
        return Deed(who=ACTOR, verb=verb, how=how, force=force and verb in ("retry", "resolve", "purge"))

    async def act(self, process: Process, deed: Deed) -> None:
        """Look, choose, and do it: a plain call of the product's, as a command makes it."""
        dispatches = process.post.dispatches
        which = self._many(deed) or self._one(dispatches, deed)
        if which is None:
            return
        deed.subject = which if isinstance(which, str) else ""
        changed = self._verbs[deed.verb](dispatches, deed, which)
        deed.done, deed.refused = changed.done, list(changed.refused)

    def _one(self, dispatches: Dispatches, deed: Deed) -> str | None:
        """The id of one of the newest dispatches for which the verb is meant, now and then of any."""
        astray = self._rng.random() < ASTRAY
        rows = list(dispatches.list(limit=LISTED)) if astray else self._listed(dispatches, deed)
        asked = [row for row in rows if row.ack_required]  # about these there are questions
        return self._rng.choice(asked or rows).id if rows else None

    def _listed(self, dispatches: Dispatches, deed: Deed) -> list[DispatchRow]:
        match deed.verb:
            case "resolve":
                return list(dispatches.list(reason=Reason.UNKNOWN_OUTCOME, limit=LISTED))
            case "withdraw":
                return list(dispatches.list(status=Status.PENDING, limit=LISTED))
            case "purge" if deed.force:
                return list(dispatches.list(status=self._rng.choice(IN_FLIGHT), limit=LISTED))
            case "purge":
                return list(dispatches.list(status=self._rng.choice((*FINISHED, Status.PENDING)), limit=LISTED))
            case _:
                return list(dispatches.list(status=self._rng.choice(RETRIED), limit=LISTED))

    def _many(self, deed: Deed) -> DispatchFilter | None:
        """A filter, now and then, for the verbs that take one."""
        if deed.verb not in ("retry", "withdraw", "purge") or self._rng.random() >= MANY:
            return None
        kind = self._rng.choice([None, *_NAMES] if deed.verb == "retry" else _NAMES)
        status = {"retry": Status.DEAD_LETTER, "withdraw": Status.PENDING, "purge": Status.DELIVERED}[deed.verb]
        return DispatchFilter(kind=kind, status=status)

    def _retry(self, dispatches: Dispatches, deed: Deed, which: str | DispatchFilter) -> Changed:
        rate = self._rng.choice((1, 50))
        return dispatches.retry(which, actor=ACTOR, force=deed.force, expires=self._expires(), rate=rate)

    def _resolve(self, dispatches: Dispatches, deed: Deed, which: str | DispatchFilter) -> Changed:
        how = next(one for one in HOWS if one == deed.how)
        return dispatches.resolve(str(which), how, actor=ACTOR, force=deed.force, expires=self._expires())

    def _replay(self, dispatches: Dispatches, deed: Deed, which: str | DispatchFilter) -> Changed:
        self._made += 1
        key = self._rng.choice((None, f"r{self._made}", "r1"))
        return dispatches.replay(str(which), actor=ACTOR, key=key, expires=self._expires())

    def _withdraw(self, dispatches: Dispatches, deed: Deed, which: str | DispatchFilter) -> Changed:
        return dispatches.withdraw(which, actor=ACTOR)

    def _purge(self, dispatches: Dispatches, deed: Deed, which: str | DispatchFilter) -> Changed:
        return dispatches.purge(which, actor=ACTOR, force=deed.force)

    def _expires(self) -> float | None:
        return round(self._rng.uniform(1, 30), 3) if self._rng.random() < 0.2 else None
