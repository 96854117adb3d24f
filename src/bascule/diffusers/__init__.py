"""Sequence parallelism for unmodified models: split them over ranks, verify, undo."""

from bascule.diffusers.backends import backend_kernel as backend_kernel
from bascule.diffusers.balanced_model import BalancedModel as BalancedModel
from bascule.diffusers.degrees import AutoMesh as AutoMesh
from bascule.diffusers.flux_weights import config_from_diffusers as config_from_diffusers
from bascule.diffusers.flux_weights import weights_from_diffusers as weights_from_diffusers
from bascule.diffusers.flux_weights import weights_to_diffusers as weights_to_diffusers
from bascule.diffusers.parallelize import ParallelHandle as ParallelHandle
from bascule.diffusers.parallelize import parallelize as parallelize
from bascule.diffusers.sparse_layers import SparseConfig as SparseConfig
from bascule.diffusers.sparse_layers import SparseLayer as SparseLayer
from bascule.diffusers.split_table import Cut as Cut
from bascule.diffusers.split_table import Keys as Keys
from bascule.diffusers.split_table import Mask as Mask
from bascule.diffusers.split_table import SplitTable as SplitTable
from bascule.diffusers.verify import Verification as Verification
from bascule.sdpa import context_parallel as context_parallel
