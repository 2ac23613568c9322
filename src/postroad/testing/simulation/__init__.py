"""The whole runtime in one thread, with virtual time and seeded entropy, amid crashes: invariants must hold.

`python -m postroad.testing.simulation --seeds 100` plays seeds 0 to 99; `--seed 17` plays one and tells it.
"""
