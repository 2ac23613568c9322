"""What is down in the world outside: a file of the director's, which the senders of all processes read."""

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from postroad.testing.chaos.sizes import DOWN
from postroad.testing.simulation.outages import Outage

NAME = "down"


def now() -> list[Outage]:
    """What is down now."""
    return msgspec.json.decode(Path(os.environ[DOWN]).read_bytes(), type=list[Outage])


def write(folder: Path, outages: Sequence[Outage]) -> None:
    """Say what is down from now on: whoever reads finds this or what was said before."""
    new = folder / f"{NAME}.new"
    new.write_bytes(msgspec.json.encode(outages))
    new.rename(folder / NAME)
