"""Plan which ranks compute what, with numpy and scipy only. Nothing here imports torch.

Names are imported at their first use, so that a command that shows its help loads no solver.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bascule.plan.limits import Limits as Limits
    from bascule.plan.masks import Span as Span
    from bascule.plan.offer import Sequences as Sequences
    from bascule.plan.plan import Plan as Plan
    from bascule.plan.plan import plan_batch as plan_batch
    from bascule.plan.plan import plan_step as plan_step
    from bascule.plan.plan import step_makespan as step_makespan
    from bascule.plan.solver.problem import Assignment as Assignment
    from bascule.plan.solver.solve import assign as assign
    from bascule.plan.topology import Topology as Topology
    from bascule.plan.topology_search import TopologyRanking as TopologyRanking
    from bascule.plan.topology_search import suggest_topology as suggest_topology

_NAMES = {
    "limits": ("Limits",),
    "plan": ("Plan", "plan_batch", "plan_step", "step_makespan"),
    "masks": ("Span",),
    "offer": ("Sequences",),
    "solver.problem": ("Assignment",),
    "solver.solve": ("assign",),
    "topology": ("Topology",),
    "topology_search": ("TopologyRanking", "suggest_topology"),
}


def __getattr__(name: str) -> object:
    for module, names in _NAMES.items():
        if name in names:
            return getattr(importlib.import_module(f"bascule.plan.{module}"), name)
    raise AttributeError(f"module 'bascule.plan' has no attribute {name!r}")
