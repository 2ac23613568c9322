"""What `postroad doctor` sees of an app without its database: kinds, the notifier, the server's keys."""

import shutil
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from postroad.engine import notifying
from postroad.engine.config import Setting, secret_keys
from postroad.engine.declarations import KILL_GRACE, LEASE_MARGIN, Sender
from postroad.surfaces.checks import Check
from postroad.surfaces.output import length
from postroad.transports.argv import Argv

if TYPE_CHECKING:
    from postroad.engine.app import Postroad

KEY_CHARACTERS_GOOD = 32


def of_kinds(post: "Postroad") -> Iterator[Check]:
    """Of each kind that the app carries out its lease and its retry horizon; where the others are carried out."""
    for sender in _senders(post):
        yield _lease(sender)
        yield _horizon(sender)
        if isinstance(transport := getattr(sender.fn, "__self__", None), Argv):
            yield _program(sender.kind.name, transport)


def _senders(post: "Postroad") -> list[Sender]:
    """Each sender once: a kind with former names has it under each of them."""
    return list({sender.kind.name: sender for sender in post.senders.values()}.values())


def _lease(sender: Sender) -> Check:
    needed = sender.timeout + KILL_GRACE + LEASE_MARGIN
    figures = (
        f"{sender.kind.name}: lease {length(sender.policy.lease)}, "
        f"timeout {length(sender.timeout)} + margin {length(KILL_GRACE + LEASE_MARGIN)}"
    )
    if sender.policy.lease > needed:
        return Check("ok", "lease", figures)
    return Check("error", "lease", figures, "make the lease longer, or two processes may send the same dispatch")


def _horizon(sender: Sender) -> Check:
    """How long attempts may go on against how long the destination knows the key of the first one."""
    name, window = sender.kind.name, sender.dedup_window
    figures = f"{name}: attempts go on for {length(sender.horizon)} at the longest"
    if window is None:
        again = "what may have arrived is sent again" if sender.on_unknown == "resend" else "a person resends"
        return Check(
            "note", "horizon", f"{figures}; how long its destination knows a key is not known, and {again}",
            "say dedup_window=" + (", or on_unknown='park' if it knows none" if sender.on_unknown == "resend" else ""),
        )  # fmt: skip
    figures += f", and its destination knows a key for {length(window)}"
    if window >= sender.horizon:
        return Check("ok", "horizon", figures)
    return Check(
        "error", "horizon", figures,
        f"a later attempt would arrive twice; give Retry fewer attempts or a budget below {length(window)}",
    )  # fmt: skip


def of_notifier(post: "Postroad", settings: Mapping[str, Setting]) -> Iterator[Check]:
    """The command of the settings, which the loops take, and the kinds that need it."""
    kinds = sorted({sender.kind.name for sender in post.senders.values() if sender.default})
    notifier = notifying.of(settings)
    if notifier is not None:
        yield _program("notify_template", notifier)
    elif kinds:
        cure = "set notify_template in [dispatch], give them senders, or declare them by `elsewhere`"
        yield Check("error", "notifier", f"{', '.join(kinds)}: {notifying.NOT_CONFIGURED}", cure)


def _program(what: str, transport: Argv) -> Check:
    program = transport.program
    found = shutil.which(program)
    if found is not None and ("/" not in program or program.startswith("/")):
        return Check("ok", "program", f"{what}: {found}")
    return Check(
        "error", "program", f"{what}: {program!r} is no program that this process may run",
        "install it, or name it by its absolute path",
    )  # fmt: skip


def of_keys(settings: Mapping[str, Setting]) -> Iterator[Check]:
    """Whether there is a server key, and whether the keys, which the loops take, can be guessed all the same."""
    keys = secret_keys(settings)
    if not keys:
        yield Check("ok", "secret_key", "there is none: nothing here can ask for an acknowledgement")
    short = sum(len(key) < KEY_CHARACTERS_GOOD for key in keys)
    if short:
        found = f"of {len(keys)} keys {short} have less than {KEY_CHARACTERS_GOOD} characters"
        yield Check(
            "warning", "secret_key", found, "exchange them: `python -c 'import secrets; print(secrets.token_hex())'`"
        )
    elif keys:
        yield Check("ok", "secret_key", f"{len(keys)} of {KEY_CHARACTERS_GOOD} characters or more")
