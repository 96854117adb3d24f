"""Puts items with costs into bins with speeds and limits: `assign`, the one solver."""

from bascule.plan.solver.problem import Assignment as Assignment
from bascule.plan.solver.solve import assign as assign
