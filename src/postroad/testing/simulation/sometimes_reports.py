"""What must have happened somewhere to reports."""

from collections import Counter

from postroad.model.events import REPORT_NAME
from postroad.model.lifecycle import RunEnd
from postroad.store.queues import STREAM_DELETED
from postroad.store.stopping import WITHDRAWN
from postroad.testing.simulation.history import History, grouped
from postroad.testing.simulation.ledger import Answer

REPORTS = {
    "a report's caller is told that it has landed": "report told",
    "a report is accepted and does not land in time": "report accepted",
    "a report lands whose caller was cancelled": "report given up",
    "a report lands whose caller's process died": "report lost",
    "a report lands of whose acceptance the answer was lost": "report unanswered",
    "a report is made again in other words": "report in other words",
    "several reports land in one commit": "reports together",
    "a report lands between two messages": "report between",
    "a report wakes a handler": "report wakes",
    "a report lands although the handler that it woke fails": "report outlives its turn",
    "a stop withdraws what waits around a report": "report outlives a stop",
    "a report is dropped with its stream": "report dropped",
    **{
        f"a report is refused: {error}": f"report {error}"
        for error in ("SourceRefused", "KeyConflict", "StreamDeleted")
    },
}


def reported(h: History) -> Counter[str]:
    """What became of reports, and what their callers were told."""
    counts: Counter[str] = Counter()
    landed = {(row.stream, row.entry_id) for row in h.log if row.kind == REPORT_NAME}
    for place, calls in grouped(h.ledger.reports, "stream", "key").items():
        accepted = [call for call in calls if call.answer is Answer.OK]
        counts["report told"] += sum(call.entry is not None for call in accepted)
        counts["report accepted"] += sum(call.entry is None and call.wait != 0 for call in accepted)
        counts["report in other words"] += len({call.data for call in accepted}) > 1
        counts.update(f"report {call.error}" for call in calls if call.answer is Answer.REFUSED)
        if place in landed and not accepted:
            counts["report given up"] += any(call.error == "TimeoutError" for call in calls)
            counts["report lost"] += any(call.lost for call in calls)
            counts["report unanswered"] += any(call.error == "CommitUnknown" for call in calls)
    ends = {run.run_id: run.end_reason for run in h.runs}
    sets = grouped([row for row in h.log if row.cause is None], "run_id")
    for run, rows in sets.items():
        if rows[0].kind == REPORT_NAME:
            counts["reports together"] += len(rows) > 1
            counts["report outlives its turn"] += ends[run] == RunEnd.FAILED
    counts["report wakes"] = sum((one.stream, key) in landed for one in h.handled for key in one.events)
    counts["report dropped"] = sum(row.kind == REPORT_NAME and row.reason == STREAM_DELETED for row in h.inbox)
    counts.update(_placed(h))
    return counts


def _placed(h: History) -> Counter[str]:
    """Where reports landed: between messages, and in front of a stop that withdrew some of these."""
    counts: Counter[str] = Counter()
    withdrawn = grouped([row for row in h.inbox if row.reason == WITHDRAWN], "stream")
    places = {(row.stream, row.seq): row.position for row in h.landed}
    for stream, rows in h.logs.items():
        consumed = [row.kind == REPORT_NAME for row in rows if row.cause is None]
        counts["report between"] += True in consumed and not consumed[0] and not consumed[-1]
        after = min((row.position for row in withdrawn.get(stream, [])), default=None)
        told = [places[row.stream, row.seq] for row in rows if row.kind == REPORT_NAME]
        stops = [places[row.stream, row.seq] for row in rows if row.kind == "postroad.stop"]
        counts["report outlives a stop"] += after is not None and any(
            after < place < max(stops, default=0) for place in told
        )
    return counts
