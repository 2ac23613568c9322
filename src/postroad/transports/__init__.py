"""Where dispatches go. Transports know no database: they get a dispatch and say what came of it, or raise."""
