"""Known faults of ports, injected one at a time into the port; `verify` must name each."""
