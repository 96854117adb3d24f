"""Adapters that switch balancing on inside other trainers, by their arguments. One file a host."""
