"""One sequence on context-parallel ranks: pairs of a query and a key that each rank computes.

torch's balancers give each rank some positions of the sequence: two of `2 * ranks` chunks
(head-tail), that of every document (per-document head-tail), or blocks of 128 queries dealt in
turns by how many blocks of keys they see (PTRR). They are called from torch where it has them.
"""

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor.experimental._context_parallel import (  # pyright: ignore
    _load_balancer as balancers,  # pyright: ignore
)

from bascule import Sequences, Span
from bascule.machine.costs import TransformerCost
from bascule.plan.plan import plan_batch
from baselines.algorithms import Floats, Ints

NUM_TOKENS, BLOCK = 65_536, 128
RANKS = (2, 4, 8)
EQUAL = 1.001
COST = TransformerCost(3072)

Spans = list[Span]


def documents(rng: np.random.Generator) -> Spans:
    """Causal documents of any length."""
    spans: Spans = []
    left = NUM_TOKENS
    while left:
        length = min(left, int(np.clip(rng.lognormal(np.log(4000), 1.2), 16, 40_000)))
        spans.append(Span(length, new_document=True))
        left -= length
    return spans


def images_in_text(rng: np.random.Generator) -> Spans:
    """Documents of causal texts with images between, which see themselves and what is before."""
    spans: Spans = []
    for document in documents(rng):
        left, is_first = document.num_tokens, True
        while left:
            is_text = len(spans) % 2 == 0 or left < 1024
            length = min(left, int(rng.integers(100, 1500)) if is_text else 1024)
            spans.append(Span(length, causal=is_text, new_document=is_first))
            left, is_first = left - length, False
    return spans


def seen(spans: Spans) -> tuple[Ints, Ints]:
    """First key, and the one after the last, that each token sees."""
    first, last = [], []
    start = document = 0
    for span in spans:
        document = start if span.new_document else document
        end = start + span.num_tokens
        positions = np.arange(start, end)
        first.append(np.full(span.num_tokens, document))
        last.append(positions + 1 if span.causal else np.full(span.num_tokens, end))
        start = end
    return np.concatenate(first), np.concatenate(last)


def blocks_seen(first: Ints, last: Ints) -> Ints:
    """Blocks of keys that each block of queries sees some of; the keys of a block are one run."""
    low = first.reshape(-1, BLOCK) // BLOCK
    high = -(-last.reshape(-1, BLOCK) // BLOCK)
    counts = np.zeros(len(low), dtype=np.int64)
    for row, (begins, ends) in enumerate(zip(low, high, strict=True)):
        is_seen = np.zeros(int(ends.max()), dtype=bool)
        for begin, end in set(zip(begins.tolist(), ends.tolist(), strict=True)):
            is_seen[begin:end] = True
        counts[row] = int(is_seen.sum())
    return counts


# --- who computes which pairs -------------------------------------------------------------------


def of_indices(indices: torch.Tensor, pairs: Ints, num_ranks: int) -> Floats:
    """Pairs of each rank, if positions are rearranged so and cut evenly."""
    order = indices.reshape(num_ranks, -1).numpy()
    return pairs[order].sum(axis=1).astype(np.float64)


def contiguous(spans: Spans, num_ranks: int) -> tuple[Floats, float]:
    """Nothing: even pieces of neighbouring tokens."""
    first, last = seen(spans)
    return of_indices(torch.arange(NUM_TOKENS), last - first, num_ranks), 0.0


def head_tail(spans: Spans, num_ranks: int) -> tuple[Floats, float]:
    """torch's default."""
    first, last = seen(spans)
    found = balancers._HeadTailLoadBalancer(NUM_TOKENS, num_ranks, "cpu")
    return of_indices(found._generate_indices(), last - first, num_ranks), 0.0


def per_document(spans: Spans, num_ranks: int) -> tuple[Floats, float]:
    """torch's for documents, which are padded to twice the ranks; pads see what is before.

    Head-tail in each document, as its docstring shows it. The positions that torch 2.13 gives lie
    document by document instead, so that cut evenly they put whole documents on a rank: 1.2 to 2.0.
    """
    unit = 2 * num_ranks
    lens = [-(-span.num_tokens // unit) * unit for span in spans]
    first, last = seen([Span(length, new_document=True) for length in lens])
    loads, start = np.zeros(num_ranks), 0
    for length in lens:
        found = balancers._HeadTailLoadBalancer(length, num_ranks, "cpu")
        pairs = (last - first)[start : start + length]
        loads += of_indices(found._generate_indices(), pairs, num_ranks)
        start += length
    return loads, 1.0 - NUM_TOKENS / sum(lens)


def ptrr(spans: Spans, num_ranks: int) -> tuple[Floats, float]:
    """torch's for any mask: whole blocks, in turns by the blocks that they see."""
    first, last = seen(spans)
    counts = torch.from_numpy(blocks_seen(first, last))
    groups = balancers._PTRRLoadBalancer.ptrr_scheduling(counts, num_ranks)
    pairs = (last - first).reshape(-1, BLOCK).sum(axis=1)
    return of_indices(groups, pairs, num_ranks), 0.0


def zigzag(spans: Spans, num_ranks: int) -> tuple[Floats, float]:
    """Ours: a plan for one sequence of these spans on a ring."""
    plan = plan_batch(
        [Sequences([NUM_TOKENS], [spans]), *[[]] * (num_ranks - 1)], f"g1r{num_ranks}n1", COST
    )
    first, last = seen(spans)
    loads = [(last - first)[plan.local(rank).positions].sum() for rank in range(num_ranks)]
    return np.array(loads, dtype=np.float64), 0.0


Way = Callable[[Spans, int], tuple[Floats, float]]

TORCH: dict[str, Way] = {"nothing": contiguous, "head-tail": head_tail, "PTRR": ptrr}
OURS: dict[str, Way] = {"bascule": zigzag}
MASKS: dict[str, tuple[Callable[[np.random.Generator], Spans], dict[str, Way]]] = {
    "causal": (lambda rng: [Span(NUM_TOKENS)], TORCH | OURS),
    "documents": (
        documents,
        TORCH | {"per-document head-tail": per_document} | OURS,
    ),
    "images in text": (images_in_text, TORCH | OURS),
}


def mask_rows(num_draws: int) -> list[dict[str, Any]]:
    """Most over mean pairs of the ranks, the median of some masks; first is who has the least."""
    return [row for mask in MASKS for ranks in RANKS for row in _rows(mask, ranks, num_draws)]


def _rows(mask: str, ranks: int, num_draws: int) -> Iterator[dict[str, Any]]:
    draw, ways = MASKS[mask]
    drawn = [draw(np.random.default_rng([ranks, seed])) for seed in range(num_draws)]
    # Pairs of padding count as work, not as need.
    needed = [float(np.subtract(*seen(spans)[::-1]).sum()) for spans in drawn]
    found: list[dict[str, Any]] = []
    for name, way in ways.items():
        loads = [way(spans, ranks) for spans in drawn]
        ratios = [
            float(pairs.max()) * ranks / need
            for (pairs, _), need in zip(loads, needed, strict=True)
        ]
        found.append(
            {
                "mask": mask,
                "ranks": ranks,
                "policy": name,
                "is_ours": name in OURS,
                "over_mean": statistics.median(ratios),
                "over_mean_worst": max(ratios),
                "padding": statistics.mean(padding for _, padding in loads),
            }
        )
    least = min(row["over_mean"] for row in found)
    for row in found:
        yield row | {"first": row["over_mean"] <= least * EQUAL}
