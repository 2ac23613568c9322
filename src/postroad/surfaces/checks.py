"""One thing that `postroad doctor` has looked at."""

from typing import Literal

import msgspec

Level = Literal["ok", "note", "warning", "error"]


class Check(msgspec.Struct, frozen=True):
    """What was found, and what to do about it.

    Attributes:
        level: "note" is what the doctor cannot judge; only "error" makes its exit code 1.
        name: What was looked at, such as "lease" or "schema".
    """

    level: Level
    name: str
    found: str
    cure: str = ""

    @property
    def line(self) -> str:
        """What was found and what to do, on one line."""
        return f"{self.found}: {self.cure}" if self.cure else self.found
