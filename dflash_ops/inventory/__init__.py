"""Reads inventory.yaml and holds its models."""
