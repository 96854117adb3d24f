"""`bascule bench` measures the same training without and with balancing."""
