"""Prints the answers; decides nothing."""
