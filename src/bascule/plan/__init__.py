"""Decide: pure planning on numpy and scipy. Nothing here imports torch."""
