"""Time the block-sparse kernel for CPUs over its share of dense attention."""

import math
from typing import Any

import numpy as np
import torch
from measuring import ratio, summary, time_interleaved, verdict
from torch import Tensor

from bascule.attention.kernels.protocol import Attended
from bascule.attention.kernels.registry import CpuFlashKernel
from bascule.attention.kernels.skipping import CpuLoopKernel
from bascule.attention.mask import EVERYTHING, AttentionMask, BlockRows

NUM_HEADS, NUM_TOKENS, HEAD_DIM = 4, 8192, 64
SCALE = HEAD_DIM**-0.5
DENSITIES = (1 / 8, 1 / 4, 0.41, 0.68)
TARGET = 1.25
TARGET_AT = ("forward", "float32", 128)
CASES = [
    (torch.float32, 128),
    (torch.float32, 64),
    (torch.bfloat16, 128),
]
LARGEST_ERROR = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def sparse_kernel(*, quick: bool = False) -> dict[str, Any]:
    """Time the block-sparse kernel for CPUs over its share of dense attention.

    Ten minutes. 4 heads of 8192 tokens and width 64, one thread. Blocks are seen at random, the
    worst case for a kernel that gathers keys. A ratio is seconds / (density x seconds of torch's
    dense attention) of a round. Outputs are compared with dense masked attention of one head in
    float64. Target: 1.25, forward, float32, blocks of 128.
    """
    torch.set_num_threads(1)
    cases: list[dict[str, Any]] = []
    for dtype, block in CASES[:1] if quick else CASES:
        for density in DENSITIES:
            cases += _measure(dtype, block, density, rounds=3 if quick else 7)
    shape = {"num_heads": NUM_HEADS, "num_tokens": NUM_TOKENS, "head_dim": HEAD_DIM}
    return {**shape, "target": TARGET, "target_at": TARGET_AT, "cases": cases}


def _measure(dtype: torch.dtype, block: int, density: float, rounds: int) -> list[dict[str, Any]]:
    """Forward and backward of one mask."""
    mask = np.random.default_rng(0).random((NUM_HEADS, *(NUM_TOKENS // block,) * 2)) < density
    seen, share = AttentionMask(blocks=rows_of(mask, block)), float(mask.mean())
    generator = torch.Generator().manual_seed(0)
    shape = (1, NUM_HEADS, NUM_TOKENS, HEAD_DIM)
    heads = [torch.randn(shape, generator=generator).to(dtype) for _ in range(4)]
    rows = [x.view(1, 1, -1, HEAD_DIM) for x in heads]
    (q, k, v, grad), (q_rows, k_rows, v_rows, grad_rows) = heads, rows
    dense, sparse = CpuFlashKernel(), CpuLoopKernel()
    whole = dense.forward(q, k, v, EVERYTHING, SCALE)
    part = sparse.forward(q_rows, k_rows, v_rows, seen, SCALE)
    check(part[0].view(shape)[0, -1], [x[0, -1] for x in heads[:3]], mask[-1], block)
    calls = {
        "forward": {
            "dense": lambda: dense.forward(q, k, v, EVERYTHING, SCALE),
            "sparse": lambda: sparse.forward(q_rows, k_rows, v_rows, seen, SCALE),
        },
        "backward": {
            "dense": lambda: dense.backward(grad, Attended(q, k, v, *whole, EVERYTHING, SCALE)),
            "sparse": lambda: sparse.backward(
                grad_rows, Attended(q_rows, k_rows, v_rows, *part, seen, SCALE)
            ),
        },
    }
    name, results = str(dtype).removeprefix("torch."), []
    for direction, candidates in calls.items():
        times = time_interleaved(candidates, rounds=rounds)
        expected = [share * seconds for seconds in times["dense"]]
        spread = ratio(times["sparse"], expected)
        label = f"{direction}, {name}, blocks of {block}, density {share:.3f}"
        is_targeted = (direction, name, block) == TARGET_AT
        print(verdict(label, spread["median"], TARGET if is_targeted else math.inf, spread))
        results.append(
            {
                "direction": direction,
                "dtype": name,
                "block": block,
                "density": share,
                "over_density_times_dense": spread,
                "times": {name: summary(seconds) for name, seconds in times.items()},
            }
        )
    return results


def rows_of(mask: np.ndarray, block: int) -> BlockRows:
    """The rows of all heads' masks, (heads, blocks, blocks)."""
    num_heads, num_blocks, _ = mask.shape
    head, row, column = mask.nonzero()
    bounds = np.arange(num_heads * num_blocks + 1) * block
    counts = np.bincount(head * num_blocks + row, minlength=num_heads * num_blocks)
    row_bounds = np.concatenate([[0], np.cumsum(counts)])
    return BlockRows(bounds, bounds, row_bounds, head * num_blocks + column)


def check(
    out: Tensor, tensors: list[Tensor], mask: np.ndarray, block: int, scale: float = SCALE
) -> None:
    """Compare (S, D) output of the first queries of a head with dense masked attention."""
    q, k, v = (x.double() for x in tensors)
    num_rows = min(4, mask.shape[0])
    is_seen = torch.from_numpy(mask[:num_rows].repeat(block, axis=0).repeat(block, axis=1))
    scores = (q[: num_rows * block] @ k.T * scale).masked_fill(~is_seen, -math.inf)
    expected = scores.softmax(-1) @ v
    error = float((out[: num_rows * block].double() - expected).norm() / expected.norm())
    assert error < LARGEST_ERROR[out.dtype], f"off by {error}"
