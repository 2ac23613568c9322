"""The freight app as the demo deploys it: `postroad run postroad.demo.app:post`, told by its environment.

POSTROAD_DEMO_SERVICES is the URL of the services, POSTROAD_DEMO_RELEASE the release of the code: 1 or 2.
"""

import os

from postroad import Postroad, Retry
from postroad.demo.carrier import HttpCarrier, ModelDecider
from postroad.demo.freight import Pace, handlers
from postroad.demo.kinds import RELEASES
from postroad.demo.policy import RulePolicy

# Half an hour takes 3 s; a lease of 4 s lets a killed dispatcher's work be taken over while you watch.
DEMO_PACE = Pace(
    minute_seconds=0.1, timeout=2, lease=4, retry=Retry(attempts=6, budget=30, first=0.5, cap=2, jitter=True)
)


def freight(services: str, release: int, *, database: str | None = None, migrate: bool | None = None) -> Postroad:
    """The app of a release, talking to these services."""
    declared = handlers(
        RELEASES[release],
        decider=ModelDecider(services, RulePolicy()),
        pace=DEMO_PACE,
        carrier=HttpCarrier(services),
    )
    app = Postroad(database, migrate=migrate)
    app.include(declared)
    return app


post = freight(
    os.environ.get("POSTROAD_DEMO_SERVICES", "http://127.0.0.1:9"),
    int(os.environ.get("POSTROAD_DEMO_RELEASE", "1")),
)
