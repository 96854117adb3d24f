"""Small studies of block-sparse attention."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from bascule.machine.cluster import AttentionLatency, AttentionLoad
from bascule.sim.sparse_study import Mesh, Setting
from bascule.workload.masks import WAN21, synthetic_masks

Bools = NDArray[np.bool_]

LATENCY = AttentionLatency(1e-5, 1e-9, 2e-5, 3e-9, 1e-8, 5e-6)

DEAR_ROUNDS = AttentionLatency(0.0, 0.0, 0.0, 0.0, 0.0, 1.0)

HEAD_DIM, ITEMSIZE, TOLERANCE = 16, 2, 0.05

TARGET = 1.1  # few blocks cannot be much more even, and the search for it takes long


def drifting(num_steps: int) -> list[Bools]:
    model = replace(WAN21, grid=(4, 6, 8), num_heads=6, block=8, step_drift=0.15)
    return [synthetic_masks(model, step=step) for step in range(num_steps)]


def setting_of(masks: Bools, *meshes: Mesh, latency: AttentionLatency = LATENCY) -> Setting:
    q_lens, kv_lens = (np.full(size, 8) for size in masks.shape[1:])
    return Setting(meshes, q_lens, kv_lens, latency, HEAD_DIM, ITEMSIZE, TARGET, 2.0, TOLERANCE)


def even_load(
    degrees: Mesh,
    *,
    seq_len: int,
    num_heads: int,
    head_dim: int,
    density: float = 1.0,
    imbalance: float = 1.0,
    bytes_per_value: int = 2,
) -> AttentionLoad:
    """One sequence whose tokens and heads are shared evenly, in query-key pairs."""
    ulysses, ring = degrees
    share = seq_len * num_heads / (ulysses * ring)  # rows of a rank
    row_bytes = head_dim * bytes_per_value
    return AttentionLoad(
        ulysses,
        ring,
        imbalance * density * share * seq_len,
        4.0 * share * row_bytes * (ulysses - 1) / ulysses,
        2.0 * share * row_bytes if ring > 1 else 0.0,
        4.0 * share * row_bytes,
    )
