"""Zombies: claimants that were paused, lost their claim to somebody else, and go on as if nothing had happened.

A zombie changes nothing but what tells of it, and is told so. These suites wake one in every state that its
stream, dispatch or timer may have come to meanwhile, have it do all that it can do, and compare whole tables
before and after. They hold for the built-in store, and for yours: subclass them in a test module, give them the
fixtures of `postroad.testing.contracts` (`run`, `clock`, `database`), and name what is yours as class attributes:

    StreamZombies    `queue` and `inbox` (see `postroad.store.protocols`), `turns`
    DispatchZombies  `dispatches`
    TimerZombies     `timers` (see `postroad.store.timers.TimerStore`)
    the first two    `everything`, if not all that you store is in our tables

They cannot catch what the clocks of two hosts do to each other (`now` is given), nor a worker that does not ask
its store. Starts of tools and acks, in a release to come, are one more late verb each.
"""

from postroad.testing.zombies.dispatches import DispatchZombies
from postroad.testing.zombies.streams import StreamZombies
from postroad.testing.zombies.timers import TimerZombies

__all__ = ["DispatchZombies", "StreamZombies", "TimerZombies"]
