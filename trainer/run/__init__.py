"""Carries out `python -m trainer run`: the run directory, its checkpoints, metrics, signals and sd_notify."""
