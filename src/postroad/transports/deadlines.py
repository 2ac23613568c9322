"""When a transport must be done."""

from typing import Any

from postroad.model.clock import SECOND, micros
from postroad.model.dispatches import Dispatch

# The sender's timeout ends an attempt from outside. A little earlier the transport ends it itself: it knows more
# about what was done by then, and in a test with a `Harness` there is nobody else who would.
EARLIER_SECONDS = 0.25


def seconds_left(dispatch: Dispatch[Any]) -> float:
    """The seconds that an attempt may still take, a little less than to its deadline."""
    # The app's clock follows its database's, and the deadline was taken from it.
    left = (micros(dispatch.deadline, "deadline") - dispatch.post.database.clock.wall()) / SECOND
    return left - min(EARLIER_SECONDS, left / 10)
