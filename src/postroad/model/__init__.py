"""What things are: pure values and rules. Nothing here knows a database, a clock or a network."""
