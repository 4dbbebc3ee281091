"""Brings a program and its stdin into the container, and frames back."""
