"""What work costs: per sequence, on a machine, and fitted to measurements."""
