"""Holds one module for each command of `python -m trainer` beside `run` and `config`."""
