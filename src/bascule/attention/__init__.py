"""Attend: kernels, and the rings and all-to-alls that make one attention of many ranks."""

from bascule.attention.kernels.packed_kernels import PackedSequences as PackedSequences
from bascule.attention.kernels.packed_kernels import select_kernel as select_kernel
