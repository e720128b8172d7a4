"""Generated stubs of the wire contract (proto/headrace/v1); regenerate with `make proto`."""
