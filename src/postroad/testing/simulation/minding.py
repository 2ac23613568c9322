"""Who stops and deletes conversations, in the middle of turns above all, and the operator who resolves parked ones."""

from collections.abc import Callable, Iterator
from random import Random

from postroad.engine.streams import Streams
from postroad.model.streams import StreamState
from postroad.store.resolving import HOW
from postroad.testing.simulation.deeds import Deed
from postroad.testing.simulation.errands import CREW
from postroad.testing.simulation.operating import ACTOR
from postroad.testing.simulation.options import Options
from postroad.testing.simulation.process import Process
from postroad.testing.simulation.workload import DESK

STOP, DELETE, RESOLVE = "stream.stop", "stream.delete", "stream.resolve."
RESOLVED = 0.1  # how often after a block an operator resolves what is parked
BY_HAND = 0.3  # how often it is an operator, and not a program, who stops or deletes
RECALLED = 4  # times as often as a conversation the work is stopped that a crew has begun: there is little of it
DURING_SECONDS = 4  # within which somebody stops or deletes whose turn has begun
LISTED = 20
STATES: tuple[StreamState, ...] = ("running", "running", "running", "backing_off", "backing_off", "waiting", "parked")


class Minder:
    """Draws what is done to which conversation, and does it through a process. `leave` hears of what is deleted.

    `kinds`: the types of streams that it is about.
    """

    def __init__(self, rng: Random, leave: Callable[[str], None], kinds: tuple[str, ...]) -> None:
        self._rng = rng
        self._kinds = kinds
        self._leave = leave

    def deeds(self, options: Options) -> Iterator[Deed]:
        """What to do now that clients have made a block; to which conversation, a look will show."""
        if not self._kinds:
            return
        for verb, often in ((STOP, options.stops), (DELETE, options.deletions)):
            if self._rng.random() < often:
                by_hand = self._rng.random() < BY_HAND
                yield Deed(who=ACTOR if by_hand else "user", verb=verb if by_hand else verb.removeprefix("stream."))
        if self._rng.random() < RESOLVED:
            yield self.resolution("")

    def during(self, options: Options, stream: str) -> Iterator[tuple[float, Deed]]:
        """What to do to a conversation whose turn begins now, and after how many seconds."""
        for verb, often in (("stop", options.stops), ("delete", options.deletions)):
            times = RECALLED if verb == "stop" and stream.startswith(CREW) else 1
            if stream.startswith(self._kinds) and self._rng.random() < often * times:
                yield self._rng.random() * DURING_SECONDS, Deed(who="user", verb=verb, subject=stream)

    def resolution(self, stream: str) -> Deed:
        """An operator's decision about this parked stream, '' for whichever there is then."""
        return Deed(who=ACTOR, verb=RESOLVE + self._rng.choice(HOW), subject=stream)

    def _chosen(self, streams: Streams, *, parked: bool) -> str:
        """A parked one, or one that is in whatever state is drawn, if there is one, else any; '' if there is none."""
        if parked:
            found = streams.list(type=DESK, state="parked", limit=LISTED)
        else:
            kind, state = self._rng.choice(self._kinds), self._rng.choice(STATES)
            found = streams.list(type=kind, state=state, limit=LISTED) or streams.list(type=kind, limit=LISTED)
        return self._rng.choice(found).stream if found else ""

    async def act(self, process: Process, deed: Deed) -> None:
        """Look, choose one, and do it."""
        streams = process.post.streams
        deed.subject = deed.subject or self._chosen(streams, parked=deed.verb.startswith(RESOLVE))
        if not deed.subject:
            return
        if deed.verb in (DELETE, "delete"):
            self._leave(deed.subject)
        match deed.verb:
            case "stop":
                async with process.post.begin() as tx:
                    tx.stop_stream(deed.subject)
            case "delete":
                async with process.post.begin() as tx:
                    tx.delete_stream(deed.subject)
            case _ if deed.verb == STOP:
                streams.stop(deed.subject, actor=ACTOR)
            case _ if deed.verb == DELETE:
                deed.done = int(streams.delete(deed.subject, actor=ACTOR))
                return
            case _:
                how = next(how for how in HOW if deed.verb == RESOLVE + how)
                deed.done = int(streams.resolve(deed.subject, how, actor=ACTOR).done)
                return
        deed.done = 1
