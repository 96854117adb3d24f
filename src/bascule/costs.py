"""Costs of sequences and items in seconds: the machine, the formulas, and fits to measurements."""

from bascule.plan.costs import PolynomialCost as PolynomialCost
from bascule.plan.costs import TransformerCost as TransformerCost
from bascule.plan.fits import fit_item_latency as fit_item_latency
from bascule.plan.fits import fit_iterations as fit_iterations
from bascule.plan.fits import fit_latency as fit_latency
from bascule.plan.machine import Cluster as Cluster
from bascule.plan.machine import HardwareProfile as HardwareProfile
