"""Declarations: who carries out which kind, who decides for which streams, what needs no decision."""

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from postroad.engine.declarations import (
    RECORDED_LEASE,
    TURN_LEASE,
    Decider,
    Elsewhere,
    Filter,
    Limits,
    OnDead,
    OnFailure,
    OnUnknown,
    Registry,
    Sender,
    Transport,
    WhenInterrupted,
    check_retry,
    check_stream_type,
    count,
    known_kind,
    lease_of,
    one_of,
    plain,
    positive,
    put,
    put_sender,
    rate_of,
    runnable,
)
from postroad.engine.notifying import notify
from postroad.engine.schedules import cron_of
from postroad.engine.tools import Tool
from postroad.model.clock import span
from postroad.model.crons import Cron, Missed
from postroad.model.delegations import DEPTH_MAX, FAN_OUT_MAX
from postroad.model.dispatches import Alert, Dispatch
from postroad.model.errors import InvalidInput, Span, shown
from postroad.model.events import Event
from postroad.model.kinds import Kind
from postroad.model.operations import EFFECTS, Effect
from postroad.model.payload import VERSION_MAX
from postroad.model.retry import ATTEMPTS_MAX, Retry
from postroad.model.rows import SendPolicy

if TYPE_CHECKING:
    from postroad.engine.turn import Turn
    from postroad.store.reports import OwnerOf

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")


class Handlers:
    """A registry without a database, so that modules declare and one place runs."""

    def __init__(self) -> None:
        self._registry = Registry()

    def include(self, *handlers: "Handlers | str") -> None:
        """Take over what other registries declare; a str names one as `module:attribute`."""
        for given in handlers:
            found = _load(given) if isinstance(given, str) else given
            if not isinstance(found, Handlers):
                raise InvalidInput(f"handlers must be Handlers or their names, got {shown(found)}.", field="handlers")
            self._registry.add(found._registry)

    def sender(
        self,
        kind: Kind[T] | str,
        *,
        timeout: Span = 10,
        lease: Span | None = None,
        retry: Retry = Retry.PATIENT,
        concurrency: int = 10,
        concurrency_per_host: int | None = None,
        rate: float | None = None,
        rate_per_host: float | None = None,
        on_failure: OnFailure = "event",
        on_unknown: OnUnknown = "resend",
        on_dead: OnDead = "block",
        dedup_window: Span | None = None,
    ) -> Callable[[Callable[[Dispatch[T]], R]], Callable[[Dispatch[T]], R]]:
        """Carries out dispatches of a kind. Sync (in a thread) or async. Returns Receipt, str or None: all success.

        `RetryLater` and any other exception mean another attempt by `retry`, `GiveUp` a dead letter,
        `OutcomeUnknown` and our own timeout what `on_unknown` says, `Unreachable` that nothing was sent and others
        need not try either: their attempts are saved.

        Args:
            timeout: How long an attempt may take.
            lease: How long a claim is ours; timeout + 5 s unless given, and always above timeout + 1.5 s.
            concurrency: How many at once in this process.
            concurrency_per_host: Of these how many to one host, where `to` is an http or https URL.
            rate: How many attempts may start in a second, over all processes; 0.5 is one every other second.
            rate_per_host: The same for each host.
            on_failure: "event": a permanent failure comes back to its stream as an OUTCOME event; "alert": a
                person is told, and the outcome is recorded without a decision.
            on_unknown: "resend", or "park" as a dead letter for a person to resolve.
            on_dead: What a dead letter does to its lane: "block" until a person decides about it, or "skip".
            dedup_window: How long the destination knows a key that it has seen; `postroad doctor` holds it against
                how long attempts may go on.
        """
        known_kind(kind)  # at once: a bare `@post.sender` would declare nothing
        window = None if dedup_window is None else positive(dedup_window, "dedup_window")

        def declare(fn: Callable[[Dispatch[T]], R]) -> Callable[[Dispatch[T]], R]:
            runnable(fn, "sender")
            self._send_with(
                kind, fn, timeout=timeout, lease=lease, retry=retry, concurrency=concurrency,
                concurrency_per_host=concurrency_per_host, rate=rate, rate_per_host=rate_per_host,
                on_failure=on_failure, on_unknown=on_unknown, on_dead=on_dead, dedup_window=window,
            )  # fmt: skip
            return fn

        return declare

    def transport(
        self,
        kind: Kind[Any] | str,
        transport: Transport,
        *,
        timeout: Span = 10,
        lease: Span | None = None,
        retry: Retry = Retry.PATIENT,
        concurrency: int = 10,
        concurrency_per_host: int | None = None,
        rate: float | None = None,
        rate_per_host: float | None = None,
        on_failure: OnFailure = "event",
        on_unknown: OnUnknown = "resend",
        on_dead: OnDead = "block",
        dedup_window: Span | None = None,
    ) -> None:
        """Carries out dispatches of a kind by a transport; everything else as `sender` says."""
        send = getattr(transport, "send", None)
        if not callable(send):
            raise InvalidInput(f"transport must have a method `send`, got {shown(transport)}.", field="transport")
        runnable(send, "transport")
        self._send_with(
            kind, send, timeout=timeout, lease=lease, retry=retry, concurrency=concurrency,
            concurrency_per_host=concurrency_per_host, rate=rate, rate_per_host=rate_per_host,
            on_failure=on_failure, on_unknown=on_unknown, on_dead=on_dead,
            dedup_window=None if dedup_window is None else positive(dedup_window, "dedup_window"),
        )  # fmt: skip

    def _send_with(
        self,
        kind: Kind[Any] | str,
        fn: Callable[[Dispatch[Any]], Any],
        *,
        timeout: Span = 10,
        lease: Span | None = None,
        retry: Retry = Retry.PATIENT,
        concurrency: int = 10,
        concurrency_per_host: int | None = None,
        rate: float | None = None,
        rate_per_host: float | None = None,
        on_failure: OnFailure = "event",
        on_unknown: OnUnknown = "resend",
        on_dead: OnDead = "block",
        dedup_window: int | None = None,
        default: bool = False,
    ) -> None:
        known = known_kind(kind)
        limit = positive(timeout, "timeout")
        per_host = None if concurrency_per_host is None else count(concurrency_per_host, "concurrency_per_host")
        policy = SendPolicy(
            kind=known.name,
            version=known.version,
            lease=lease_of(lease, limit),
            retry=check_retry(retry),
            on_failure=one_of(on_failure, ("event", "alert"), "on_failure"),
            park_unknown=one_of(on_unknown, ("resend", "park"), "on_unknown") == "park",
            on_dead=one_of(on_dead, ("block", "skip"), "on_dead"),
            patience=check_retry(retry).horizon(limit) - limit,
            rate=rate_of(rate, "rate"),
            rate_per_host=rate_of(rate_per_host, "rate_per_host"),
        )
        declared = Sender(
            kind=known, fn=fn, timeout=limit, concurrency=count(concurrency, "concurrency"),
            on_unknown=on_unknown, policy=policy, dedup_window=dedup_window, default=default,
            concurrency_per_host=per_host,
        )  # fmt: skip
        for name in known.names:
            put_sender(self._registry.senders, name, declared)

    def kinds(self, *kinds: Kind[Any] | str) -> None:
        """Declared here, with no sender of their own: carried out by the command of the setting `notify_template`.

        Without the setting an attempt fails, and is retried as any other. A kind that another app carries out is one
        for `elsewhere`.
        """
        for kind in kinds:
            self._send_with(kind, notify, default=True)

    def elsewhere(self, *kinds: Kind[Any] | str) -> None:
        """Sent here, carried out by another app on the same database."""
        for kind in kinds:
            known = known_kind(kind)
            put(self._registry.elsewhere, known.name, Elsewhere(kind=known), "Elsewhere")

    def turn(
        self,
        stream_type: str,
        *,
        debounce: Span = 0,
        debounce_max: Span = 5,
        concurrency: int = 10,
        attempts: int = 5,
        timeout: Span = 300,
        lease: Span | None = None,
        when_interrupted: WhenInterrupted = "show",
        wake_on_report: bool = False,
        on_duplicate: "Callable[[Turn, str], None] | None" = None,
    ) -> "Callable[[Callable[[Turn], R]], Callable[[Turn], R]]":
        """Decides for streams `<stream_type>/…`. Sync (in a thread) or async.

        Args:
            debounce: How long a stream must be quiet before its events are taken, at most `debounce_max`.
            concurrency: How many turns of this type at once in this process.
            attempts: After that many failures a set of events is split; what fails alone goes dead, visibly.
            timeout: A turn that takes longer is failed, and its claim is not renewed.
            lease: How long a claim is ours between renewals; 30 s unless given.
            when_interrupted: Of a turn that must not be run again, because of the tools that it has called: "show"
                consumes its events, with an entry that says what is known; "park" leaves the stream to a person.
            wake_on_report: Whether reports are events to decide on, in turns of their own, or only land in the log.
            on_duplicate: `on_duplicate(turn, key)` replaces a decision whose dispatch key exists already, without
                running the handler again; without it a `postroad.failed` entry and an alert.
        """
        name = check_stream_type(stream_type)
        if on_duplicate is not None:
            plain(on_duplicate, "on_duplicate")

        def declare(fn: "Callable[[Turn], R]") -> "Callable[[Turn], R]":
            runnable(fn, "turn")
            quiet, longest = span(debounce, "debounce"), span(debounce_max, "debounce_max")
            decider = Decider(
                stream_type=name, fn=fn, debounce=quiet, debounce_max=max(longest, quiet) if quiet else 0,
                concurrency=count(concurrency, "concurrency"),
                attempts=count(attempts, "attempts", ATTEMPTS_MAX),
                timeout=positive(timeout, "timeout"),
                lease=TURN_LEASE if lease is None else positive(lease, "lease"),
                when_interrupted=one_of(when_interrupted, ("show", "park"), "when_interrupted"),
                wake_on_report=one_of(wake_on_report, (True, False), "wake_on_report"),
                on_duplicate=on_duplicate,
            )  # fmt: skip
            put(self._registry.deciders, name, decider, "A turn")
            return fn

        return declare

    def filter(
        self, stream_type: str, kind: Kind[Any] | str
    ) -> Callable[[Callable[[Event], str | None]], Callable[[Event], str | None]]:
        """A plain function: the reason why this event needs no decision, as a text, or None. Recorded as a noop.

        A filter that raises or returns anything else is logged, and the event is decided on.
        """
        name, known = check_stream_type(stream_type), known_kind(kind)

        def declare(fn: Callable[[Event], str | None]) -> Callable[[Event], str | None]:
            plain(fn, "filter")
            self._registry.filters.setdefault(name, []).append(Filter(known, fn))
            return fn

        return declare

    def delegation(self, stream_type: str, *, depth: int = DEPTH_MAX, fan_out: int = FAN_OUT_MAX) -> None:
        """How far streams of this type may delegate (`turn.delegate`); what is more is refused.

        Args:
            depth: How many delegations deep what they delegate may be: 1 if nobody has delegated to them.
            fan_out: How many one of them may have open at once.
        """
        limits = Limits(depth=count(depth, "depth"), fan_out=count(fan_out, "fan_out"))
        put(self._registry.limits, check_stream_type(stream_type), limits, "Delegation")

    def recorded(self, *stream_types: str) -> None:
        """Events of these streams become entries; no code runs."""
        for stream_type in stream_types:
            name = check_stream_type(stream_type)
            put(self._registry.deciders, name, Decider(stream_type=name, fn=None, lease=RECORDED_LEASE), "A turn")

    def stream_owner(self, fn: "OwnerOf") -> "OwnerOf":
        """Says whose a stream is, for `report(source=…, owner=…)`: a plain `fn(connection, stream)`.

        It returns the owner's name, or None if the stream is missing or was thrown away. It may read the application's
        own tables: it is called in the transaction that accepts the report, and must neither write nor commit.
        """
        plain(fn, "stream_owner")
        self._registry.own(fn)
        return fn

    def alert_sink(self, fn: Callable[[Alert], None]) -> Callable[[Alert], None]:
        """Where alerts go, a plain function, called in a thread; by default one line on stderr.

        One that raises or takes longer than 10 s is told again, at the latest every minute. After a crash it may be
        called twice for one alert.
        """
        plain(fn, "alert_sink")
        self._registry.sinks.append(fn)
        return fn

    @property
    def crons(self) -> Sequence[Cron]:
        """The crons that it declares."""
        return self._registry.crons

    def cron(
        self, name: str, spec: str, *, tz: str, missed: Missed = "once", attempts: int = 5, timeout: Span = 300,
        lease: Span | None = None,
    ) -> "Callable[[Callable[[Turn], R]], Callable[[Turn], R]]":  # fmt: skip
        """Runs a function by a schedule: as a turn of a stream of its own, one at a time over all processes.

        Its event is a TIMER_FIRED whose data says which time it is for: `scheduled_at`, ISO 8601. The next one is armed
        in the commit that ends the run, however it ends.

        Args:
            spec: A cron expression, `minute hour day month weekday`; with six fields the first are seconds.
            tz: The time zone it is read in, such as "Europe/Berlin" or "UTC".
            missed: What becomes of fires that found no process, or the run before still busy. "once": the latest is
                run, however late. "all": each is, in order, at most the last 1,000. "skip": what cannot begin within a
                minute is left out.
            attempts: After that many failures a run is given up, visibly, with an alert; the schedule goes on.
            timeout, lease: Of a run, as for `turn`.
        """
        found = cron_of(name, spec, tz, missed)

        def declare(fn: "Callable[[Turn], R]") -> "Callable[[Turn], R]":
            runnable(fn, "cron")
            decider = Decider(
                stream_type=found.stream_type,
                fn=fn,
                concurrency=1,
                attempts=count(attempts, "attempts", ATTEMPTS_MAX),
                timeout=positive(timeout, "timeout"),
                lease=TURN_LEASE if lease is None else positive(lease, "lease"),
                cron=found,
            )
            put(self._registry.deciders, found.stream_type, decider, "A cron")
            return fn

        return declare

    def tool(
        self,
        *,
        effect: Effect,
        version: int = 1,
        timeout: Span = 60,
    ) -> Callable[[Callable[P, R]], Tool[P, R]]:
        """Declares a function that a turn may call (`turn.call`), and what a call may do to the world.

        Its arguments need types: calls are held against them, and models get them as a JSON schema. Sync (in a
        thread) or async.

        Args:
            effect: "read" changes nothing; "idempotent" may be done again; "keyed" has a parameter `key` and hands it
                to a destination that does the same once per key; "unsafe" must never be done twice by itself.
            version: Part of what a recorded call is recognized by: raise it when the tool means something else.
            timeout: How long a call may take; then it raises TimeoutError.
        """
        one_of(effect, EFFECTS, "effect")
        longest = positive(timeout, "timeout")
        count(version, "version", VERSION_MAX)

        def declare(fn: Callable[P, R]) -> Tool[P, R]:
            runnable(fn, "tool")
            tool = Tool(fn, effect=effect, version=version, timeout=longest)
            kept: Tool[..., Any] = tool
            put(self._registry.tools, tool.name, kept, "A tool")
            return tool

        return declare


def _load(reference: str) -> Handlers:
    module, _, attribute = reference.partition(":")
    if not module or module.startswith("."):
        raise InvalidInput(f"handlers must be named as `module:attribute`, got {shown(reference)}.", field="handlers")
    found = getattr(importlib.import_module(module), attribute or "handlers", None)
    if not isinstance(found, Handlers):
        raise InvalidInput(f"handlers: {shown(reference)} is not `module:attribute` of a Handlers.", field="handlers")
    return found
