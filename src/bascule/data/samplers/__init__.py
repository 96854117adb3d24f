"""Samplers for plain DataLoaders: which indices a rank reads. Nothing moves between ranks."""
