"""Describes a run: its records, what its probes say, and the verdict that follows."""
