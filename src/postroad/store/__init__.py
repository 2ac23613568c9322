"""What is durable: plain functions over a connection. They never commit, wait, log or read a clock."""
