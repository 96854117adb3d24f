"""Every block split over all ranks, as BurstEngine does, against whole blocks placed by a plan.

Run: `python benchmarks/bench_sparse_split.py` (about two minutes; `--quick`: half a minute or less,
fewer rounds of a smaller video, writes nothing); writes results/sparse_split.json.

Split over a ring of N ranks, each has b / N tokens of every block of b: even whatever the mask, but
the tiles of the kernel have b / N queries and, in each round of the ring, b / N keys. A plan of
whole blocks in the same ring is nearly even. Synthetic masks of a small Wan2.1 grid at density
0.41, 8 heads of width 64, float32, one thread.

There are no ranks here: one process computes what a rank would, round by round; of the plan that
with the most work, of the split any, since all are alike. Both take turns. Divided by their work,
in pairs of tokens, the times give the slowdown of the kernel; times rho and the mean work, those of
attention. Left out are the exchanges in the ring and the merge of rounds, which hardly differ, and
what the plan moves before and after. Rho is also given for the masks of Wan2.1 at its own size,
whose ranks have more blocks to choose from; split, it is 1 at any size. Outputs are compared with
dense masked attention.

The kernel is that for CPUs. db-SP has one number for its GPUs: in tiles of 32, which is 256 over 8
ranks, the kernel takes 1.25x as long as in tiles of 64.

Target: attention by the plan takes at most as long as split.
"""

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from _common import ratio, summary, time_interleaved, verdict, write_results
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bascule.arrays import cumulative, ranges
from bascule.attention.kernels.protocol import merge
from bascule.attention.kernels.skipping import CpuLoopKernel
from bascule.attention.mask import AttentionMask, BlockRows
from bascule.plan.sparse import (
    BlockLayout,
    PackedRows,
    SparsePlan,
    SparsePlanner,
    in_order,
    plan_under,
)
from bascule.workload.masks import WAN21, MaskModel, synthetic_masks

Bools = NDArray[np.bool_]

BLOCKS = (64, 128, 256)
RING_DEGREES = (2, 4, 8)
GRID, QUICK_GRID = (8, 32, 32), (4, 32, 32)
NUM_HEADS, HEAD_DIM = 8, 64
SCALE = HEAD_DIM**-0.5
TARGET, LARGEST_ERROR = 1.0, 1e-5
KERNEL = CpuLoopKernel()


@dataclass(frozen=True, slots=True)
class Rank:
    """What one rank computes.

    Attributes:
        work: Pairs of tokens.
        tokens: (S,) its queries, among those of all heads.
        queries: (1, 1, S, D).
        rounds: Keys, values and the blocks that are seen of them, of each round.
    """

    work: float
    tokens: Tensor
    queries: Tensor
    rounds: list[tuple[Tensor, Tensor, AttentionMask]]

    def attend(self) -> list[tuple[Tensor, Tensor]]:
        """Out and LSE of each round."""
        return [KERNEL.forward(self.queries, *part, SCALE) for part in self.rounds]


def main() -> None:
    """Measure, print the verdicts, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds; writes nothing")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    load_before = os.getloadavg()
    model = replace(WAN21, grid=QUICK_GRID if quick else GRID, num_heads=NUM_HEADS)
    cases: list[dict[str, Any]] = []
    for block in BLOCKS:
        for case in measure(replace(model, block=block), rounds=3 if quick else 15):
            print(said(case))
            cases.append(case)
    if not quick:
        load = {"load_average_before": load_before, "load_average_after": os.getloadavg()}
        shape = {"grid": GRID, "num_heads": NUM_HEADS, "head_dim": HEAD_DIM}
        path = write_results("sparse_split", {**load, **shape, "target": TARGET, "cases": cases})
        print("written to", path)


def measure(model: MaskModel, rounds: int) -> Iterator[dict[str, Any]]:
    """All numbers of ranks with blocks of one size."""
    wan21 = replace(WAN21, block=model.block)
    masks, wan21_masks = synthetic_masks(model), synthetic_masks(wan21)
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_HEADS, int(model.block_lens.sum()), HEAD_DIM)
    inputs = [torch.randn(shape, generator=generator) for _ in range(3)]
    expected = dense(inputs, masks, model.block).flatten(0, 1)
    for ring in RING_DEGREES:
        plans = {**whole_blocks(model, masks, ring), "split": split_blocks(model, masks, ring)}
        ranks = {
            "plan": slowest_rank(plans["plan"], masks, inputs),
            "split": slowest_rank(plans["split"], cut(masks, ring), inputs),
        }
        error = max(error_of(rank, expected) for rank in ranks.values())
        assert error < LARGEST_ERROR
        seconds = time_interleaved({n: rank.attend for n, rank in ranks.items()}, rounds=rounds)
        per_work = {n: [time / ranks[n].work for time in seconds[n]] for n in ranks}
        rho = {n: plan.imbalance for n, plan in plans.items()}
        full = {n: plan.imbalance for n, plan in whole_blocks(wan21, wan21_masks, ring).items()}
        yield {
            "block": model.block,
            "ranks": ring,
            "density": float(masks.mean()),
            "kernel_s": {n: summary(times) for n, times in seconds.items()},
            "work": {n: rank.work for n, rank in ranks.items()},
            "kernel_slowdown": ratio(per_work["split"], per_work["plan"]),
            "rho": rho,
            "rho_wan21": {**full, "split": 1.0},
            "plan_over_split": over_split(per_work, rho["plan"] / rho["split"]),
            "plan_over_split_wan21": over_split(per_work, full["plan"]),
            "in_order_over_split_wan21": over_split(per_work, full["in order"]),
            "error": error,
        }


def whole_blocks(model: MaskModel, masks: Bools, ring: int) -> dict[str, SparsePlan]:
    """Runs of blocks as they come, and the fewest moves that even out dealt ones."""
    runs = BlockLayout.contiguous(model.block_lens, 1, ring)
    dealt = BlockLayout.striped(model.block_lens, 1, ring)
    return {
        "in order": under(in_order(len(masks), runs, runs, 1, ring), masks),
        "plan": SparsePlanner(1, ring).plan(masks, dealt),
    }


def split_blocks(model: MaskModel, masks: Bools, ring: int) -> SparsePlan:
    """Every block in N parts, dealt in turns: each rank has one of each block."""
    lens, left = np.divmod(model.block_lens.repeat(ring), ring)
    assert not left.any()
    parts = BlockLayout.striped(lens, 1, ring)
    return under(in_order(len(masks), parts, parts, 1, ring), cut(masks, ring))


def cut(masks: Bools, ring: int) -> Bools:
    """The masks of the parts: they see what their blocks see."""
    return masks.repeat(ring, axis=1).repeat(ring, axis=2)


def under(plan: SparsePlan, masks: Bools) -> SparsePlan:
    """A plan with the work of these masks."""
    return plan_under(plan, masks)


def slowest_rank(plan: SparsePlan, masks: Bools, inputs: Sequence[Tensor]) -> Rank:
    """The rank with the most work, and what it computes, from (H, T, D) inputs."""
    number = int(plan.loads.argmax())
    starts, num_tokens = cumulative(plan.q.lens), inputs[0].shape[1]

    def tokens(rows: PackedRows) -> Tensor:
        return torch.from_numpy(ranges(rows.heads * num_tokens + starts[rows.blocks], rows.lens))

    q, k, v = (x.flatten(0, 1) for x in inputs)
    own = plan.q_rows(number)
    rounds: list[tuple[Tensor, Tensor, AttentionMask]] = []
    for keys in map(plan.kv_rows, plan.owners(number)):
        at = tokens(keys)
        rounds.append((k[at][None, None], v[at][None, None], seen_of(masks, own, keys)))
    at = tokens(own)
    return Rank(float(plan.loads[number]), at, q[at][None, None], rounds)


def seen_of(masks: Bools, rows: PackedRows, keys: PackedRows) -> AttentionMask:
    """What the queries of a rank see of the keys of a round."""
    is_seen = masks[rows.heads[:, None], rows.blocks[:, None], keys.blocks]
    is_seen &= rows.heads[:, None] == keys.heads
    q_bounds, k_bounds, row_bounds = (
        cumulative(sizes) for sizes in (rows.lens, keys.lens, is_seen.sum(axis=1))
    )
    return AttentionMask(blocks=BlockRows(q_bounds, k_bounds, row_bounds, is_seen.nonzero()[1]))


def dense(inputs: Sequence[Tensor], masks: Bools, block: int) -> Tensor:
    """(H, T, D) masked attention, a head at a time."""
    by_token = (torch.from_numpy(x.repeat(block, axis=0).repeat(block, axis=1)) for x in masks)
    heads = zip(*inputs, by_token, strict=True)
    return torch.stack([scaled_dot_product_attention(q, k, v, seen) for q, k, v, seen in heads])


def error_of(rank: Rank, expected: Tensor) -> float:
    """Relative error of what a rank computes, its rounds merged."""
    (out, lse), *rounds = rank.attend()
    for part in rounds:
        out, lse = merge(out, lse, *part)
    want = expected[rank.tokens]
    return float((out[0, 0] - want).norm() / want.norm())


def over_split(per_work: dict[str, list[float]], rho: float) -> dict[str, float]:
    """Time of attention in whole blocks, over that in split ones, if theirs is even."""
    return ratio([rho * time for time in per_work["plan"]], per_work["split"])


def said(case: dict[str, Any]) -> str:
    """Two lines for the terminal."""
    block, ring, slowdown = case["block"], case["ranks"], case["kernel_slowdown"]
    label = f"blocks of {block} over {ring} ranks, plan / split"
    measured = case["plan_over_split"]
    return (
        f"{verdict(label, measured['median'], TARGET, measured)}\n"
        f"        kernel in tiles of {block // ring}: {slowdown['median']:.2f}x a unit of work; "
        f"rho {case['rho']['in order']:.3f} in order, {case['rho']['plan']:.3f} by plan, "
        f"{case['rho']['split']:.3f} split; Wan2.1: {case['rho_wan21']['in order']:.3f}, "
        f"{case['rho_wan21']['plan']:.3f}, so in order / split "
        f"{case['in_order_over_split_wan21']['median']:.2f}x, plan / split "
        f"{case['plan_over_split_wan21']['median']:.2f}x; error {case['error']:.0e}"
    )


if __name__ == "__main__":
    main()
