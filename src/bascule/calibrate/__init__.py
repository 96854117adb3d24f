"""`bascule calibrate`: time blocks, links and the host on this machine, and make a profile."""
