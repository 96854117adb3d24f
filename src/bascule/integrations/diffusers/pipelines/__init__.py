"""Whole pipelines over ranks: guidance, replicas, one noise, VAE and text encoders."""
