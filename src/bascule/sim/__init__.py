"""Simulate training and serving on a cluster, to predict the gain of balancing without machines."""

from bascule.sim.results import SimulationResult as SimulationResult
from bascule.sim.seconds import SimulationOptions as SimulationOptions
from bascule.sim.simulation import simulate as simulate
