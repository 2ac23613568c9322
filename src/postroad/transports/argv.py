"""The argv transport: a dispatch is handed to a program, as whole arguments and on stdin, never through a shell."""

import asyncio
import errno
import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from postroad.model.dispatches import Dispatch, Receipt
from postroad.model.errors import GiveUp, InvalidInput, OutcomeUnknown, RetryLater, shown
from postroad.model.payload import ERROR_CHARS_MAX
from postroad.transports.deadlines import seconds_left
from postroad.transports.envelope import envelope

if TYPE_CHECKING:
    from postroad.transports.children import Ended

TO, PAYLOAD = "{to}", "{payload}"
PAYLOAD_BYTES_MAX = 96 * 1024
REFERENCE_CHARS_MAX = 500
INHERITED = ("PATH", "HOME", "LANG", "TZ", "TMPDIR")
UNREAD = "stdin was not read to its end"
_PLACE = re.compile(r"\{\w+\}")
_NOT_STARTED = {
    errno.ENOENT: "there is no such program, or its interpreter or working directory is missing",
    errno.EACCES: "it may not be executed",
    errno.ENOEXEC: "it is no program: a script begins with `#!` and its interpreter",
}


class Argv:
    """A command. `{to}` and, on purpose only, `{payload}` stand for whole arguments; the envelope comes on stdin.

    Exit code 0 is success; its receipt's reference is the first line of stdout. Anything else is a failed attempt,
    with stderr as its error. Success says nothing about the destination, only that the program said so. When the
    attempt's time is over the program is killed with its process group; a process in a session of its own escapes.

    Args:
        command: The program, found along PATH, and its arguments. Data may only follow an argument `--`, so that the
            program never takes it for an option: `Argv("ntfy-send", "--", "{to}")`.
        env: Names of variables that the program inherits, beside PATH, HOME, LANG, LC_* and a few like them.
        payload_in_argv: Allow `{payload}`: the envelope, without its ack token, as an argument, which every user of
            the machine can read. More than 96 KiB are a dead letter.
        cwd: Where the program runs.

    Raises:
        InvalidInput: The command is none; the message says what is wrong with it.
    """

    def __init__(self, *command: str, env: Sequence[str] = (), payload_in_argv: bool = False, cwd: str = "/") -> None:
        _check(command, payload_in_argv)
        if isinstance(env, str) or not all(isinstance(name, str) and name and "=" not in name for name in env):
            raise InvalidInput(f"env must be names of environment variables, got {shown(env)}.", field="env")
        if not isinstance(cwd, str) or not os.path.isabs(cwd) or "\0" in cwd:
            raise InvalidInput(f"cwd must be an absolute path, got {shown(cwd)}.", field="cwd")
        self._command = command
        self._env = frozenset((*INHERITED, *env))
        self._cwd = cwd
        self._payload_in_argv = PAYLOAD in command

    @property
    def program(self) -> str:
        """What is run: a name that is looked up along PATH, or a path."""
        return self._command[0]

    def __repr__(self) -> str:
        return f"Argv({', '.join(map(repr, self._command))})"

    async def send(self, dispatch: Dispatch[Any], /) -> Receipt | None:
        """Run the command for a dispatch, within its deadline.

        Raises:
            RetryLater: It could not be started, or has failed.
            GiveUp: Its arguments can never be handed over.
            OutcomeUnknown: It was not done in time and was killed, or its end was told to somebody else.
        """
        data = envelope(dispatch, with_token=not self._payload_in_argv)
        arguments = self._arguments(dispatch, data)
        seconds = seconds_left(dispatch)
        try:
            async with asyncio.timeout(seconds):
                ended = await self._run(arguments, b"" if self._payload_in_argv else data)
        except TimeoutError:
            raise OutcomeUnknown(f"timeout: {self.program} was not done after {seconds:.3g} s and was killed") from None
        return _verdict(ended)

    async def _run(self, arguments: Sequence[bytes], stdin: bytes) -> "Ended":
        from postroad.transports import children  # only who runs programs loads what does

        try:
            return await children.run(arguments, stdin=stdin, env=self._environment(), cwd=self._cwd)
        except OSError as error:
            said = f"{self.program} could not be started: "
            if error.errno == errno.E2BIG:
                raise GiveUp(said + "the arguments are too long for this system") from error
            raise RetryLater(said + _NOT_STARTED.get(error.errno or 0, error.strerror or "")) from error

    def _arguments(self, dispatch: Dispatch[Any], data: bytes) -> list[bytes]:
        if self._payload_in_argv and len(data) > PAYLOAD_BYTES_MAX:
            raise GiveUp(f"the envelope has {len(data)} bytes; as an argument it may have {PAYLOAD_BYTES_MAX}")
        if "\0" in dispatch.to:
            raise GiveUp("no argument can hold the NUL in `to`")
        given = {TO: dispatch.to.encode(), PAYLOAD: data}
        return [given[part] if part in given else os.fsencode(part) for part in self._command]

    def _environment(self) -> Mapping[str, str]:
        return {name: value for name, value in os.environ.items() if name in self._env or name.startswith("LC_")}


def _verdict(ended: "Ended") -> Receipt | None:
    if ended.code is None:
        raise OutcomeUnknown("its exit code was told to something else in this process, which waits for all children")
    if ended.code != 0:
        raise RetryLater(_failure(ended.code, ended))
    first, _, _ = _text(ended.stdout).partition("\n")
    note = {"note": UNREAD} if ended.unread else {}
    return Receipt(first.strip()[:REFERENCE_CHARS_MAX], note) if first or note else None


def _failure(code: int, ended: "Ended") -> str:
    """What is stored of a failed attempt: the end of stderr if there is one, and how the program ended."""
    ending = f"exit {code}" if code > 0 else f"killed by {_signal(-code)}"
    if ended.unread:
        ending += f", {UNREAD}"
    said = _text(ended.stderr)
    room = ERROR_CHARS_MAX - len(f" ({ending})")
    if len(said) > room:
        said = "…" + said[1 - room :]
    return f"{said} ({ending})" if said else ending


def _text(said: bytes) -> str:
    return said.decode("utf-8", "replace").replace("\0", "\N{REPLACEMENT CHARACTER}").strip()


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _check(command: tuple[str, ...], payload_in_argv: bool) -> None:
    """Refuse what is no command, or would let data pass for an option."""

    def refuse(said: str) -> InvalidInput:
        return InvalidInput(f"The command {shown(list(command))}: {said}", field="command")

    if not command or not all(isinstance(part, str) for part in command) or not command[0].strip():
        raise refuse("it must be a program and its arguments, all text.")
    if any("\0" in part for part in command):
        raise refuse("an argument cannot hold a NUL.")
    for place, part in enumerate(command):
        for name in _PLACE.findall(part):
            if part != name and name in (TO, PAYLOAD):
                raise refuse(
                    f"{name} must be a whole argument, not a part of {part!r}; `--option={name}` is not either."
                )
            if part == name:
                _check_place(command[:place], name, payload_in_argv, refuse)


def _check_place(
    before: Sequence[str], name: str, payload_in_argv: bool, refuse: Callable[[str], InvalidInput]
) -> None:
    if name not in (TO, PAYLOAD):
        raise refuse(f"{name} stands for nothing; there are {TO} and {PAYLOAD}.")
    if "--" not in before[1:]:
        raise refuse(f"{name} must come after an argument `--`, or the program may take it for an option.")
    if name == PAYLOAD and not payload_in_argv:
        raise refuse(
            f"{PAYLOAD} shows every user of this machine what is sent; leave it out and read the envelope "
            "from stdin, or say payload_in_argv=True."
        )
