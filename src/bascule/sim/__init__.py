"""What balancing is worth, computed without the machines."""
