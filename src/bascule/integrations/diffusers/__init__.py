"""Sequence parallelism for unmodified models: split them over ranks, verify, undo."""

from bascule.integrations.diffusers.handle import Parallelized as Parallelized
from bascule.integrations.diffusers.handle import parallelize as parallelize
from bascule.integrations.diffusers.pipelines.auto_mesh import AutoMesh as AutoMesh
from bascule.integrations.diffusers.pipelines.inference_options import (
    InferenceOptions as InferenceOptions,
)
from bascule.integrations.diffusers.sparse.layers import SparseLayer as SparseLayer
from bascule.integrations.diffusers.sparse.sparse_config import SparseConfig as SparseConfig
from bascule.integrations.diffusers.tables.split_table import Cut as Cut
from bascule.integrations.diffusers.tables.split_table import Keys as Keys
from bascule.integrations.diffusers.tables.split_table import Mask as Mask
from bascule.integrations.diffusers.tables.split_table import SplitTable as SplitTable
from bascule.integrations.diffusers.training.balanced_model import BalancedModel as BalancedModel
from bascule.integrations.diffusers.verify import Verification as Verification
from bascule.integrations.sdpa.mode import sequence_parallel as sequence_parallel
