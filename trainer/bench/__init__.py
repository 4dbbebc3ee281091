"""Measures the pipeline and its parts; see `trainer.commands.bench`."""
