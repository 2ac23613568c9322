"""What must hold of gates and of rates. Each check yields what is wrong, in words."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from postroad.model.clock import SECOND
from postroad.model.gates import BURST, CAP, WHOLE_KIND
from postroad.model.lifecycle import Reason
from postroad.testing.simulation.checks_outbox import attempt_of, changes, starts, was_cut_short
from postroad.testing.simulation.history import History
from postroad.testing.simulation.outages import AFTER_SECONDS, Outage, named
from postroad.testing.simulation.workload import KINDS, MAIL, SMS, retry_of

OTHERS_SECONDS = 180  # in which all else comes to its end once it is calm, however long something is down
BACK_SECONDS = 60  # what a probe may have to wait for besides its time and its predecessor's lease


def h1_only_the_probe(h: History) -> Iterator[str]:
    """While a gate is closed nothing is sent to what it stands for but one probe at a time."""
    yield from h.walk.wrong["h1"]


def h2_rarer_and_rarer(h: History) -> Iterator[str]:
    """A probe comes when its gate says, not sooner, and each in vain doubles the wait, up to a minute."""
    yield from h.walk.wrong["h2"]


def h3_closed_by_what_is_down(h: History) -> Iterator[str]:
    """A gate is closed, and kept closed, by an attempt that could not reach just that."""
    yield from h.walk.wrong["h3"]


def h4_held_costs_nothing(h: History) -> Iterator[str]:
    """What could not be reached costs no attempt for as long as the attempts would have taken, and then it does."""
    timeout = round(h.options.send_timeout * SECOND)
    of_kinds = {kind.name: retry_of(kind.name, h.options).horizon(timeout) - timeout for kind in KINDS}
    for row in h.dispatches:
        patience = of_kinds[row.kind]
        first, began = None, (0, 0)
        for step in changes(h.stories.get(row.id, [])):
            if starts(step):
                first, began = step.at if first is None else first, attempt_of(step)
            elif step.reason_code == Reason.OPERATOR_RETRY or (_given_back(step) and began[1] == 1):
                first = None
            elif first is not None and named(step.summary) is not None:
                held = step.reason_code == Reason.HELD
                if held != (step.at - first < patience):
                    yield f"{row.key}: {step.reason_code} after {step.at - first} µs, its patience is {patience} µs"


def _given_back(step: Any) -> bool:
    return step.reason_code == Reason.RELEASED and not was_cut_short(step)


def h5_opened_by_an_answer(h: History) -> Iterator[str]:
    """The answer of a gate's probe opens it at once; else only a person does, or that nothing goes there any more."""
    yield from h.walk.wrong["h5"]


def h6_forgotten(h: History) -> Iterator[str]:
    """The gate of a host to which nothing goes any more is gone once its kind is sent again, after its time."""
    yield from h.walk.wrong["h6"]


def h7_others_go_on(h: History) -> Iterator[str]:
    """In calm, what goes elsewhere than to what is down comes to its end in time, however long that stays down."""
    if not h.end or h.options.jumps:
        return
    closed = {(log.kind, log.host) for log in h.gate_log if log.at >= h.calm}
    closed |= {(gate.kind, gate.host) for gate in h.gates}
    for row in h.dispatches:
        if row.lane is None and not {(row.kind, WHOLE_KIND), (row.kind, row.host)} & closed:
            story = changes(h.stories[row.id])
            took = story[-1].at - max(h.calm, _came(story))
            if took > OTHERS_SECONDS * SECOND:
                yield f"{row.key} took {took} µs, although nothing on its way was down"


def _came(story: list[Any]) -> int:
    came: int = max(step.at for step in story if step.reason_code in (Reason.ENQUEUED, Reason.OPERATOR_RETRY))
    return came


def h8_comes_back(h: History) -> Iterator[str]:
    """In calm, a gate is open soon after its destination is back: one more wait and one lost probe later at most."""
    if h.options.jumps:
        return
    lost = h.options.lease + 2 * h.options.poll
    most = round((BACK_SECONDS + lost) * SECOND) + max(CAP, AFTER_SECONDS * SECOND)
    for opened in h.walk.opened if h.calm else ():
        since = max(h.calm, opened.closed_at, opened.wanted_since, _back(h.outages, *opened.place))
        if opened.at - since > most:
            yield f"the gate of {opened.place} opened {opened.at - since} µs after all was well"


def _back(outages: list[Outage], kind: str, host: str) -> int:
    return max((each.wall for each in outages if each.place in (kind, host)), default=0)


def h9_rate_kept(h: History) -> Iterator[str]:
    """In no stretch of time do more attempts start than its rate allows and a tenth of a second has saved."""
    if not h.options.rates:
        return
    gap = round(SECOND / h.options.rates)
    saved = max(0, BURST - gap)
    rows = {row.id: row for row in h.dispatches}
    started: Counter[tuple[str, str]] = Counter()
    latest: dict[tuple[str, str], int] = defaultdict(int)
    for step in h.transitions:
        row = rows.get(step.entity) if starts(step) else None
        if row is None or row.kind not in (SMS.name, MAIL.name) or (row.kind == MAIL.name and row.host is None):
            continue
        place = (row.kind, row.host if row.kind == MAIL.name else WHOLE_KIND)
        early = latest[place] - saved - (step.at - started[place] * gap)
        if early > 0:
            yield f"{row.key} was sent {early} µs before the rate of {place} allows it"
        latest[place] = max(latest[place], step.at - started[place] * gap)
        started[place] += 1


def h10_turned_away(h: History) -> Iterator[str]:
    """Whatever is said to have been unreachable was, as often as that is said."""
    met = Counter(h.turned_away)
    for id, times in Counter(step.entity for step in h.transitions if named(step.summary) is not None).items():
        if times > met[id]:
            yield f"{id} could not reach its destination {times} times, and was turned away {met[id]} times"
