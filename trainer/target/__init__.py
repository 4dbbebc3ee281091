"""Runs the frozen target and hands out its features."""
