"""Postroad beside other Postgres queues: `make bench-peers`, in an environment of its own."""
