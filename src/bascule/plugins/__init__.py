"""Adapters that switch balancing on in other trainers by arguments only; one file per trainer."""
