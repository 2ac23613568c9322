"""What every ear of a listener has in common, whatever database it listens to."""

from typing import Protocol

from postroad.engine.wakeups import Topic
from postroad.model.errors import PostroadError


class Deaf(PostroadError):
    """The listener's connection carries no notifications."""


class Unsuited(PostroadError):
    """This database's driver has no way to listen."""


class Ear(Protocol):
    """What listens, on one kind of database."""

    def serve(self) -> None:
        """Listen until `stop`; raises when the connection is lost."""

    def tell(self, topics: frozenset[Topic]) -> None:
        """Carry an announcement to other processes. From any thread, never waits."""

    def stop(self) -> None:
        """Have `serve` look at whether it is to end. From any thread."""

    def close(self) -> None:
        """Let go of what is held besides the connection."""
