"""Faults that real ports had, injected one at a time into the port; the verifier must name each."""
