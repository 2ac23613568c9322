"""What a program does to its own SQLite engine before it shares it with Postroad."""

from postroad.store.dialects import configure_sqlite as configure

__all__ = ["configure"]
