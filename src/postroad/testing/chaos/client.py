"""The process of the clients: `python -m postroad.testing.chaos.client SEED`."""

import asyncio
import sys

from postroad.testing.chaos.library import use_bundled_sqlite

if __name__ == "__main__":
    use_bundled_sqlite()
    from postroad.testing.chaos.users import ask

    asyncio.run(ask(int(sys.argv[1])))
