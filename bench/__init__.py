"""Benchmarks: v4tool, a straightforward port and the machine's limits (`python -m bench`)."""
