"""The transactions that delete streams, and what they contained, of those in `tests.races.works`."""

from typing import Any

from sqlalchemy import Connection

from postroad.engine.records import BEGIN, Records
from postroad.model.retention import Retention
from postroad.store import audit, retention, streams, turns
from postroad.store.retention import Place, Tally
from postroad.testing.contracts.streams import decided
from tests.races.scene import Scene
from tests.races.transactions import work

CONTENTS = Place(stage=next(n for n, stage in enumerate(retention._STAGES) if stage.look is retention._CONTENTS))
KEPT = Retention()


def delete(conn: Connection, scene: Scene, *names: str) -> Any:
    """A program's block that deletes streams."""
    return BEGIN.run(conn, [Records(deletions=list(names))], now=scene.now)


@work("l1 i1 t1 t2 t3")
def delete_held(conn: Connection, scene: Scene, who: str) -> Any:
    """A stream whose turn is under way, with timers; it has no entry yet."""
    return delete(conn, scene, "load/1")


@work("l3 i3")
def delete_free(conn: Connection, scene: Scene, who: str) -> Any:
    return delete(conn, scene, "load/3")


@work("l1 l5 i1 i5 t1 t2 t3")
def delete_both(conn: Connection, scene: Scene, who: str) -> Any:
    """Two that a group of turns commits together, and that another turn deletes."""
    return delete(conn, scene, "load/5", "load/1")


@work("l1 i1 t1 t2 t3")
def delete_by_hand(conn: Connection, scene: Scene, who: str) -> Any:
    return streams.delete_by(conn, "load/1", by=audit.Operator(actor="ann"), now=scene.now)


@work("l6")
def delete_again(conn: Connection, scene: Scene, who: str) -> Any:
    return streams.delete_by(conn, "load/6", by=audit.Operator(actor="ann"), now=scene.now)


@work("q5 i5 l5 u5 l1 i1 t1 t2 t3")
def commit_deletes(conn: Connection, scene: Scene, who: str) -> Any:
    """A turn that deletes another stream, and its own as the last thing that it does."""
    decision = decided(scene.turns["load/5"], "note", deletions=["load/5", "load/1"])
    return turns.commit(conn, [decision], now=scene.now)


@work("q7 i7 l7 u7")
def commit_gone(conn: Connection, scene: Scene, who: str) -> Any:
    """A claimant that comes back two days after its stream was deleted."""
    return turns.commit(conn, [decided(scene.turns["load/7"], "note")], now=scene.now)


@work("q6 i6 l6 u6 t6 q7 i7 l7 u7", skips=True)
def sweep_contents(conn: Connection, scene: Scene, who: str) -> Any:
    """The stage of retention in which what deleted streams contained goes."""
    found = retention.look(conn, CONTENTS, retention=KEPT, now=scene.now)
    _, tally = retention.end(conn, found, Tally(), retention=KEPT, now=scene.now)
    return tally.counts
