"""Kernels compute attention on one device, or say why they cannot."""
