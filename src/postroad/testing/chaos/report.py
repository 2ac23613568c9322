"""What a run looks like to whoever waits for it: a line that moves, then a table, or the same as JSON."""

from collections.abc import Sequence

import msgspec

from postroad.testing.chaos.verdict import Verdict

_ROWS = {
    "processes killed": "kills",
    "whole groups killed": "groups",
    "processes stopped past the lease": "stops",
    "database crashes": "crashes",
    "begun again, database away": "restarts",
    "hosts and kinds down": "outages",
    "looks in between": "looks",
    "calls of clients": "calls",
    "… whose client died": "unanswered",
    "log entries": "events",
    "turns committed": "turns",
    "runs interrupted": "interrupted",
    "timers fired": "timers",
    "dispatches": "dispatches",
    "sends": "sends",
    "gates closed": "gates",
    "sends held": "held",
}
VIOLATIONS_SHOWN = 20


def table(verdicts: Sequence[Verdict]) -> str:
    """What happened, one column for each database; duplicates by why they were sent."""
    lines = [("", *(verdict.database for verdict in verdicts))]
    lines += [(said, *(str(v.counts[name]) for v in verdicts)) for said, name in _ROWS.items()]
    reasons = sorted({name for v in verdicts for name in v.counts if name.startswith("duplicates ")})
    lines += [(_because(name), *(str(v.counts[name]) for v in verdicts)) for name in reasons]
    lines.append(("healed after, s", *(str(v.heal_seconds) for v in verdicts)))
    lines.append(("violations", *(str(len(v.violations)) for v in verdicts)))
    return "\n".join(f"{first:<34}" + "".join(f"{cell:>12}" for cell in rest) for first, *rest in lines)


def _because(name: str) -> str:
    return f"sent again: {name.removeprefix('duplicates ')}"


def wrong(verdict: Verdict) -> str:
    """What was wrong, the stories of the rows that it is about, and how to see it again."""
    shown = verdict.violations[:VIOLATIONS_SHOWN]
    more = len(verdict.violations) - len(shown)
    lines = [f"{verdict.database}, seed {verdict.seed}: {len(verdict.violations)} violations", *shown]
    lines += [f"… and {more} more"] if more else []
    return "\n".join([*lines, *verdict.stories, f"history and logs: {verdict.folder}"])


def as_json(verdicts: Sequence[Verdict], lacking: Sequence[str]) -> str:
    """All of it, for programs."""
    said = {"passed": not lacking and not any(v.violations for v in verdicts), "lacking": lacking, "runs": verdicts}
    return msgspec.json.format(msgspec.json.encode(said)).decode()
