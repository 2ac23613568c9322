"""The services that the freight agent talks to, over real HTTP, misbehaving by a script.

`/sms`, `/hero`, `/slack` and `/stage` take a message under its Idempotency-Key and know a key for ever: the
second request with it is answered like the first, and nothing is done. `/think` is the model behind the
decider: it takes its time when the script says so. A script maps a key to what happens to its requests, one
word each:

    ok      done and answered
    slow    done, and answered after 1.2 s
    lost    done, but the answer never comes
    hold    done, and held until the client is gone: the signal for whoever follows the journal
    busy    500, nothing done
    refuse  422, nothing done

Each request is in the journal before anything is done, and each answer before it is sent.

`python -m postroad.demo.services SCRIPT JOURNAL` serves on a free port of 127.0.0.1 and prints the port.
"""

import json
import select
import sys
import threading
import time
from collections import Counter
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from postroad.demo.journal import Journal

SLOW_SECONDS = 1.2
HOLD_SECONDS_MAX = 30.0
Script = dict[str, list[str]]


class Services:
    """What the services know: which keys were done, and how far each key is in the script."""

    def __init__(self, script: Script, journal: Journal) -> None:
        self._script = script
        self._used: Counter[str] = Counter()
        self._done: set[str] = set()
        self._lock = threading.Lock()
        self._journal = journal

    def take(self, key: str, path: str, attempt: int) -> tuple[str, bool]:
        """Take in a request: what happens to it, and whether its message was done before."""
        with self._lock:
            duplicate = key in self._done
            word = "ok" if duplicate else self._next(key)
            self.note("request", key, attempt, path=path, duplicate=duplicate)
            if not duplicate and word not in ("busy", "refuse"):
                self._done.add(key)
                self.note("done", key, attempt, path=path)
            return word, duplicate

    def _next(self, key: str) -> str:
        words = self._script.get(key, [])[self._used[key] :]
        self._used[key] += 1
        return words[0] if words else "ok"

    def note(self, kind: str, key: str, attempt: int, **more: object) -> None:
        """Write down what happened to a request. `at` is in microseconds since 1970 UTC."""
        now = time.time_ns() // 1000
        self._journal.append({"at": now, "type": kind, "key": key, "attempt": attempt, **more})


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: "Server"

    def do_POST(self) -> None:
        """Take the request in, do what the script says, answer."""
        self.rfile.read(int(self.headers.get("Content-Length", "0")))
        key = self.headers.get("Idempotency-Key", "")
        attempt = int(self.headers.get("Attempt", "0"))
        word, duplicate = self.server.services.take(key, self.path, attempt)
        if word in ("hold", "lost"):
            self._never_answer(word, key, attempt)
            return
        if word == "slow":
            time.sleep(SLOW_SECONDS)
        self._answer({"busy": 500, "refuse": 422}.get(word, 200), word, key, attempt, duplicate)

    def _never_answer(self, word: str, key: str, attempt: int) -> None:
        self.server.services.note("held" if word == "hold" else "lost", key, attempt)
        readable, _, _ = select.select([self.connection], [], [], HOLD_SECONDS_MAX)
        self.server.services.note("gone", key, attempt, closed=bool(readable))
        self.close_connection = True

    def _answer(self, status: int, word: str, key: str, attempt: int, duplicate: bool) -> None:
        self.server.services.note("answer", key, attempt, status=status, word=word, deduplicated=duplicate)
        body = json.dumps({"receipt": f"r-{key}", "deduplicated": duplicate}).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except ConnectionError:
            self.server.services.note("gone", key, attempt, closed=True)
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on stderr: the journal has it all."""


class Server(ThreadingHTTPServer):
    """The services on a free port of 127.0.0.1."""

    daemon_threads = True

    def __init__(self, services: Services) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.services = services


def main(script: str, journal: str) -> None:
    """Serve until the parent closes stdin."""
    given: Script = json.loads(Path(script).read_text())
    with closing(Journal(Path(journal))) as written, Server(Services(given, written)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(server.server_address[1], flush=True)
        sys.stdin.read()
        server.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
