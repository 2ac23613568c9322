"""The transports' contract, over a program and over a webhook."""

import sys
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from postroad import Argv, Webhook
from postroad.testing.contracts.transports import TransportContract

SECRET = "whsec_bm90IGEgc2VjcmV0LCBhbiBleGFtcGxlIGF0IGFsbA=="
PROGRAM = """
import pathlib, sys, time, uuid
folder = pathlib.Path(sys.argv[1])
if (folder / "refuse").exists():
    sys.exit("refused")
data = sys.stdin.buffer.read()
while (folder / "hang").exists():
    time.sleep(.05)
(folder / f"{time.monotonic_ns():020}-{uuid.uuid4()}.json").write_bytes(data)
"""


class Program:
    """A program that keeps what it reads in a folder."""

    to = "ann"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.transport = Argv(sys.executable, "-c", PROGRAM, str(folder), "--", "{to}")

    def arrived(self) -> Sequence[bytes]:
        return [path.read_bytes() for path in sorted(self._folder.glob("*.json"))]

    def refuse(self) -> None:
        (self._folder / "refuse").touch()

    def hang(self) -> None:
        (self._folder / "hang").touch()


class Server(ThreadingHTTPServer):
    """A receiver that keeps what it gets."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Request)
        self.to = f"http://127.0.0.1:{self.server_port}/"
        self.transport = Webhook(secret=SECRET, allow_private=True)
        self.kept: list[bytes] = []
        self.status = 204
        self.held = threading.Event()
        self.held.set()

    def arrived(self) -> Sequence[bytes]:
        return self.kept

    def refuse(self) -> None:
        self.status = 400

    def hang(self) -> None:
        self.held.clear()


class Request(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        self.server.kept.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.held.wait(30)
        self.send_response(self.server.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


class TestArgv(TransportContract):
    """A program."""

    @pytest.fixture
    def stand(self, tmp_path: Path) -> Any:
        """A program and its folder."""
        return Program(tmp_path)


class TestWebhook(TransportContract):
    """A webhook."""

    @pytest.fixture
    def stand(self) -> Iterator[Server]:
        """A receiver on loopback."""
        with Server() as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield server
            server.held.set()
            server.shutdown()
