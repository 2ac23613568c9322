"""The `postroad dispatch` commands. They need no loop to run, and none of them sends.

Exit codes: 0 done (of many: also if none fits), 1 no such dispatch, or it was left as it is, or the database is away,
2 wrong use.
"""

import getpass
from collections.abc import Callable
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from postroad.surfaces.options import DatabaseOption, JsonOption, LimitOption, SchemaOption
from postroad.surfaces.output import Conflict, NotFound, WrongUse, reporting, show_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from postroad.engine.dispatches import Dispatches
    from postroad.model.dispatches import Changed, DispatchFilter
    from postroad.surfaces.dispatch_reading import Policies

CRITERIA = "--status, --kind, --to, --key, --reason-code, --origin, --since or --before"
EXIT_CODES = "Exit codes: 0 done, 1 not found, nothing done or no database, 2 wrong use."
app = typer.Typer(
    help=f"Look at dispatches, and decide on them. {EXIT_CODES}", no_args_is_help=True, rich_markup_mode=None
)

NameArgument = Annotated[str, typer.Argument(metavar="ID_OR_KEY", help="Its id or its key.")]
WhichArgument = Annotated[
    str | None, typer.Argument(metavar="[ID_OR_KEY]", help="Its id or its key; else the options say which.")
]
StatusOption = Annotated[str | None, typer.Option("--status", help="pending, delivering, delivered, acked, …")]
KindOption = Annotated[str | None, typer.Option("--kind", help="Of this kind.")]
ToOption = Annotated[str | None, typer.Option("--to", help="To this destination.")]
KeyOption = Annotated[str | None, typer.Option("--key", help="Whose key begins so.")]
ReasonCodeOption = Annotated[
    str | None,
    typer.Option("--reason-code", help="Whose last reason is this, such as max_attempts or unknown_outcome."),
]
OriginOption = Annotated[list[str] | None, typer.Option("--origin", help="name=value; may be given several times.")]
SinceOption = Annotated[str | None, typer.Option("--since", help="Created since: an ISO time, or 12h, 7d ago.")]
BeforeOption = Annotated[str | None, typer.Option("--before", help="Created before: an ISO time, or 12h, 7d ago.")]
ActorOption = Annotated[str | None, typer.Option("--actor", help="Who does it; your login name if left out.")]
ReasonOption = Annotated[str, typer.Option("--reason", help="Why, for the history and the audit.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Even if its history says that it has arrived.")]
ExpiresOption = Annotated[
    str | None, typer.Option("--expires", help="No attempt later than this after it is due: 30m, 12h.")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only count what is meant and show some of it.")]
AppOption = Annotated[
    str | None,
    typer.Option("--app", metavar="APP", help="module:attribute of a Postroad: what it knows is told too."),
]


class How(StrEnum):
    """What became of a dispatch that may have arrived."""

    SENT = "sent"
    RESEND = "resend"
    DISCARD = "discard"


@app.command("ls")
def list_dispatches(
    *,
    status: StatusOption = None,
    kind: KindOption = None,
    to: ToOption = None,
    key: KeyOption = None,
    reason_code: ReasonCodeOption = None,
    origin: OriginOption = None,
    since: SinceOption = None,
    before: BeforeOption = None,
    limit: LimitOption = 50,
    after: Annotated[str | None, typer.Option("--after", metavar="CURSOR", help="Behind this row of a list.")] = None,
    database: DatabaseOption = None,
    schema: SchemaOption = None,
    as_json: JsonOption = False,
) -> None:
    """List dispatches, the newest first, without bodies."""
    with reporting(as_json):
        from postroad.surfaces import dispatch_reading, reading, screens

        wanted = _filter(status, kind, to, key=key, reason=reason_code, origin=origin, since=since, before=before)
        found = reading.look(database, schema, dispatch_reading.dispatches, wanted, limit=limit, after=after)
        if as_json:
            show_json(found)
        else:
            screens.dispatches(found, limit=limit)


@app.command("show")
def show_dispatch(
    name: NameArgument,
    *,
    body: Annotated[bool, typer.Option("--body", help="The whole body, not its first 2,000 characters.")] = False,
    app: AppOption = None,
    database: DatabaseOption = None,
    schema: SchemaOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a dispatch: why it is not moving, its attempts, its history, its body."""
    with reporting(as_json):
        known = _policies(app)
        from postroad.surfaces import dispatch_reading, reading, screens

        found = reading.look(database, schema, dispatch_reading.dispatch, name, whole=body, known=known)
        if as_json:
            show_json(found.plain())
        else:
            screens.dispatch(found)


@app.command("why")
def why_dispatch(
    name: NameArgument,
    *,
    app: AppOption = None,
    database: DatabaseOption = None,
    schema: SchemaOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say in one sentence why a dispatch is not moving."""
    with reporting(as_json):
        known = _policies(app)
        from postroad.surfaces import dispatch_reading, reading
        from postroad.surfaces.output import say

        found = reading.look(database, schema, dispatch_reading.why, name, known=known)
        if as_json:
            show_json({"why": found})
        else:
            say(found)


@app.command("retry")
def retry_dispatches(
    which: WhichArgument = None,
    *,
    status: StatusOption = None,
    kind: KindOption = None,
    to: ToOption = None,
    key: KeyOption = None,
    reason_code: ReasonCodeOption = None,
    origin: OriginOption = None,
    since: SinceOption = None,
    before: BeforeOption = None,
    dry_run: DryRunOption = False,
    force: ForceOption = False,
    expires: ExpiresOption = None,
    rate: Annotated[float, typer.Option("--rate", help="Of many, so many a second become due.")] = 50.0,
    actor: ActorOption = None,
    reason: ReasonOption = "",
    database: DatabaseOption = None,
    schema: SchemaOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send a dead letter or an expired dispatch again, or all that the options name: attempt 0, the same key."""
    with _changing(which, database, schema, as_json=as_json, dry_run=dry_run) as change:
        wanted = _filter(status, kind, to, key=key, reason=reason_code, origin=origin, since=since, before=before)
        chosen = _chosen(which, wanted)
        span = _length(expires)
        change(lambda d: d.retry(
            chosen, actor=actor_of(actor), reason=reason, force=force, expires=span, rate=rate, dry_run=dry_run
        ))  # fmt: skip


@app.command("replay")
def replay_dispatch(
    name: NameArgument,
    *,
    key: Annotated[str | None, typer.Option("--key", help="The new one's key; else its id.")] = None,
    expires: ExpiresOption = None,
    actor: ActorOption = None,
    reason: ReasonOption = "",
    database: DatabaseOption = None,
    schema: SchemaOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send what a finished dispatch says once more, as a new dispatch that names the old one."""
    with _changing(name, database, schema, as_json=as_json) as change:
        span = _length(expires)
        change(lambda d: d.replay(name, actor=actor_of(actor), reason=reason, key=key, expires=span))


@app.command("resolve")
def resolve_dispatch(
    name: NameArgument,
    *,
    sent: Annotated[bool, typer.Option("--sent", help="It has arrived.")] = False,
    resend: Annotated[bool, typer.Option("--resend", help="It has not, or twice does no harm: send it again.")] = False,
    discard: Annotated[bool, typer.Option("--discard", help="Nobody minds whether it has.")] = False,
    force: ForceOption = False,
    expires: ExpiresOption = None,
    actor: ActorOption = None,
    reason: ReasonOption = "",
    database: DatabaseOption = None,
    schema: SchemaOption = None,
    as_json: JsonOption = False,
) -> None:
    """Decide on a dead letter that may have arrived (reason unknown_outcome)."""
    with _changing(name, database, schema, as_json=as_json) as change:
        asked = [how for how, given in zip(How, (sent, resend, discard), strict=True) if given]
        if len(asked) != 1:
            raise WrongUse("Give one of --sent, --resend and --discard.")
        (how,) = asked
        span = _length(expires)
        change(lambda d: d.resolve(
            name, how.value, actor=actor_of(actor), reason=reason, force=force, expires=span
        ))  # fmt: skip


@app.command("withdraw")
def withdraw_dispatches(
    which: WhichArgument = None,
    *,
    status: StatusOption = None,
    kind: KindOption = None,
    to: ToOption = None,
    key: KeyOption = None,
    reason_code: ReasonCodeOption = None,
    origin: OriginOption = None,
    since: SinceOption = None,
    before: BeforeOption = None,
    dry_run: DryRunOption = False,
    actor: ActorOption = None,
    reason: ReasonOption = "",
    database: DatabaseOption = None,
    schema: SchemaOption = None,
    as_json: JsonOption = False,
) -> None:
    """End a pending dispatch that is no longer wanted, or all that the options name."""
    with _changing(which, database, schema, as_json=as_json, dry_run=dry_run) as change:
        wanted = _filter(status, kind, to, key=key, reason=reason_code, origin=origin, since=since, before=before)
        chosen = _chosen(which, wanted)
        change(lambda d: d.withdraw(chosen, actor=actor_of(actor), reason=reason, dry_run=dry_run))


@app.command("purge")
def purge_dispatches(
    which: WhichArgument = None,
    *,
    status: StatusOption = None,
    kind: KindOption = None,
    to: ToOption = None,
    key: KeyOption = None,
    reason_code: ReasonCodeOption = None,
    origin: OriginOption = None,
    since: SinceOption = None,
    before: BeforeOption = None,
    dry_run: DryRunOption = False,
    force: Annotated[bool, typer.Option("--force", help="Unfinished ones too.")] = False,
    history: Annotated[bool, typer.Option("--history", help="Their history as well.")] = False,
    actor: ActorOption = None,
    reason: ReasonOption = "",
    database: DatabaseOption = None,
    schema: SchemaOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete a finished dispatch, or all that the options name; their keys stay taken."""
    with _changing(which, database, schema, as_json=as_json, dry_run=dry_run) as change:
        wanted = _filter(status, kind, to, key=key, reason=reason_code, origin=origin, since=since, before=before)
        chosen = _chosen(which, wanted)
        change(lambda d: d.purge(
            chosen, actor=actor_of(actor), reason=reason, force=force, history=history, dry_run=dry_run
        ))  # fmt: skip


Change = Callable[[Callable[["Dispatches"], "Changed"]], None]


@contextmanager
def _changing(
    which: str | None, database: str | None, schema: str | None, *, as_json: bool, dry_run: bool = False
) -> "Iterator[Change]":
    """Carry out what the block asks for and show what came of it."""

    def change(verb: "Callable[[Dispatches], Changed]") -> None:
        from postroad.surfaces import dispatch_reading

        with dispatch_reading.acting(database, schema) as dispatches:
            changed = verb(dispatches)
        _show(changed, which, as_json=as_json, dry_run=dry_run)

    with reporting(as_json):
        yield change


def _show(changed: "Changed", which: str | None, *, as_json: bool, dry_run: bool) -> None:
    if which is not None and not changed.found:
        raise NotFound(f"{changed.said}.", dispatch=which)
    if changed.found and not changed.done and not dry_run:
        raise Conflict(f"{changed.said}.", **_about(changed))
    if as_json:
        show_json(changed)
    else:
        from postroad.surfaces import screens

        screens.changed(changed, sample=dry_run)


def _about(changed: "Changed") -> dict[str, Any]:
    return {"refused": changed.refused} | ({"dispatch": changed.id} if changed.id else {})


def _filter(
    status: str | None,
    kind: str | None,
    to: str | None,
    *,
    key: str | None,
    reason: str | None,
    origin: list[str] | None,
    since: str | None,
    before: str | None,
) -> "DispatchFilter":
    from postroad.model.dispatches import DispatchFilter
    from postroad.surfaces.dispatch_reading import instant, pairs

    return DispatchFilter(
        status=status,
        kind=kind,
        to=to,
        key=key,
        reason=reason,
        origin=pairs(origin or []),
        since=instant(since, "since"),
        before=instant(before, "before"),
    )


def _chosen(which: str | None, wanted: "DispatchFilter") -> "str | DispatchFilter":
    """The one that is named, or what the options choose: not both, and not nothing."""
    from postroad.model.dispatches import DispatchFilter

    bare = wanted == DispatchFilter()
    if which is not None and not bare:
        raise WrongUse("Give an id or key, or options that choose, not both.")
    if which is None and bare:
        raise WrongUse(f"Give an id or key, or say which by {CRITERIA}.")
    return wanted if which is None else which


def actor_of(given: str | None) -> str:
    """Who acts: as the option says, or else the login name; WrongUse if that is not known."""
    if given is not None:
        return given
    try:
        return getpass.getuser()
    except (OSError, KeyError) as error:  # a container may know no name for its user
        raise WrongUse("Your login name is not known; give --actor.", field="actor") from error


def _length(given: str | None) -> Any:
    from postroad.surfaces.dispatch_reading import length

    return None if given is None else length(given, "expires")


def _policies(reference: str | None) -> "Policies | None":
    if reference is None:
        return None
    from postroad.surfaces.running import load

    post = load(reference)  # first: it may settle which SQLite this process uses
    from postroad.surfaces import dispatch_reading

    return dispatch_reading.policies(post)
