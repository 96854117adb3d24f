"""Adapters that switch balancing on in other trainers by arguments alone; one file a trainer."""
