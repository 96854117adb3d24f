"""Training: the measured comparison of steps without and with balancing."""
