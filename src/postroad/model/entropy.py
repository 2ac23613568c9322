"""Randomness as an argument, so that a run can be repeated from its seed."""

import random
import secrets
from typing import Protocol


class Entropy(Protocol):
    """Where claim tokens, dispatch ids and jitter come from."""

    def token(self) -> str:
        """32 hexadecimal digits that nobody has used before."""

    def fraction(self) -> float:
        """A number in [0, 1), for jitter."""


class SystemEntropy:
    """The operating system's randomness."""

    def token(self) -> str:
        return secrets.token_hex(16)

    def fraction(self) -> float:
        return random.random()


class SeededEntropy:
    """The same sequence for the same seed. Not for production: its tokens can be guessed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def token(self) -> str:
        return f"{self._random.getrandbits(128):032x}"

    def fraction(self) -> float:
        return self._random.random()
