"""How large and how fast everything is in a run, in real time: leases short enough to be lost many times a minute."""

import msgspec

from postroad.testing.simulation.options import Options, draw

# The timeout, the kill grace and the margin need 2.5 s of a lease. The rest is for a machine that is busy with
# starting what was killed.
LEASE_SECONDS = 4.0
# Attempts for all that die while they hold the work of those before them.
OPTIONS: Options = msgspec.structs.replace(
    draw(0), lease=LEASE_SECONDS, send_timeout=1, turn_timeout=20, send_attempts=8, turn_attempts=20, concurrency=8,
    rooms=True, audits=True, rates=0,
)  # fmt: skip
# How well a process knows its server's clock, in microseconds: to half of what a busy machine needs to ask for it.
CLOCK_ERROR = 250_000
PROCESSES = ("p1", "p2", "p3", "p4")
CLIENT = "client"
EVERYBODY = (*PROCESSES, CLIENT)
USERS = 10
PAUSE_SECONDS = 0.25
STREAMS = 8
POLL_SECONDS = 0.25
GRACE_SECONDS = 3.0
# Variables of the processes' environment.
DATABASE_URL = "POSTROAD_DATABASE_URL"
SOCKET, LIFE, FINISH, DOWN = "CHAOS_SOCKET", "CHAOS_LIFE", "CHAOS_FINISH", "CHAOS_DOWN"
