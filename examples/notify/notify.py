"""Notifications that operators trust: a command, a webhook that is acknowledged, and a destination that is dead."""

import postroad.bundled_sqlite  # noqa: F401, I001  # first of all: a SQLite that several processes may use

import sys
from pathlib import Path

from receiver import Receiver

from postroad import Argv, Kind, Postroad, Retry, Webhook

SECRET = "whsec_bm90IGEgc2VjcmV0LCBhbiBleGFtcGxlIGF0IGFsbA=="  # yours comes from where you keep secrets

NOTE = Kind("note", dict[str, str])
HOOK = Kind("hook", dict[str, str])

post = Postroad("sqlite:///notify.db", secret_key="an example's key, which everybody knows")
here = Path(__file__).parent
post.transport(NOTE, Argv(sys.executable, str(here / "say.py"), "--", "{to}", cwd=str(Path.cwd())))
post.transport(
    HOOK,
    Webhook(secret=SECRET, allow_private=True),  # loopback: an example has no other
    retry=Retry(attempts=2, first=0.2, cap=0.2),
)


def acknowledge(token: str) -> None:
    """What a consumer does once its work is safe; one elsewhere posts the token, or has `postroad ack` read it."""
    with post.begin() as tx:
        tx.ack(token)


def main() -> None:
    receiver = Receiver(SECRET, acknowledge)
    with post.begin() as tx:
        tx.send(NOTE, {"text": "the backup is done"}, to="ops", key="backup/2026-11-30")
        tx.send(NOTE, {"text": "--not an option"}, to="--help", key="odd/1")
        tx.send(HOOK, {"order": "7"}, to=receiver.url, key="order/7/paid", ack=True, origin={"session": "s1"})
        tx.send(HOOK, {"order": "8"}, to=receiver.broken, key="order/8/paid", origin={"session": "s1"})
    with post.begin() as tx:  # the same once more, after a restart say: nothing is doubled
        tx.send(NOTE, {"text": "the backup is done"}, to="ops", key="backup/2026-11-30")
    while post.drain().waiting:
        pass
    for row in sorted(post.dispatches.list(), key=lambda row: row.key):
        print(f"{row.key:18} {row.status:12} attempt {row.attempt}  {row.reason}")
    print(Path("said.txt").read_text(), end="")
    receiver.shutdown()
    post.close()


if __name__ == "__main__":
    main()
