"""One file per command of `dflash`, of its name."""
