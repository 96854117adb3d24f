"""Samples and items on their way between ranks: as bytes, nested at will, with their gradients."""
