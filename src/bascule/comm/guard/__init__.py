"""Keeps ranks together: calls are numbered, failures known to all, endless waits ended."""
