"""bascule makes every GPU finish at the same time.

It balances variable-length work over ranks, and splits sequences that are too long for one rank, in
the training and the inference of diffusion transformers and multimodal models.

Names are resolved when they are first used: `import bascule` imports no torch.
"""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bascule.attention.parallel import SequenceParallel as SequenceParallel
    from bascule.attention.parallel import Step as Step
    from bascule.attention.sparse_timing import (
        measure_attention_latency as measure_attention_latency,
    )
    from bascule.data.loader import BalancedLoader as BalancedLoader
    from bascule.data.packs import Pack as Pack
    from bascule.data.source import ResumableSampler as ResumableSampler
    from bascule.errors import CommError as CommError
    from bascule.errors import ConfigError as ConfigError
    from bascule.errors import PlanError as PlanError
    from bascule.inference.handle import parallelize as parallelize
    from bascule.inference.mode import sequence_parallel as sequence_parallel
    from bascule.inference.sparse_config import SparseConfig as SparseConfig
    from bascule.plan.cluster import Cluster as Cluster
    from bascule.plan.cost import PolynomialCost as PolynomialCost
    from bascule.plan.cost import TransformerCost as TransformerCost
    from bascule.plan.fit import fit_latency as fit_latency
    from bascule.plan.fit_iterations import fit_iterations as fit_iterations
    from bascule.plan.limits import Limits as Limits
    from bascule.plan.search import TopologyRanking as TopologyRanking
    from bascule.plan.search import suggest_topology as suggest_topology
    from bascule.plan.sequences import Plan as Plan
    from bascule.plan.sequences import plan_batch as plan_batch
    from bascule.plan.solver import Assignment as Assignment
    from bascule.plan.solver import assign as assign
    from bascule.plan.sparse import partition_blocks as partition_blocks
    from bascule.plan.sparse import partition_heads as partition_heads
    from bascule.plan.sparse import sparse_imbalance as sparse_imbalance
    from bascule.plan.sparse_latency import AttentionLatency as AttentionLatency
    from bascule.plan.sparse_latency import fit_attention_latency as fit_attention_latency
    from bascule.plan.sparse_strategy import Strategies as Strategies
    from bascule.plan.step import plan_step as plan_step
    from bascule.plan.step import step_makespan as step_makespan
    from bascule.plan.topology import Topology as Topology
    from bascule.training.cost_tracker import CostTracker as CostTracker

_HOMES = {
    "Assignment": "bascule.plan.solver",
    "AttentionLatency": "bascule.plan.sparse_latency",
    "BalancedLoader": "bascule.data.loader",
    "Cluster": "bascule.plan.cluster",
    "CommError": "bascule.errors",
    "ConfigError": "bascule.errors",
    "CostTracker": "bascule.training.cost_tracker",
    "Limits": "bascule.plan.limits",
    "Pack": "bascule.data.packs",
    "Plan": "bascule.plan.sequences",
    "PlanError": "bascule.errors",
    "PolynomialCost": "bascule.plan.cost",
    "ResumableSampler": "bascule.data.source",
    "SequenceParallel": "bascule.attention.parallel",
    "SparseConfig": "bascule.inference.sparse_config",
    "Step": "bascule.attention.parallel",
    "Strategies": "bascule.plan.sparse_strategy",
    "Topology": "bascule.plan.topology",
    "TopologyRanking": "bascule.plan.search",
    "TransformerCost": "bascule.plan.cost",
    "assign": "bascule.plan.solver",
    "fit_attention_latency": "bascule.plan.sparse_latency",
    "fit_iterations": "bascule.plan.fit_iterations",
    "fit_latency": "bascule.plan.fit",
    "measure_attention_latency": "bascule.attention.sparse_timing",
    "parallelize": "bascule.inference.handle",
    "partition_blocks": "bascule.plan.sparse",
    "partition_heads": "bascule.plan.sparse",
    "plan_batch": "bascule.plan.sequences",
    "plan_step": "bascule.plan.step",
    "sequence_parallel": "bascule.inference.mode",
    "sparse_imbalance": "bascule.plan.sparse",
    "step_makespan": "bascule.plan.step",
    "suggest_topology": "bascule.plan.search",
}

__all__ = [*sorted(_HOMES), "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name == "__version__":  # read late, so that a source tree works without being installed
        return importlib.metadata.version("bascule")
    if name not in _HOMES:
        raise AttributeError(f"module 'bascule' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
