"""Mirror: a copy of streams' logs as files of JSON lines, for people and for programs that read files (provisional)."""

from postroad.agent.mirror.mirrors import Caught, Mirror

__all__ = ["Caught", "Mirror"]
