"""The transactions that meet at gates, of those in `tests.races.works`: claims that probe, settles, operators."""

from typing import Any

from sqlalchemy import Connection

from postroad.store import audit, dispatch_claims, gates
from tests.races.scene import HOOK, TEXT, Scene
from tests.races.transactions import work


@work("h12 h15 ga gb gc gi g", skips=True)
def claim_hooks(conn: Connection, scene: Scene, who: str) -> Any:
    """Takes the gate of b.example for a probe, sends to c.example unless that is closed, and forgets idle.example."""
    return dispatch_claims.claim(conn, HOOK, names=["hook"], token=f"claim-{who}", limit=10, now=scene.now)


@work("h17 gt rt", skips=True)
def claim_texts(conn: Connection, scene: Scene, who: str) -> Any:
    """Takes the gate of the whole kind for a probe, as its rate allows."""
    return dispatch_claims.claim(conn, TEXT, names=["text"], token=f"claim-{who}", limit=10, now=scene.now)


@work("h11 ga")
def settle_opens(conn: Connection, scene: Scene, who: str) -> Any:
    return scene.settled(conn, scene.result("h11"))


@work("h11 ga")
def settle_keeps(conn: Connection, scene: Scene, who: str) -> Any:
    return scene.settled(conn, scene.result("h11", "unreachable"))


@work("h14 gc a")
def settle_closes(conn: Connection, scene: Scene, who: str) -> Any:
    return scene.settled(conn, scene.result("h14", "unreachable"))


@work("h11 h14 h16 ga gc g a")
def settle_both(conn: Connection, scene: Scene, who: str) -> Any:
    """Opens the one gate, and closes another one and that of the whole kind."""
    return scene.settled(
        conn, scene.result("h16", "unreachable", gate=""), scene.result("h14", "unreachable"), scene.result("h11")
    )


@work("h11")
def release_probe(conn: Connection, scene: Scene, who: str) -> Any:
    return dispatch_claims.release(conn, [scene.proof("h11")], now=scene.now)


def open_gate(conn: Connection, scene: Scene, kind: str, host: str) -> Any:
    return gates.open_(conn, kind, host, by=audit.Operator(actor="ann"), now=scene.now)


@work("ga")
def open_probed(conn: Connection, scene: Scene, who: str) -> Any:
    return open_gate(conn, scene, "hook", "a.example")


@work("gb")
def open_due(conn: Connection, scene: Scene, who: str) -> Any:
    return open_gate(conn, scene, "hook", "b.example")


@work("gc")
def open_new(conn: Connection, scene: Scene, who: str) -> Any:
    """Somebody else may be closing it."""
    return open_gate(conn, scene, "hook", "c.example")


@work("g")
def open_kind(conn: Connection, scene: Scene, who: str) -> Any:
    return open_gate(conn, scene, "hook", "")


@work("gt")
def open_texts(conn: Connection, scene: Scene, who: str) -> Any:
    return open_gate(conn, scene, "text", "")
