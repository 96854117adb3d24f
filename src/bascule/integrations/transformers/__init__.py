"""Balanced training with the Trainer of transformers."""
