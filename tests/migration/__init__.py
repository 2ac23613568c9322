"""The ladder of the schema."""
