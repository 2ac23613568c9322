"""The plans of hot queries, on both databases."""
