"""Orders and messages as clients make them up: all of a seed's randomness about what is asked for."""

from collections.abc import Iterator

from postroad.model.entropy import Entropy, SeededEntropy
from postroad.testing.simulation.errands import CREW, CREWS, HOWS
from postroad.testing.simulation.options import Options
from postroad.testing.simulation.toolbox import BOOK, LOOK, PAY, STORE, Call
from postroad.testing.simulation.workload import AUDIT, BY_NAME, CHAT, DESK, LOAD, Message, Order, Step, stream_types

VERBS = (*["send"] * 4, *["timer"] * 2, "rearm", *["cancel"] * 2, "publish", "write", "withdraw")
TOOLS = (LOOK, STORE, BOOK, BOOK, PAY)
CALL_ENDS = ("ok", "raise", "raise", "refuse", "slow", "stuck")
TROUBLE_AFTER_TOOLS = 0.3
LANES = ("lane a", "lane b", "lane c")


class Draws:
    """Orders and messages as clients make them up."""

    def __init__(self, options: Options, entropy: Entropy) -> None:
        self._options = options
        self._types = tuple(kind for kind in stream_types(options) if kind != CREW)
        self.entropy = entropy
        # Apart, so that a seed's other draws are the same with delegations and without.
        self._delegating = SeededEntropy(options.seed * 7 + 3)
        self.keys: list[str] = []
        self.timers: list[tuple[str, str]] = []
        self._left: dict[str, int] = {}

    def stream(self) -> str:
        """The name of one of the streams."""
        number = int(self._options.streams * self.entropy.fraction())
        stream = f"{self.choice((LOAD, LOAD, *self._types))}/{number}"
        return self.latest(stream) if stream in self._left and self.chance(0.8) else stream

    def latest(self, stream: str) -> str:
        """What took the place of a stream, if it was deleted."""
        return f"{stream}.{self._left[stream]}" if stream in self._left else stream

    def leave(self, stream: str) -> None:
        """A stream is deleted: most of what would go there goes to a new one from now on."""
        first = stream.partition(".")[0]
        self._left[first] = self._left.get(first, 0) + 1

    def choice(self, among: tuple[str, ...]) -> str:
        """One of these."""
        return among[int(len(among) * self.entropy.fraction())]

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self.entropy.fraction() < probability

    def order(self, stream: str, name: str) -> Order:
        """What an event with this id could want."""
        if stream.startswith(AUDIT):
            return Order()
        calls: list[Call] = []
        if stream.startswith((CHAT, DESK)) and self.chance(self._options.tools):
            calls = [self._call(f"{name}.{number}") for number in range(1 + int(3 * self.entropy.fraction()))]
        trouble = self.chance(max(self._options.turn_trouble, TROUBLE_AFTER_TOOLS if calls else 0))
        return Order(
            calls=calls,
            together=bool(calls) and self.chance(0.25),
            steps=[*self._steps(stream, name), *self._delegations(name)],
            think=round(self._options.think * self.entropy.fraction(), 3),
            plan=[self.choice(("raise", "later", "exit", "giveup"))] * int(1 + 4 * self.entropy.fraction())
            + [self.choice(("ok", "raise"))]
            if trouble
            else [],
        )

    def message(self) -> Message:
        """A message, most of them harmless."""
        return Message(self.plan(), self._take(), self._ack())

    def plan(self) -> list[str]:
        """How attempts to send end."""
        if not self.chance(self._options.send_trouble):
            return ["lingers" if self._options.acks and self.chance(0.3) else "ok"]
        words = ("lost", "unknown", "later", "later", "giveup", "slow", "late", "stuck", "error")
        return [self.choice(words) for _ in range(int(1 + 3 * self.entropy.fraction()))] + [
            self.choice(("ok", "ok", "error"))
        ]

    def _steps(self, stream: str, name: str) -> Iterator[Step]:
        for number in range(int(3.5 * self.entropy.fraction())):
            yield self._step(stream, f"{name}.{number}")

    def _delegations(self, name: str) -> Iterator[Step]:
        draw = self._delegating.fraction
        if draw() >= self._options.delegations:
            return
        for number in range(1 + int(5 * draw() ** 2)):
            how, deeper = HOWS[int(len(HOWS) * draw())], int(4 * draw() ** 3)
            step = Step(
                "delegate", f"{name}.d{number}", self.latest(f"{CREW}/{int(CREWS * draw())}"),
                after=(1, 8, 20, 40)[int(4 * draw())], plan=[how] + ["deeper"] * deeper, take=round(10 * draw(), 3),
            )  # fmt: skip
            yield from [step] * (2 if draw() < 0.1 else 1)

    def _step(self, stream: str, name: str) -> Step:
        do = self.choice(VERBS)
        match do:
            case "send":
                key = self.keys[-1] if self.keys and self.chance(0.03) else name
                self.keys.append(key)
                about = (self._after(), self.plan(), self._expiry(), self._take(), self._lane(), self._ack())
                return Step(do, key, self.choice(tuple(BY_NAME)), *about)
            case "timer":
                self.timers.append((stream, name))
                return Step(do, name, after=self._after())
            case "publish":
                return Step(do, f"{self.choice(self._types)}/other", kind=name)
            case "withdraw":
                return Step(do, self.choice(tuple(self.keys[-8:])) if self.keys else name)
            case "rearm" | "cancel":
                own = [key for owner, key in self.timers[-8:] if owner == stream]
                return Step(do, self.choice(tuple(own)) if own else name, after=self._after())
        return Step(do, name)

    def _call(self, name: str) -> Call:
        plan = [self.choice(CALL_ENDS) for _ in range(1 + int(2 * self.entropy.fraction()))] + ["ok"]
        return Call(
            name=name,
            tool=self.choice(TOOLS),
            plan=plan if self.chance(0.3) else [],
            take=round(self.entropy.fraction(), 3) if self.chance(0.3) else 0,
            times=2 if self.chance(0.2) else 1,
            calmly=self.chance(0.5),
            otherwise=self.choice(("leave", "change", "add")) if self.chance(0.3) else "",
        )

    def _lane(self) -> str:
        return self.choice(LANES) if self.chance(self._options.lanes) else ""

    def _ack(self) -> bool:
        return self._options.acks > 0 and self.chance(self._options.acks)

    def _take(self) -> float:
        return round(self.entropy.fraction() * 3.5, 3) if self.chance(0.4) else 0

    def _after(self) -> float:
        return round(self.entropy.fraction() * 20, 3) if self.chance(0.4) else 0

    def _expiry(self) -> float | None:
        return round(self.entropy.fraction() * 30, 3) if self.chance(0.2) else None
