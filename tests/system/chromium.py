"""A headless Chromium, driven over its DevTools protocol. Every wait is bounded."""

import base64
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome")
MISSING = "The page is tested in Chromium, which is not installed: apt-get install -y chromium"
WAIT_SECONDS = 40.0
FLAGS = (
    "--headless=new", "--remote-debugging-port=0", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
    "--no-first-run", "--disable-extensions", "--disable-background-networking", "--window-size=1280,800",
)  # fmt: skip


class Page:
    """A page in a tab."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._sent = 0
        self.errors: list[str] = []
        """What the page's script raised, and did not catch."""
        self.call("Runtime.enable")
        self.call("Page.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Have the browser do something; its answer."""
        self._sent += 1
        self._socket.send(json.dumps({"id": self._sent, "method": method, "params": parameters}))
        while True:
            heard = json.loads(self._socket.recv(timeout=WAIT_SECONDS))
            if heard.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(heard["params"]["exceptionDetails"]))
            if heard.get("id") == self._sent:
                assert "error" not in heard, heard
                return dict(heard["result"])

    def open(self, url: str) -> None:
        """Go to a page, and wait until it is there."""
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def get(self, expression: str) -> Any:
        """What an expression comes to in the page, as JSON."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, (expression, found["exceptionDetails"])
        return found["result"].get("value")

    def until(self, expression: str, *, never: str = "false") -> None:
        """Look until an expression is true; `never` must not be true meanwhile."""
        end = time.monotonic() + WAIT_SECONDS
        while not self.get(f"!!({expression})"):
            assert not self.get(f"!!({never})"), f"{never}\n{self.text()}"
            assert time.monotonic() < end, f"never came: {expression}\n{self.text()}"
            time.sleep(0.05)
        assert not self.errors, self.errors

    def text(self) -> str:
        """What the page shows."""
        return str(self.get("document.body.innerText"))

    def close(self) -> None:
        """Close the tab, and let go of its connections."""
        self.call("Page.close")

    def screenshot(self, path: Path) -> None:
        """Write what the page looks like as a PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


class Browser:
    """A running Chromium with a profile of its own; its tabs are there as long as `opened`."""

    def __init__(self, port: int, opened: ExitStack) -> None:
        self._port = port
        self._opened = opened

    def tab(self) -> Page:
        """A new tab."""
        found = httpx.put(f"http://127.0.0.1:{self._port}/json/new?about:blank", timeout=WAIT_SECONDS).json()
        return Page(self._opened.enter_context(connect(found["webSocketDebuggerUrl"], max_size=None)))


@contextmanager
def browsing(profile: Path) -> Iterator[Browser]:
    """Chromium, for as long as the block lasts."""
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    assert program is not None, MISSING
    with subprocess.Popen(
        [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        try:
            with ExitStack() as opened:
                yield Browser(_port_of(process, profile), opened)
        finally:
            process.terminate()
            process.wait(timeout=WAIT_SECONDS)


def _port_of(process: "subprocess.Popen[bytes]", profile: Path) -> int:
    """Where it listens: it writes that into its profile."""
    told, end = profile / "DevToolsActivePort", time.monotonic() + WAIT_SECONDS
    while not (told.exists() and told.read_text()):
        assert process.poll() is None, "Chromium ended at once"
        assert time.monotonic() < end, "Chromium does not say where it listens"
        time.sleep(0.05)
    return int(told.read_text().splitlines()[0])
