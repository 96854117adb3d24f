"""Attend: kernels, and the rings and all-to-alls that make one attention of many ranks."""

from bascule.attention.api import AttentionMesh as AttentionMesh
from bascule.attention.api import AttentionOptions as AttentionOptions
from bascule.attention.api import SequenceLayout as SequenceLayout
from bascule.attention.api import attention as attention
from bascule.attention.api import gather as gather
from bascule.attention.api import split as split
from bascule.attention.kernels.registry import FunctionKernel as FunctionKernel
from bascule.attention.kernels.registry import select_kernel as select_kernel
from bascule.attention.mask import AttentionMask as AttentionMask
from bascule.attention.mask import PackedSequences as PackedSequences
from bascule.attention.mask import Scores as Scores
from bascule.attention.packed import attend_packed as attend_packed
