"""The command line on the bundled SQLite: `python -m postroad.demo.bundled run …`."""

import postroad.bundled_sqlite  # noqa: F401  # first: it replaces sqlite3 for the whole process
from postroad.surfaces.cli import main

if __name__ == "__main__":
    main()
