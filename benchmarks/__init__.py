"""Postroad against hand-written SQL: `python -m benchmarks [--json] [--quick]`."""
