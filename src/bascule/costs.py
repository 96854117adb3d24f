"""Costs of sequences and items in seconds: the machine, the formulas, and fits to measurements."""

from bascule.machine.cluster import Cluster as Cluster
from bascule.machine.cluster import HardwareProfile as HardwareProfile
from bascule.machine.costs import PolynomialCost as PolynomialCost
from bascule.machine.costs import TransformerCost as TransformerCost
from bascule.machine.fits import fit_item_latency as fit_item_latency
from bascule.machine.fits import fit_iterations as fit_iterations
from bascule.machine.fits import fit_latency as fit_latency
