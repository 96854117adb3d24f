"""Cost models: the cost of a sequence, of a machine's wires, and fits to measured times."""
