"""Draws the report of runs: data in, one HTML page out; reads no file and connects to nothing."""
