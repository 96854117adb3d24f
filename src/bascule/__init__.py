"""bascule makes every GPU finish at the same time.

It balances variable-length work over ranks, and splits sequences that are too long for one rank, in
the training and the inference of diffusion transformers and multimodal models.

Names are resolved when they are first used: `import bascule` imports no torch.
"""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bascule.attention.sparse.timing import (
        measure_attention_latency as measure_attention_latency,
    )
    from bascule.data.cost_tracker import CostTracker as CostTracker
    from bascule.data.loader import BalancedLoader as BalancedLoader
    from bascule.data.loader import LoaderOptions as LoaderOptions
    from bascule.data.packs import Pack as Pack
    from bascule.data.samplers import BalancedSampler as BalancedSampler
    from bascule.data.samplers import ResumableSampler as ResumableSampler
    from bascule.data.samplers import SamplerOptions as SamplerOptions
    from bascule.encoders.encoder import BalancedEncoder as BalancedEncoder
    from bascule.encoders.tiled_vae import TiledVAE as TiledVAE
    from bascule.errors import CommError as CommError
    from bascule.errors import ConfigError as ConfigError
    from bascule.errors import PlanError as PlanError
    from bascule.integrations.diffusers.handle import parallelize as parallelize
    from bascule.integrations.diffusers.pipelines.auto_mesh import AutoMesh as AutoMesh
    from bascule.integrations.diffusers.pipelines.inference_options import (
        InferenceOptions as InferenceOptions,
    )
    from bascule.integrations.diffusers.sparse.sparse_config import SparseConfig as SparseConfig
    from bascule.integrations.diffusers.training.balanced_model import (
        BalancedModel as BalancedModel,
    )
    from bascule.integrations.sdpa.mode import sequence_parallel as sequence_parallel
    from bascule.parallel import ParallelOptions as ParallelOptions
    from bascule.parallel import SequenceParallel as SequenceParallel
    from bascule.parallel import Step as Step
    from bascule.plan.costs import PolynomialCost as PolynomialCost
    from bascule.plan.costs import TransformerCost as TransformerCost
    from bascule.plan.fits import fit_attention_latency as fit_attention_latency
    from bascule.plan.fits import fit_item_latency as fit_item_latency
    from bascule.plan.fits import fit_iterations as fit_iterations
    from bascule.plan.fits import fit_latency as fit_latency
    from bascule.plan.limits import Limits as Limits
    from bascule.plan.machine import AttentionLatency as AttentionLatency
    from bascule.plan.machine import Cluster as Cluster
    from bascule.plan.machine import HardwareProfile as HardwareProfile
    from bascule.plan.plan import Plan as Plan
    from bascule.plan.plan import plan_batch as plan_batch
    from bascule.plan.sequences import Sequences as Sequences
    from bascule.plan.sequences import Span as Span
    from bascule.plan.solver.solve import Assignment as Assignment
    from bascule.plan.solver.solve import assign as assign
    from bascule.plan.sparse import partition_blocks as partition_blocks
    from bascule.plan.sparse import partition_heads as partition_heads
    from bascule.plan.sparse import sparse_imbalance as sparse_imbalance
    from bascule.plan.sparse.choose import Strategies as Strategies
    from bascule.plan.step import plan_step as plan_step
    from bascule.plan.step import step_makespan as step_makespan
    from bascule.plan.topology import Topology as Topology
    from bascule.plan.topology_search import TopologyRanking as TopologyRanking
    from bascule.plan.topology_search import suggest_topology as suggest_topology
    from bascule.sim.seconds import SimulationOptions as SimulationOptions
    from bascule.sim.simulation import SimulationResult as SimulationResult
    from bascule.sim.simulation import simulate as simulate
    from bascule.training.stepping import train_step as train_step

_HOMES = {
    "Assignment": "bascule.plan.solver.solve",
    "AttentionLatency": "bascule.plan.machine",
    "AutoMesh": "bascule.integrations.diffusers.pipelines.auto_mesh",
    "BalancedEncoder": "bascule.encoders.encoder",
    "TiledVAE": "bascule.encoders.tiled_vae",
    "BalancedLoader": "bascule.data.loader",
    "BalancedModel": "bascule.integrations.diffusers.training.balanced_model",
    "BalancedSampler": "bascule.data.samplers",
    "Cluster": "bascule.plan.machine",
    "CommError": "bascule.errors",
    "ConfigError": "bascule.errors",
    "CostTracker": "bascule.data.cost_tracker",
    "HardwareProfile": "bascule.plan.machine",
    "InferenceOptions": "bascule.integrations.diffusers.pipelines.inference_options",
    "Limits": "bascule.plan.limits",
    "LoaderOptions": "bascule.data.loader",
    "Pack": "bascule.data.packs",
    "ParallelOptions": "bascule.parallel",
    "Plan": "bascule.plan.plan",
    "PlanError": "bascule.errors",
    "PolynomialCost": "bascule.plan.costs",
    "ResumableSampler": "bascule.data.samplers",
    "SamplerOptions": "bascule.data.samplers",
    "SequenceParallel": "bascule.parallel",
    "Sequences": "bascule.plan.sequences",
    "SimulationOptions": "bascule.sim.seconds",
    "SimulationResult": "bascule.sim.simulation",
    "Span": "bascule.plan.sequences",
    "SparseConfig": "bascule.integrations.diffusers.sparse.sparse_config",
    "Step": "bascule.parallel",
    "Strategies": "bascule.plan.sparse.choose",
    "Topology": "bascule.plan.topology",
    "TopologyRanking": "bascule.plan.topology_search",
    "TransformerCost": "bascule.plan.costs",
    "assign": "bascule.plan.solver.solve",
    "fit_attention_latency": "bascule.plan.fits",
    "fit_iterations": "bascule.plan.fits",
    "fit_item_latency": "bascule.plan.fits",
    "fit_latency": "bascule.plan.fits",
    "measure_attention_latency": "bascule.attention.sparse.timing",
    "parallelize": "bascule.integrations.diffusers.handle",
    "partition_blocks": "bascule.plan.sparse",
    "partition_heads": "bascule.plan.sparse",
    "plan_batch": "bascule.plan.plan",
    "plan_step": "bascule.plan.step",
    "sequence_parallel": "bascule.integrations.sdpa.mode",
    "simulate": "bascule.sim.simulation",
    "sparse_imbalance": "bascule.plan.sparse",
    "step_makespan": "bascule.plan.step",
    "suggest_topology": "bascule.plan.topology_search",
    "train_step": "bascule.training.stepping",
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
