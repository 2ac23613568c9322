"""What a command reads from stdin."""

import sys

from postroad.surfaces.output import WrongUse


def read(bytes_max: int, what: str) -> bytes:
    """At most so many bytes of what is piped in.

    Raises:
        WrongUse: Nothing can be: stdin is closed, or was opened for something else than reading.
    """
    if sys.stdin is None:  # as after `<&-`, or under a supervisor that gives none
        raise WrongUse(_unread(what, "is closed"))
    try:
        return sys.stdin.buffer.read(bytes_max)
    except OSError as error:
        raise WrongUse(_unread(what, f"cannot be read ({error.strerror})")) from error


def _unread(what: str, why: str) -> str:
    return f"{what} is read from stdin, which {why}: pipe it in, or give it as an argument."


def is_typed() -> bool:
    """Whether somebody sits at a terminal and types it."""
    return sys.stdin is not None and sys.stdin.isatty()
