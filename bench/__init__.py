"""Measurements: v4tool beside a straightforward port and the machine's limits. Run `python -m
bench`.
"""
