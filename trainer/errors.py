"""Holds the exception by which threads learn that their run is ending."""

from __future__ import annotations


class Closed(Exception):
    """A ring or a barrier was closed while, or before, somebody used it: the run is ending."""
