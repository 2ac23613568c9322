"""The limit on SQLite: hand-written statements over the raw driver, one connection, WAL, synchronous=FULL.

The fastest form that was found: `executemany` of prepared statements inside BEGIN IMMEDIATE (the JSON form of
the same inserts is slower here, other than on Postgres). One transaction per batch and step.
"""

import sqlite3
from collections.abc import Callable, Sequence
from itertools import batched
from time import perf_counter
from typing import Any

from benchmarks import work
from benchmarks.places import Place
from benchmarks.work import Work
