"""Simulations of training on a cluster: what balancing is worth, without the machines."""

from bascule.sim.results import SimulationResult as SimulationResult
from bascule.sim.seconds import SimulationOptions as SimulationOptions
from bascule.sim.simulation import simulate as simulate
