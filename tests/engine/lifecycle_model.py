"""The life of one dispatch without lanes, as the documentation tells it: what each event makes of it, and when.

Written beside the product, not from its code: no row, no statement, no lifecycle table is used here. Times are
microseconds; words are those of the reasons' last parts.
"""

from dataclasses import dataclass, field

SECOND = 1_000_000
LEASE = 15 * SECOND
ENDED = ("delivered", "acked", "dead_letter", "expired")
Step = tuple[str | None, str, str]  # from, to, reason


@dataclass(frozen=True)
class Rules:
    """What its kind says of a dispatch. Delays double from `first` up to `cap`; there is no jitter."""

    attempts: int
    first: int
    cap: int
    budget: int | None = None
    parks: bool = False

    def delay(self, attempt: int) -> int:
        """The pause after this attempt."""
        return min(self.first * 2 ** (attempt - 1), self.cap) * SECOND


@dataclass
class Life:
    """One dispatch. `token`: of the claim that holds it; `arrived`: somebody has said so although it was dead."""

    kind: str
    rules: Rules
    ack: bool
    due: int | None
    expires: int | None
    status: str = "pending"
    reason: str = "dispatch.pending.enqueued"
    attempt: int = 0
    attempts_max: int | None = None
    epoch: int = 0
    first_at: int | None = None
    token: str | None = None
    arrived: bool = False
    gone: bool = False
    steps: list[Step] = field(default_factory=lambda: [(None, "pending", "dispatch.pending.enqueued")])

    def become(self, status: str, reason: str, due: int | None = None) -> None:
        """Go on to a status; nobody holds it any more."""
        self.steps.append((self.status, status, reason))
        self.status, self.reason, self.due, self.token = status, reason, due, None

    def word(self, reason: str) -> None:
        """Something is said of it that changes nothing."""
        self.steps.append((self.status, self.status, reason))

    def die(self, why: str) -> None:
        """Become a dead letter; from pending by way of a claim that sends nothing."""
        if self.status == "pending":
            self.steps.append(("pending", "delivering", "dispatch.delivering.attempt"))
            self.status = "delivering"
        self.become("dead_letter", f"dispatch.dead_letter.{why}")

    def over_budget(self, start: int) -> bool:
        """Whether an attempt that starts then would be beyond the budget; the first retry never is."""
        budget = self.rules.budget
        if budget is None or self.first_at is None or self.attempt < 2:
            return False
        return start > self.first_at + budget * SECOND

    def moment(self) -> int | None:
        """When it moves next by itself; None: never."""
        if self.gone or self.status in ENDED or self.due is None:
            return None
        if self.expires is None:
            return self.due
        # A deadline ends what nobody is sending, and what somebody sends once the lease is over.
        return min(self.due, self.expires) if self.status == "pending" else self.due

    def begin(self, now: int, token: str) -> bool:
        """Its time has come: start an attempt under a claim, or end it because none may start any more."""
        lost, last = self.status == "delivering", self.attempt >= (self.attempts_max or self.rules.attempts)
        if self.expires is not None and self.expires <= now:
            self.become("expired", "dispatch.expired.deadline")
        elif lost and last:
            self.die("lease_lost")
        elif lost and self.rules.parks:
            self.die("unknown_outcome")
        elif self.ack and last:  # it was sent for the last time, and waited for
            self.die("ack_timeout")
        elif self.over_budget(now):
            self.die("budget")
        else:
            self.become("delivering", "dispatch.delivering.attempt", now + LEASE)
            self.token = token
            self.attempt += 1
            self.attempts_max = self.attempts_max or self.rules.attempts
            self.first_at = now if self.first_at is None else self.first_at
        return self.token == token

    def end(self, result: str, now: int, after: int = 0) -> None:
        """The attempt that holds it has ended so; `after`: what its destination asks for, in seconds."""
        assert self.attempts_max is not None
        if result == "ok" and self.ack:
            self.become("pending", "dispatch.delivered.transport_ok", now + self.rules.delay(self.attempt))
        elif result == "ok":
            self.become("delivered", "dispatch.delivered.transport_ok")
        elif result == "cut_short":
            self.attempts_max += 1
            self.become("pending", "dispatch.pending.released", now)
        elif result == "permanent":
            self.die("permanent")
        elif result == "unknown":
            self.die("unknown_outcome")
        elif self.attempt >= self.attempts_max:
            self.die("max_attempts")
        else:
            start = now + max(self.rules.delay(self.attempt), after * SECOND)
            if self.over_budget(start):
                self.die("budget")
            else:
                self.become("pending", "dispatch.pending.retry_backoff", start)

    def settle(self, token: str, result: str, now: int) -> None:
        """A claimant says what its attempt came to, however late."""
        if self.token == token:
            self.end(result, now)
            return
        self.arrived |= result == "ok"
        words = {"ok": "dispatch.stale.transport_ok", "unsent": "dispatch.stale.unsent"}
        self.word(words.get(result, "dispatch.stale.transport_failed"))

    def acknowledge(self, epoch: int) -> str:
        """Somebody presents the token of an epoch; the error's name, or ''."""
        if self.gone:
            return "DispatchNotFound"
        if not self.ack:
            return "AckNotRequested"
        if epoch != self.epoch:
            return "BadAckToken"
        if self.status in ("pending", "delivering"):
            self.become("acked", "dispatch.acked.consumer")
        return "" if self.status == "acked" else "AckRefused"

    def withdraw(self) -> bool:
        """Whether it was still to be had."""
        if self.gone or self.status != "pending":
            return False
        self.become("expired", "dispatch.expired.withdrawn")
        return True

    def retry(self, now: int, *, force: bool, expires: int | None = None) -> bool:
        """Whether an operator may have it sent once more: a new epoch."""
        if self.gone or self.status not in ("dead_letter", "expired") or (self.arrived and not force):
            return False
        self.become("pending", "dispatch.pending.operator_retry", now)
        self.epoch, self.attempt, self.attempts_max, self.first_at = self.epoch + 1, 0, None, None
        self.expires = None if expires is None else now + expires * SECOND
        return True

    def resolve(self, how: str, now: int, *, force: bool) -> bool:
        """Whether an operator may say what became of it."""
        parked = self.status == "dead_letter" and self.reason == "dispatch.dead_letter.unknown_outcome"
        if self.gone or not parked:
            return False
        if how == "resend":
            return self.retry(now, force=force)
        self.arrived |= how == "sent"
        self.reason = f"dispatch.resolved.{how if how == 'sent' else 'discarded'}"
        self.word(self.reason)
        return True

    def purge(self, *, force: bool) -> bool:
        """Whether it is gone."""
        if self.gone or (self.status not in ENDED and not force):
            return False
        self.gone = True
        return True
