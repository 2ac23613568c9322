"""What the command line says: lines and tables for people, or one JSON document for programs."""

import errno
import os
import re
import shutil
import sys
import textwrap
import traceback
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, TextIO, cast

import msgspec
import typer

from postroad.model import errors
from postroad.model.clock import moment
from postroad.model.payload import safe_error

if TYPE_CHECKING:
    from rich.table import Table

CONTRACT_VERSION = 1
WRONG_USE = 2
FAILED = 1
LINE_CHARACTERS = 120
ErrorKind = Literal["not_found", "invalid_input", "conflict", "unavailable", "internal"]
# Control characters, bidirectional and other invisible formatting, surrogates, line and paragraph separators.
_HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
# What JSON itself leaves as it is, but a terminal or a reader of lines would act upon.
_ACTING_IN_JSON = re.compile("[\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


class NotFound(errors.PostroadError):
    """Not found."""


class Conflict(errors.PostroadError):
    """Nothing was done."""


class WrongUse(errors.InvalidInput):
    """This is not how the command is called."""


class Unavailable(errors.PostroadError):
    """The database cannot be used."""


class Unheard(OSError):
    """stdout does not take what was said: its disk is full, or its reader gone."""


KINDS: Sequence[tuple[type[BaseException] | tuple[type[BaseException], ...], ErrorKind]] = (
    ((NotFound, errors.DispatchNotFound), "not_found"),
    ((Conflict, errors.KeyConflict, errors.TimerConflict, errors.ConcurrencyConflict, errors.DuplicateKey), "conflict"),
    ((errors.AckNotRequested, errors.AckRefused), "conflict"),
    (errors.Refused, "invalid_input"),
    (
        (Unavailable, errors.SchemaMismatch, errors.DatabaseBusy, errors.DatabaseReplaced, errors.CommitUnknown),
        "unavailable",
    ),
)


class Failure(msgspec.Struct, frozen=True):
    """What went wrong.

    `detail` has texts, and of a conflict `refused`: a sentence on why something was left as it is, and how many it is
    about, as in the answer of what was done in part.
    """

    kind: ErrorKind
    message: str
    detail: dict[str, str | dict[str, int]]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints; its shape changes with `contract_version` only."""

    ok: bool
    contract_version: int = CONTRACT_VERSION
    data: Any = None
    error: Failure | None = None


def show_json(data: Any) -> None:
    """Print an answer for programs."""
    _print_answer(Answer(ok=True, data=data))


@contextmanager
def reporting(as_json: bool) -> Iterator[None]:
    """Turn what is raised inside into one readable line, or an answer for programs, and an exit code."""
    try:
        yield
    except (typer.Exit, typer.Abort, Unheard):
        raise
    except Exception as error:
        kind = kind_of(error)
        if as_json:
            _print_answer(Answer(ok=False, error=failure(error)))
        elif kind == "internal":
            sys.stderr.write(escaped_lines(traceback.format_exc()))
        else:
            say_error(str(error))
        raise typer.Exit(WRONG_USE if kind == "invalid_input" else FAILED) from error


class Outgoing:
    """stdout, of whose errors it is known that they are its own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with _going_out():
            return self._stream.write(text)

    def flush(self) -> None:
        with _going_out():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _going_out() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unheard(error.errno, error.strerror) from error


@contextmanager
def heard() -> Iterator[None]:
    """End the process with FAILED if what was said inside could not be written, whatever else has come of it.

    Who has stopped reading knows that; anything else is told on stderr.
    """
    sys.stdout = cast("TextIO", Outgoing(sys.stdout))
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except Unheard as error:
        with open(os.devnull, "w") as nothing:  # for what is left: the interpreter tries that again when it ends
            os.dup2(nothing.fileno(), sys.stdout.fileno())
        if error.errno != errno.EPIPE:
            say_error(f"the answer could not be written to stdout: {error.strerror}")
        sys.exit(FAILED)


def kind_of(error: BaseException) -> ErrorKind:
    """Which of the five kinds an error is."""
    return next((kind for classes, kind in KINDS if isinstance(error, classes)), "internal")


def failure(error: BaseException) -> Failure:
    """An error as programs see it."""
    if not isinstance(error, errors.PostroadError):
        return Failure("internal", safe_error(error), {})
    kind, about = kind_of(error), dict(error.about)
    refused: dict[str, int] = dict(about.pop("refused", None) or {str(error): 1})
    told: dict[str, str | dict[str, int]] = {name: str(value) for name, value in about.items()}
    return Failure(kind, str(error), told | {"refused": refused} if kind == "conflict" else told)


def show_wrong_use(message: str) -> None:
    """Print that a command was called wrongly, for programs."""
    _print_answer(Answer(ok=False, error=Failure("invalid_input", message, {})))


def _print_answer(answer: Answer) -> None:
    said = msgspec.json.format(msgspec.json.encode(answer), indent=2).decode()
    print(_ACTING_IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", said))


def escaped(text: object) -> str:
    """A text that a terminal may show: control and bidirectional characters as escapes, on one line."""
    said = str(text)
    if said.isascii() and said.isprintable():
        return said
    return "".join(_escape(c) if unicodedata.category(c) in _HIDDEN_CATEGORIES else c for c in said)


def escaped_lines(text: str) -> str:
    """The same for a text of several lines, which stay."""
    return "\n".join(escaped(line) for line in text.split("\n"))


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


def say(line: str = "") -> None:
    """Print a line for people; what came from outside is escaped."""
    print(escaped(line))


def say_lines(text: str) -> None:
    """Print a text of several lines for people, each of them escaped."""
    print(escaped_lines(text))


def say_folded(text: str, *, lines_max: int) -> None:
    """Print a long text for people in lines that can be read, and how much of it is left out, if any is."""
    width = min(LINE_CHARACTERS, shutil.get_terminal_size((LINE_CHARACTERS, 24)).columns)
    lines = [part for line in escaped_lines(text).split("\n") for part in _folded(line, width)]
    for line in lines[:lines_max]:
        print(line)
    if len(lines) > lines_max:
        print(f"… and {len(lines) - lines_max} more lines: --json has all of them")


def _folded(line: str, width: int) -> list[str]:
    """A line in parts, which begin as far in as it does."""
    room = line[: len(line) - len(line.lstrip(" "))][: width // 2]
    return textwrap.wrap(line, width, subsequent_indent=room, break_on_hyphens=False) or [""]


def say_error(line: str) -> None:
    """Print a line about a failure on stderr."""
    sys.stderr.write(f"postroad: {escaped(line)}\n")


def say_title(title: str) -> None:
    """Print the title of what follows: bold on a terminal."""
    if not sys.stdout.isatty():
        say(title)
        return
    from rich.console import Console
    from rich.text import Text

    Console(highlight=False).print(Text(escaped(title), style="bold"), soft_wrap=True)


def show_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows under headings: folded and coloured on a terminal, one line each elsewhere."""
    cells = [[escaped("" if cell is None else cell) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        _print_plain([columns, *cells] if any(columns) else cells)
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns, box=box.SIMPLE_HEAD, show_header=any(columns), pad_edge=False)
    for row in cells:
        _add(table, row)
    Console(highlight=False).print(table)


def _print_plain(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


_COLOURS = {
    "delivered": "green", "acked": "green", "committed": "green",
    "dead_letter": "red", "expired": "red", "failed": "red", "parked": "red",
    "ok": "green", "warning": "yellow", "error": "red",
    "delivering": "cyan", "claimed": "cyan", "backoff": "yellow", "interrupted": "yellow",
}  # fmt: skip


def _add(table: "Table", cells: Sequence[str]) -> None:
    from rich.text import Text

    # Text, not markup: a key may look like [red].
    table.add_row(*(Text(cell, style=_COLOURS.get(cell, ""), overflow="fold") for cell in cells))


def when(stamp: int | datetime | None) -> str:
    """A time for people, to the second; '' for none."""
    if stamp is None:
        return ""
    instant = moment(stamp) if isinstance(stamp, int) else stamp
    return instant.strftime("%Y-%m-%d %H:%M:%SZ")


def length(micros: int) -> str:
    """A length of time for people."""
    seconds = micros / 1_000_000
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds and seconds < 10 else f"{seconds:.0f} s"
    minutes, left = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {left} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"
