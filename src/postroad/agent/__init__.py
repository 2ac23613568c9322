"""What agents need on top of the engine."""
