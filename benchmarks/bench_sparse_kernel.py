"""The block-sparse kernel for CPUs against its share of dense attention.

Run: `python benchmarks/bench_sparse_kernel.py` (about ten minutes; `--quick`: fewer rounds, writes
nothing); writes results/sparse_kernel.json.

4 heads of 8192 tokens and width 64, one thread. Blocks of each head are seen at random, which is
the worst case for a kernel that gathers keys: no two query blocks see the same, and few key blocks
lie next to each other. Dense attention is torch's own operator on the same tokens. Both take turns
in one process, and a ratio is that of a round: seconds / (density x seconds of dense attention).

Outputs are compared with dense masked attention of one head in float64.

Target: at most 1.25 times density x dense, forward, float32, blocks of 128.
"""

import argparse
import math
import os
from typing import Any

import numpy as np
import torch
from _common import ratio, summary, time_interleaved, verdict, write_results
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


def main() -> None:
    """Measure, print the verdicts, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds; writes nothing")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    load_before = os.getloadavg()
    results: list[dict[str, Any]] = []
    for dtype, block in CASES[:1] if quick else CASES:
        for density in DENSITIES:
            results += measure(dtype, block, density, rounds=3 if quick else 7)
    load = {"load_average_before": load_before, "load_average_after": os.getloadavg()}
    print("load averages before and after:", *load.values())
    if not quick:
        shape = {"num_heads": NUM_HEADS, "num_tokens": NUM_TOKENS, "head_dim": HEAD_DIM}
        found = {**load, **shape, "target": TARGET, "target_at": TARGET_AT, "cases": results}
        print("written to", write_results("sparse_kernel", found))


def measure(dtype: torch.dtype, block: int, density: float, rounds: int) -> list[dict[str, Any]]:
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
        if (direction, name, block) == TARGET_AT:
            print(verdict(label, spread["median"], TARGET, spread))
        else:
            print(said(label, spread))
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


def said(label: str, spread: dict[str, float]) -> str:
    """One line for the terminal, of what has no target."""
    quartiles = f"{spread['lower_quartile']:.2f} to {spread['upper_quartile']:.2f}"
    return f"        {label}: {spread['median']:.2f}x (quartiles {quartiles})"


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
    want = scores.softmax(-1) @ v
    error = float((out[: num_rows * block].double() - want).norm() / want.norm())
    assert error < LARGEST_ERROR[out.dtype], f"off by {error}"


if __name__ == "__main__":
    main()
