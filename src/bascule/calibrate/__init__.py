"""`bascule calibrate`: what blocks, wires and the host take on this machine, as a profile."""
