"""Directs the demo: starts the processes, publishes what happens, kills, deploys, and counts at the end."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
from rich.console import Console
from sqlalchemy import Connection, select

from postroad import Kind
from postroad.demo import cast, ledger, story
from postroad.demo.app import freight
from postroad.demo.cast import Player
from postroad.demo.journal import Follower, Line
from postroad.demo.kinds import FIRST, REPLY, DriverSms
from postroad.demo.processes import Processes
from postroad.store import schema

SECONDS_MAX = 50.0
POLL_SECONDS = 0.1
GRACE_SECONDS = 1
CLI = "postroad.surfaces.cli"
PARTS = {"worker": "turns", "dispatcher": "sends", "pump": "timers"}


class TooLong(Exception):
    """The demo did not get where it was going in time."""


class Director:
    """One run of the demo, on the database at `url`; everything else lies in `folder`.

    Whatever it starts it starts as one of `processes`, which outlive it and are ended by whoever made them.
    """

    def __init__(self, folder: Path, url: str, processes: Processes, *, bundled: bool) -> None:
        self._folder = folder
        self._url = url
        self._bundled = bundled
        self._services = ""
        self._processes = processes
        self._began = time.monotonic()
        start = time.time_ns() // 1000
        self._narrator = story.Narrator(Console(), start)
        self._follow = story.Follow(start)
        self._journal = Follower(folder / "services.jsonl")
        self._lines: list[Line] = []
        self._published: set[tuple[str, str]] = set()
        self._texts: dict[str, int] = {}
        self._kills = 0
        self._broken: list[str] = []

    def __enter__(self) -> "Director":
        self._services = self._start_services()
        self._post = freight(self._services, 1, database=self._url, migrate=True)
        self._database = self._post.database
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._post.close()

    def run(self) -> int:
        """The whole demo; its exit code."""
        try:
            self._misbehave()
            self._kill()
            self._deploy()
            self._until("everything is finished", lambda conn: ledger.waiting(conn).nothing)
        except TooLong as error:
            self._broken.append(str(error))
        return self._end()

    def _misbehave(self) -> None:
        self._narrator.say("The freight agent asks drivers for their ETA. Half an hour takes 3 s here.")
        self._narrator.chapter("Loads are late, and the services misbehave")
        for name in PARTS:
            self._run(name, release=1)
        for player in cast.FIRST_ACT:
            self._ping(player)
        first = [player.sms(1) for player in cast.FIRST_ACT]
        self._until("the first SMS are sent", lambda conn: self._over(conn, first))
        self._until("the alert is raised", ledger.has_alerts)

    def _kill(self) -> None:
        self._narrator.chapter("The dispatcher is killed in the middle of a send")
        self._ping(cast.HELD)
        key = cast.HELD.sms(1)
        self._until("the SMS service holds a request", lambda _: self._is_held(key))
        pid = self._processes.kill("dispatcher")
        self._kills += 1
        self._tell(f"SIGKILL to the dispatcher (process {pid}): the SMS is out, unrecorded", cast.HELD)
        self._run("dispatcher", release=1)
        self._tell("another dispatcher starts; the claim is over when its lease of 4 s is", cast.HELD)
        self._until("the SMS is known to be sent", lambda conn: self._over(conn, [key]))

    def _deploy(self) -> None:
        self._narrator.chapter("A new release is deployed: LocationPing and send_sms get a version 2")
        self._ping(cast.ARMED)
        self._until("its SMS is sent", lambda conn: self._over(conn, [cast.ARMED.sms(1)]))
        for name in ("dispatcher", "pump"):
            self._stop(name)
        self._ping(cast.QUEUED)
        self._until("its SMS waits", lambda conn: ledger.queued_in_version(conn, 1)["dispatches"] > 0)
        self._ping(cast.THINKING)
        self._until("the model is thinking", lambda _: self._is_held(cast.think(cast.THINKING)))
        self._stop("worker")
        self._ping(cast.WAITING)
        self._take_over()

    def _take_over(self) -> None:
        queued = self._database.read(ledger.queued_in_version, 1)
        timers = self._database.read(ledger.waiting).timers
        ends = self._database.read(ledger.run_ends, cast.THINKING.stream)
        self._tell(
            f"left by the old code, in version 1: events {queued['events']}, dispatches {queued['dispatches']}; "
            f"armed timers {timers}; a half-finished turn, “{ends[-1] if ends else 'not begun'}”"
        )
        for what, count in {**queued, "armed timers": timers}.items():
            self._hold(count > 0, f"the new release found no {what} of the old one")
        for name in PARTS:
            self._run(name, release=2)
        self._until(
            "the half-finished turn is decided",
            lambda conn: "committed" in ledger.run_ends(conn, cast.THINKING.stream)[len(ends) :],
        )
        self._hold(bool(ends) and ends[-1] != "committed", "no half-finished turn was taken over")

    def _end(self) -> int:
        for name in PARTS:
            self._processes.stop(name)
        self._listen()
        summary = ledger.summarise(self._database.read(ledger.facts), self._lines, self._published, kills=self._kills)
        summary.broken.extend(self._broken)
        self._narrator.summarise(summary, seconds=time.monotonic() - self._began)
        for line in self._where():
            self._narrator.say(line)
        return 0 if summary.holds else 1

    def _where(self) -> Sequence[str]:
        database = f"--database '{self._url}'"
        server = f"python -m postroad.demo.embedded {self._folder}/postgres   # starts its Postgres again"
        return [
            f"\nIt is all still there, in {self._folder} (the processes' own output too). Look at it:",
            *([f"  {server}"] if self._url.startswith("postgresql") else []),
            f"  postroad stream show {cast.SILENT.stream} {database}",
            f"  postroad dispatch ls {database}",
            f"  postroad dispatch show {cast.HELD.sms(1)} {database}",
        ]

    # What the world does

    def _ping(self, player: Player) -> None:
        body = FIRST.ping_body(risky=True, client=player.client, driver=player.driver)
        self._tell(f"is late (client {player.client}): {player.about}", player)
        self._publish(player, FIRST.ping, player.ping, body)

    def _reply(self, line: Line) -> None:
        """A driver who gets the SMS that he answers, answers."""
        player = cast.PLAYERS[line["key"].partition("/")[0]]
        nth = self._texts[player.number] = self._texts.get(player.number, 0) + 1
        if nth == player.replies_to:
            for _ in range(player.copies):
                self._publish(player, REPLY, f"reply_{player.number}_{nth}", DriverSms("ETA 16:30, traffic"))

    def _publish(self, player: Player, kind: Kind[Any], key: str, data: object) -> None:
        with self._post.begin() as tx:
            accepted = tx.publish(player.stream, kind, data, key=key)
        if not accepted.created:
            self._tell(f"{key} came again: it was accepted before, and is not again", player)
        self._published.add((player.stream, key))

    # Processes

    def _start_services(self) -> str:
        script = self._folder / "script.json"
        script.write_bytes(msgspec.json.encode(cast.SCRIPT))
        journal = str(self._folder / "services.jsonl")
        self._processes.start("services", "-m", "postroad.demo.services", str(script), journal)
        port = self._processes.first_line("services")
        if not port:
            raise RuntimeError(f"the services did not start: {self._processes.ended()}")
        return f"http://127.0.0.1:{port}"

    def _run(self, name: str, *, release: int) -> None:
        environment = {
            "POSTROAD_DEMO_SERVICES": self._services,
            "POSTROAD_DEMO_RELEASE": str(release),
            "POSTROAD_BUNDLED_SQLITE": "1" if self._bundled else "0",
        }
        pid = self._processes.start(
            name, "-m", CLI, "run", "postroad.demo.app:post", "--database", self._url,
            "--only", PARTS[name], "--grace", str(GRACE_SECONDS), environment=environment,
        )  # fmt: skip
        self._tell(f"starts the {name}, release {release} (process {pid})")

    def _stop(self, name: str) -> None:
        self._tell(f"SIGTERM to the {name}")
        self._hold(self._processes.stop(name), f"the {name} did not stop when it was asked to")

    # Following

    def _until(self, what: str, reached: Callable[[Connection], bool]) -> None:
        """Tell the story until something is so."""
        while True:
            self._listen()
            if self._database.read(reached):
                return
            if dead := self._processes.ended():
                raise TooLong(f"before {what}: {'; '.join(dead)}")
            if time.monotonic() - self._began > SECONDS_MAX:
                raise TooLong(f"after {SECONDS_MAX:.0f} s it was not so that {what}")
            time.sleep(POLL_SECONDS)

    def _listen(self) -> None:
        """Tell what is new in the database and in the services' journal; drivers answer."""
        lines = list(self._journal.lines())
        told = self._database.read(self._follow.new)
        told.extend(line for line in map(story.of_request, lines) if line is not None)
        for one in sorted(told, key=lambda one: one.at):
            self._narrator.tell(one)
        self._lines.extend(lines)
        for line in lines:
            if line["type"] == "done" and line["path"] == "/sms":
                self._reply(line)

    def _is_held(self, key: str) -> bool:
        return any(line["type"] == "held" and line["key"] == key for line in self._lines)

    def _over(self, conn: Connection, keys: Sequence[str]) -> bool:
        """Whether these dispatches exist and are finished."""
        outbox = schema.outbox
        found = conn.execute(select(outbox.c.status).where(outbox.c.key.in_(keys))).scalars().all()
        return len(found) == len(keys) and not set(found) & set(ledger.UNFINISHED)

    def _tell(self, text: str, player: Player | None = None) -> None:
        number = player.number if player else ""
        self._narrator.tell(story.Told(time.time_ns() // 1000, "demo", number, text))

    def _hold(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self._broken.append(otherwise)
