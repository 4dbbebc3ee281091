"""Trains the drafter: the pieces of an optimizer step, its loss and its update rule."""
