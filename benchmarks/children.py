"""Processes of their own for what is measured: started anew, so that nothing is inherited, and always ended."""

import multiprocessing
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection as Pipe
from typing import Any

from benchmarks.places import Place
from postroad.store.sqlite_version import SQLiteVersionWarning

ANSWER_SECONDS = 120
END_SECONDS = 30


class NoAnswer(RuntimeError):
    """A process that was started for a measurement did not answer in time, or has died."""


class Child:
    """The other end of a running process: it says something, or is told to go on and says what came of it."""

    def __init__(self, pipe: Pipe, name: str) -> None:
        self._pipe = pipe
        self._name = name

    def said(self) -> Any:
        """The next thing that it says. Raises NoAnswer."""
        try:
            if self._pipe.poll(ANSWER_SECONDS):
                return self._pipe.recv()
        except EOFError:
            raise NoAnswer(f"{self._name} has ended") from None
        raise NoAnswer(f"{self._name} said nothing for {ANSWER_SECONDS} s")

    def ask(self, about: object = None) -> Any:
        """Tell it to go on, and about what; what it says then."""
        self._pipe.send(about)
        return self.said()


@contextmanager
def child(target: Callable[..., None], place: Place, *arguments: Any) -> Iterator[Child]:
    """Run `target(url, schema, pipe, *arguments)` in a new process for as long as the block lasts.

    The target says with `pipe.send` that it is ready, then answers each `pipe.recv`; when the block is left, that
    raises EOFError, which ends it.
    """
    spawning = multiprocessing.get_context("spawn")
    near, far = spawning.Pipe()
    process = spawning.Process(target=_run, args=(target, place.url, place.schema, far, arguments), daemon=True)
    process.start()
    far.close()
    try:
        found = Child(near, target.__name__)
        found.said()
        yield found
    finally:
        near.close()
        process.join(END_SECONDS)
        if process.is_alive():
            process.kill()
            process.join()


def _run(target: Callable[..., None], url: str, schema: str | None, pipe: Pipe, arguments: tuple[Any, ...]) -> None:
    warnings.simplefilter("ignore", SQLiteVersionWarning)
    with suppress(EOFError):  # whoever asked has gone
        target(url, schema, pipe, *arguments)
