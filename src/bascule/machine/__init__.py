"""What work takes on a machine: rates, wires, formulas of costs, and their fits to measurements."""
