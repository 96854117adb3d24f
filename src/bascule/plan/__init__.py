"""Decide: pure planning on numpy and scipy. Nothing here imports torch."""

from bascule.plan.limits import Limits as Limits
from bascule.plan.plan import Plan as Plan
from bascule.plan.plan import plan_batch as plan_batch
from bascule.plan.sequences import Sequences as Sequences
from bascule.plan.sequences import Span as Span
from bascule.plan.solver.solve import Assignment as Assignment
from bascule.plan.solver.solve import assign as assign
from bascule.plan.step import plan_step as plan_step
from bascule.plan.step import step_makespan as step_makespan
from bascule.plan.topology import Topology as Topology
from bascule.plan.topology_search import TopologyRanking as TopologyRanking
from bascule.plan.topology_search import suggest_topology as suggest_topology
