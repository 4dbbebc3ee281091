"""Trains one drafter on many devices in one process, with one thread per device; start at `supervisor.py`."""
