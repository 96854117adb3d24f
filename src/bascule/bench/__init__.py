"""`bascule bench`: the same training twice, without and with balancing, measured."""
