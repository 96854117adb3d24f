"""bascule makes every GPU finish at the same time.

It balances variable-length work over ranks, and splits sequences that are too long for one rank, in
the training and the inference of diffusion transformers and multimodal models.

Names are resolved when they are first used: `import bascule` imports no torch.
"""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bascule.data.loader import BalancedLoader as BalancedLoader
    from bascule.data.loader import LoaderOptions as LoaderOptions
    from bascule.data.packs import Pack as Pack
    from bascule.data.samplers import BalancedSampler as BalancedSampler
    from bascule.diffusers.balanced_model import BalancedModel as BalancedModel
    from bascule.diffusers.degrees import AutoMesh as AutoMesh
    from bascule.diffusers.parallelize import parallelize as parallelize
    from bascule.diffusers.sparse_layers import SparseConfig as SparseConfig
    from bascule.encoders.encoder import BalancedEncoder as BalancedEncoder
    from bascule.encoders.tiled_vae import TiledVAE as TiledVAE
    from bascule.errors import CommError as CommError
    from bascule.errors import ConfigError as ConfigError
    from bascule.errors import PlanError as PlanError
    from bascule.machine.cluster import HardwareProfile as HardwareProfile
    from bascule.machine.costs import TransformerCost as TransformerCost
    from bascule.parallel import SequenceParallel as SequenceParallel
    from bascule.parallel import Step as Step
    from bascule.plan.limits import Limits as Limits
    from bascule.plan.masks import Span as Span
    from bascule.plan.offer import Sequences as Sequences
    from bascule.plan.plan import Plan as Plan
    from bascule.plan.plan import plan_batch as plan_batch
    from bascule.plan.topology_search import suggest_topology as suggest_topology
    from bascule.sdpa import context_parallel as context_parallel
    from bascule.sim.simulation import simulate as simulate
    from bascule.train.stepping import train_step as train_step

_NAMES = {
    "data.loader": "BalancedLoader LoaderOptions",
    "data.packs": "Pack",
    "data.samplers": "BalancedSampler",
    "diffusers.balanced_model": "BalancedModel",
    "diffusers.degrees": "AutoMesh",
    "diffusers.parallelize": "parallelize",
    "diffusers.sparse_layers": "SparseConfig",
    "encoders.encoder": "BalancedEncoder",
    "encoders.tiled_vae": "TiledVAE",
    "errors": "CommError ConfigError PlanError",
    "machine.cluster": "HardwareProfile",
    "machine.costs": "TransformerCost",
    "parallel": "SequenceParallel Step",
    "plan.limits": "Limits",
    "plan.masks": "Span",
    "plan.offer": "Sequences",
    "plan.plan": "Plan plan_batch",
    "plan.topology_search": "suggest_topology",
    "sdpa": "context_parallel",
    "sim.simulation": "simulate",
    "train.stepping": "train_step",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = [*sorted(_HOMES), "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name == "__version__":  # read late, so that a source tree works without being installed
        return importlib.metadata.version("bascule")
    if name not in _HOMES:
        raise AttributeError(f"module 'bascule' has no attribute {name!r}")
    return getattr(importlib.import_module(f"bascule.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
