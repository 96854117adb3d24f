"""Puts items with costs into bins with speeds and limits: by `assign`, or `solve` for plans."""

from bascule.plan.solver.problem import Assignment as Assignment
from bascule.plan.solver.solve import assign as assign
