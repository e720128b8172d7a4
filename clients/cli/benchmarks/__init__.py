"""One file a benchmark; `headrace.clients.cli.bench` has the table."""
