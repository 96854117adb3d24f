"""Predict the time of work on a machine: rates, links, cost models, and fits to measurements."""
