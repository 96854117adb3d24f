"""Assign items with costs to bins with speeds and limits: `assign`, or `solve` for plans."""

from bascule.plan.solver.problem import Assignment as Assignment
from bascule.plan.solver.solve import assign as assign
