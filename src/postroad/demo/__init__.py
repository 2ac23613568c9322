"""The freight agent, its misbehaving services, and the demo that runs them as real processes."""
