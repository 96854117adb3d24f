"""Simulations of training on a cluster: what balancing is worth, without the machines."""
