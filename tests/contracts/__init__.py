"""The contract suites that the package ships, run over both databases and every way to run a transaction."""
