"""Connects the drafters of a run, in one process or in several."""
