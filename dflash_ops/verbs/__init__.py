"""Holds one file per command of `dflash`, of its name."""
