"""What the stream commands show to people of events: what each of them says, as far as a screen has room for it."""

from collections.abc import Sequence

from postroad.model.streams import EventRow
from postroad.surfaces.output import say, say_lines, say_title, when

DATA_CHARACTERS = 2_000


def events(found: Sequence[EventRow], *, limit: int) -> None:
    """Events one below the other, and how to see those behind them."""
    if not found:
        say("(no events)")
        return
    for one in found:
        version = "" if one.version == 1 else f", version {one.version}"
        say_title(f"{one.key} ({one.kind}{version})")
        ended = f", ended {when(one.ended_at)}: {one.reason}" if one.reason else ""
        say(f"accepted {when(one.received_at)}{ended}")
        cut = len(one.raw) > DATA_CHARACTERS
        say_lines(f"{one.raw[:DATA_CHARACTERS]}… (cut; --json has all)" if cut else one.raw)
    if len(found) == limit:
        say(f"There may be more: --after {found[-1].cursor}")
