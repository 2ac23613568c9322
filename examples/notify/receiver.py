"""A webhook receiver: verifies the signature over the raw bytes, does its work once, then acknowledges."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from postroad import webhooks


class Receiver(ThreadingHTTPServer):
    """Listens on a free port of loopback. `done`: what it has processed, so that a repeated one changes nothing."""

    daemon_threads = True

    def __init__(self, secret: str, acknowledge: Callable[[str], object]) -> None:
        super().__init__(("127.0.0.1", 0), Request)
        self.secret = secret
        self.acknowledge = acknowledge
        self.done: set[str] = set()
        self.url = f"http://127.0.0.1:{self.server_port}/hook"
        self.broken = f"http://127.0.0.1:{self.server_port}/broken"  # whatever comes there fails
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Request(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/broken":
            self.answer(500)
            return
        try:
            event_id = webhooks.verify(body, self.headers, self.server.secret)
        except webhooks.BadSignature:
            self.answer(401)
            return
        self.server.done.add(event_id)  # here: commit your own work under this id
        self.answer(204)
        token = json.loads(body)["ack_token"]
        if token is not None:
            self.server.acknowledge(token)  # after the work is safe, never before

    def answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass
