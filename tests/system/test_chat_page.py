"""The chat's page in a real browser, beside a real server and a worker that is killed, on both databases."""

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import psycopg
import pytest
from sqlalchemy import make_url

from tests.system.chromium import Browser, Page, browsing

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(240)]
SERVER = Path(__file__).parents[2] / "examples/chat/web.py"
WAIT_SECONDS = 40.0
TOOL_SECONDS = 5  # half of it is left for a kill once the page shows what the tools have done
THINKING = "document.querySelector('[data-state=thinking]')"
REPLIES = "document.querySelectorAll('[data-state=reply]').length"


class Server:
    """The example's server as a process, on one port however often it is begun."""

    def __init__(self, folder: Path, database: str | None) -> None:
        self._folder = folder
        self._database = {} if database is None else {"DATABASE_URL": database}
        self._process: subprocess.Popen[bytes] | None = None
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}/"

    def start(self) -> None:
        with (self._folder / "log").open("ab") as log:
            kept = {name: value for name, value in os.environ.items() if not re.match("POSTROAD_|DATABASE_URL", name)}
            environ = {**kept, **self._database, "CHAT_TOOL_SECONDS": str(TOOL_SECONDS)}
            self._process = subprocess.Popen(
                [sys.executable, str(SERVER), str(self._port)], cwd=self._folder, env=environ, stdout=log, stderr=log
            )
        end = time.monotonic() + WAIT_SECONDS
        while not self._serves():
            assert self._process.poll() is None, (self._folder / "log").read_text()
            assert time.monotonic() < end, "the server does not begin"
            time.sleep(0.05)

    def _serves(self) -> bool:
        with socket.socket() as tried:
            return tried.connect_ex(("127.0.0.1", self._port)) == 0

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End it. One that was killed cannot take its worker along: that is ended here."""
        if self._process is None:
            return
        workers = self.workers()
        self._process.send_signal(number)
        self._process.wait(timeout=WAIT_SECONDS)
        for worker in workers:
            if number == signal.SIGKILL and worker.is_running():
                worker.terminate()
        psutil.wait_procs(workers, timeout=WAIT_SECONDS)
        self._process = None

    def workers(self) -> list[psutil.Process]:
        """Its worker, if there is one just now."""
        assert self._process is not None
        return psutil.Process(self._process.pid).children()

    def world(self) -> list[str]:
        """Everything that the tools have done."""
        path = self._folder / "world.txt"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server on a file of its own, or on a Postgres by setting."""
    with ExitStack() as stack:
        url = (
            None if request.param == "sqlite" else stack.enter_context(_schema(request.getfixturevalue("postgres_url")))
        )
        made = Server(tmp_path_factory.mktemp("chat"), url)
        made.start()
        yield made
        made.end()


@contextmanager
def _schema(postgres_url: str) -> Iterator[str]:
    """A schema of the run's Postgres, as a URL of the kind that hosts hand out."""
    name = f"test_chat_{secrets.token_hex(4)}"
    with psycopg.connect(postgres_url.replace("+psycopg", "", 1), autocommit=True) as conn:
        conn.execute(f'CREATE SCHEMA "{name}"')
        url = make_url(postgres_url).update_query_dict({"options": f"-csearch_path={name}"})
        yield url.set(drivername="postgresql").render_as_string(False).replace("postgresql://", "postgres://", 1)
        conn.execute(f'DROP SCHEMA "{name}" CASCADE')


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def page(server: Server, browser: Browser) -> Iterator[Page]:
    """The page with a new conversation, connected, and with a worker that runs."""
    made = browser.tab()
    made.open(server.url)
    click(made, "new")
    made.until("document.querySelector('#connection[data-state=connected]')")
    made.until("document.querySelector('#worker[data-state=up]')")
    yield made
    made.close()


def say(page: Page, text: str) -> None:
    page.get(f"document.getElementById('text').value = {text!r}; document.getElementById('say').requestSubmit()")


def click(page: Page, id: str) -> None:
    page.get(f"document.getElementById('{id}').click()")


def show(page: Page, conversation: str) -> None:
    """Look at a conversation."""
    page.get(f"document.querySelector('[data-id=\"{conversation}\"] button').click()")
    page.until("document.querySelector('#connection[data-state=connected]')")


def shown(page: Page, state: str) -> list[str]:
    """The texts of what the page shows in a state."""
    found = page.get(f"[...document.querySelectorAll('#messages [data-state={state}]')].map((one) => one.innerText)")
    return list(found)


def is_thinking(page: Page, words: str) -> None:
    """Wait until the running turn has said these words."""
    page.until(f"{THINKING}?.innerText.includes('{words}')")


def is_done(page: Page, line: str) -> None:
    """Wait until a tool has changed the world, which is in the middle of its work."""
    page.until(f"page.state?.world.some((one) => one.startsWith('{line}'))")


def test_a_message_is_answered_word_by_word(page: Page) -> None:
    """A message is shown as accepted, then what the turn says by now, then its reply and nothing of it twice."""
    say(page, "What's the weather in Rome?")
    page.until("document.querySelector('[data-state=accepted]')")
    is_thinking(page, "out of the window")
    page.until(REPLIES)
    assert shown(page, "reply") == ["Let me look out of the window. Done: 19 degrees and dry in Rome."]
    page.until("!document.querySelector('[data-state=thinking], [data-state=accepted]')")
    assert shown(page, "landed") == ["What's the weather in Rome?"]
    page.call("Page.reload")
    page.until(REPLIES)
    assert (len(shown(page, "landed")), len(shown(page, "reply"))) == (1, 1)


def test_texts_are_texts(page: Page) -> None:
    """Markup in a message, its title and its reply is shown, and does nothing."""
    say(page, "<img src=x onerror=\"document.title='owned'\"> <b>bold</b>")
    page.until(REPLIES)
    assert "<b>bold</b>" in shown(page, "reply")[0]
    assert page.get("document.querySelectorAll('img, #messages b').length") == 0
    assert page.get("document.title") == "Postroad chat"


def test_a_kill_in_the_middle_of_tools(page: Page, server: Server) -> None:
    """One kill with a tool of each effect at work: what must not be done twice is shown, the rest is done once.

    Between the worker's death and the takeover no page says that somebody thinks.
    """
    acts = {
        "Send a mail to kim@example.com": "mail to kim@", "Charge 77 euros": "charge 77 euros",
        "Label this late": "label late",
    }  # fmt: skip
    names: dict[str, str] = {}
    for text in (*acts, "What's the weather in Oslo?"):
        click(page, "new")
        names[text] = page.get("location.hash")[1:]
        say(page, text)
    is_thinking(page, "the window")
    for line in acts.values():
        is_done(page, line)
    click(page, "kill")
    page.until("document.querySelector('#worker[data-state=down]')")
    page.until("document.querySelector('[data-state=unattended]')")
    again = f"{THINKING}?.innerText.includes('attempt 2')"
    page.until(f"{again} || {REPLIES}", never=f"{THINKING} && !{again}")
    for text, name in names.items():
        show(page, name)
        if "mail" not in text:
            page.until(REPLIES, never="document.querySelector('[data-state=interrupted]')")
            continue
        page.until("document.querySelector('[data-state=interrupted]')", never=REPLIES)
        (told,) = shown(page, "interrupted")
        assert "send_mail(kim@example.com, Hello)" in told
        assert "nobody knows how it ended" in told
        say(page, "hello")
        page.until(REPLIES)
    for line in acts.values():
        assert len([one for one in server.world() if one.startswith(line)]) == 1


def test_what_is_said_offline_goes_out_once(page: Page) -> None:
    """Offline messages wait in the browser, and are accepted once, even if the browser sends them twice."""
    click(page, "offline")
    page.until("document.querySelector('#connection[data-state=offline]')")
    say(page, "one")
    say(page, "two")
    assert [text.split("\n")[0] for text in shown(page, "queued")] == ["one", "two"]
    assert shown(page, "thinking") == []
    kept = page.get("localStorage.getItem('chat.queue')")
    click(page, "offline")
    page.until(REPLIES)
    page.until("localStorage.getItem('chat.queue') === '[]'")
    page.get(f"localStorage.setItem('chat.queue', {kept!r})")  # as if no answer had come
    sent = "performance.getEntriesByType('resource').filter((one) => one.name.endsWith('/messages')).length"
    before = page.get(sent)
    page.get("flush()")
    page.until(f"{sent} === {before + 2}")
    page.call("Page.reload")
    page.until(REPLIES)
    say(page, "three")
    page.until("document.querySelectorAll('[data-state=landed]').length === 3")
    assert shown(page, "landed") == ["one", "two", "three"]
    assert page.get("localStorage.getItem('chat.queue')") == "[]"


def test_a_queue_outlives_its_page(page: Page) -> None:
    """What was queued while the server could not be reached is still there after a reload, and then goes out."""
    page.call("Network.enable")
    page.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=-1, uploadThroughput=-1)
    say(page, "from the tunnel")
    page.until("document.querySelector('[data-state=queued]')")
    page.call("Network.emulateNetworkConditions", offline=False, latency=0, downloadThroughput=-1, uploadThroughput=-1)
    page.call("Page.reload")
    page.until(REPLIES)
    assert shown(page, "landed") == ["from the tunnel"]


def test_a_page_without_its_server_says_so(page: Page, server: Server) -> None:
    """While the server is down the page says so and shows nobody thinking; what is said then goes out later."""
    say(page, "count to 60")
    is_thinking(page, "3 4 5")
    server.end(signal.SIGKILL)
    page.until("document.querySelector('#connection[data-state=lost]')")
    said = page.get("document.getElementById('connection').innerText")
    say(page, "are you there?")
    calm = time.monotonic() + 3
    while time.monotonic() < calm:
        assert shown(page, "thinking") == []
        assert page.get("document.getElementById('stop').hidden")
        time.sleep(0.1)
    assert said == "not connected"
    assert shown(page, "accepted") == ["count to 60\naccepted"]
    assert shown(page, "queued") == ["are you there?\nqueued here, not sent"]
    server.start()
    page.until(f"{REPLIES} >= 1 && !document.querySelector('[data-state=queued], [data-state=accepted]')")
    assert shown(page, "landed") == ["count to 60", "are you there?"]


def test_stopping(page: Page) -> None:
    """Stop ends the answer that is under way and withdraws what waits; both are shown, and later ones answered."""
    say(page, "count to 200")
    is_thinking(page, "3 4 5")
    say(page, "and this waits")
    page.until("document.querySelectorAll('[data-state=accepted]').length === 2")
    page.until("document.querySelectorAll('[data-state=accepted]')[1].innerText.includes('1 before it')")
    click(page, "stop")
    page.until(
        "document.querySelector('.event[data-state=stop]') && document.querySelector('.event[data-state=stopped]')"
    )
    page.until(f"!{THINKING}")
    assert shown(page, "landed") == ["count to 200"]
    assert shown(page, "stopped")[0] == "and this waits\nstopped"
    assert page.get("document.getElementById('stop').hidden")
    say(page, "hello")
    page.until(REPLIES)
    assert len(shown(page, "reply")) == 1


def test_deleting_in_the_middle_of_an_answer(page: Page, browser: Browser, server: Server) -> None:
    """A deleted conversation leaves every page that shows it, and nothing of its turn comes into being later."""
    say(page, "Charge 99 euros")
    is_done(page, "charge 99 euros")
    name = page.get("location.hash")
    other = browser.tab()
    other.open(f"{server.url}{name}")
    other.until("document.querySelector('[data-state=landed], [data-state=accepted]')")
    other.until("!document.getElementById('delete').disabled")
    click(other, "delete")
    for each in (other, page):
        each.call("Page.bringToFront")
        each.until("location.hash === '' && document.querySelector('#connection[data-state=connected]')")
        each.until(f"!document.querySelector('[data-id=\"{name[1:]}\"]')")
    other.close()
    say(page, "hello")  # another turn of the same worker, later
    page.until(REPLIES, never=f"document.querySelector('[data-id=\"{name[1:]}\"]')")
    page.open(f"{server.url}?again{name}")
    page.until("location.hash === ''")


def test_what_fails_is_shown(page: Page) -> None:
    """A model that is busy is asked again, and the page says when; a turn at its cap is shown with its error."""
    say(page, "be busy")
    page.until("document.querySelector('[data-state=retrying]')")
    page.until(REPLIES)
    say(page, "be broken")
    page.until("document.querySelector('[data-state=failed]')")
    assert "this is a bug in the handler" in "".join(shown(page, "failed"))
    say(page, "hello")
    page.until(f"{REPLIES} === 2")


def test_a_closed_terminal_ends_the_worker_too(tmp_path: Path) -> None:
    """When the terminal goes away under the server, no worker is left behind on a database that nobody looks at."""
    made = Server(tmp_path, None)
    made.start()
    end = time.monotonic() + WAIT_SECONDS
    while not (workers := made.workers()):
        assert time.monotonic() < end, "no worker begins"
        time.sleep(0.05)
    made.end(signal.SIGHUP)
    assert not any(worker.is_running() for worker in workers)


def test_unread_replies_are_counted(page: Page) -> None:
    """A reply in a conversation that is not shown counts as unread, until it is opened."""
    say(page, "hello")
    page.until("document.querySelector('[data-state=landed], [data-state=accepted]')")
    name = page.get("location.hash")[1:]
    click(page, "new")
    unread = f"document.querySelector('[data-id=\"{name}\"] .unread')"
    page.until(f"{unread}?.innerText === '1'")
    show(page, name)
    page.until(REPLIES)
    page.until(f"page.state?.conversations.find((one) => one.id === '{name}').unread === 0")
    click(page, "new")
    page.until(f"document.querySelector('#connection[data-state=connected]') && !{unread}")
