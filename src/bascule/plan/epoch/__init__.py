"""Who trains which sample of an epoch, where all lengths are known: each step dealt evenly."""
