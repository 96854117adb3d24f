"""Keeps ranks together: calls are numbered and marked, failures told, endless waits ended."""
