"""Runs inside the container: Python 3.8 and its standard library, shipped over stdin at each call."""
