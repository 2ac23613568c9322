"""Contract suites: what a store must promise, for those who bring one of their own.

Subclass a suite in a test module and give it the fixtures that it names: `database`, with our tables in it,
`clock`, which is the database's, and `run`, which runs a plain function over a connection as a transaction.
"""
