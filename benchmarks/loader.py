"""Measure the balanced loader: the exchange that training waits for, and the time of a decision."""

import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from measuring import bare_heap, on_ranks, ratio, say, summary, time_interleaved

from bascule.comm.groups import RankGroup
from bascule.data.loader import BalancedLoader, LoaderOptions
from bascule.data.steps import DataRanks, Redistributor, Rules
from bascule.machine.costs import TransformerCost
from bascule.plan.offer import Offer
from bascule.plan.plan import Terms

NUM_RANKS, SAMPLES_A_RANK, STEP_S = 2, 6, 0.1
PATCH_VALUES, PATCHES = 1176, (223, 892)  # float32 values of a patch; 1 to 4 MB a sample
WARMUP = 6
PREFETCH = 2
EXPOSED_TARGET, HEAP_TARGET = 0.02, 3.0
WORLDS = (8, 32, 256, 1024)
COSTS = {4096: TransformerCost(4096, gamma=6.0), 24576: TransformerCost(4096)}
"""Proportional to L^2 + b L, by b: 24 d^2 / (4 gamma d)."""

Sample = dict[str, torch.Tensor]


def loader(*, quick: bool = False) -> dict[str, Any]:
    """Measure how much of a loader's exchange training waits for, and what a decision takes.

    Two minutes. Overlap: two ranks, six samples of a vision-language model each (pixel values of 1
    to 4 MB). The accelerator is a sleep; for comparison, matrix products of one thread, which
    compete for the cores. Exposed are the seconds of the exchange in which training waited; waited
    is all that it spent in `next`. Decision: `Redistributor.decide` for lengths on which
    LoongForge's public code gives up, against the bound and a bare longest-first loop.
    """
    torch.set_num_threads(1)
    before = os.getloadavg()
    overlap = _overlap(*((10, 1) if quick else (40, 5)))
    decision = list(_measure_decision(*((2, 5) if quick else (5, 25))))
    load = {"load_average_before": before, "load_average_after": os.getloadavg()}
    return {**load, "overlap": overlap, "decision": decision}


# --- overlap ------------------------------------------------------------------------------------


def _overlap(num_steps: int, repeats: int) -> dict[str, Any]:
    """Return both kinds of compute, in turns: medians over runs; where ranks differ, the worse."""
    of_rank = on_ranks(_overlap_on_rank, num_steps, repeats)
    results: dict[str, Any] = {
        "ranks": NUM_RANKS,
        "samples_a_rank": SAMPLES_A_RANK,
        "sleep_s": STEP_S,
        "steps": num_steps,
        "repeats": repeats,
        "target_exposed_share": EXPOSED_TARGET,
    }
    for kind in of_rank[0]:
        runs = list(zip(*(ranks[kind] for ranks in of_rank), strict=True))
        worst = {name: [max(one[name] for one in ranks) for ranks in runs] for name in runs[0][0]}
        one = {name: statistics.median(values) for name, values in worst.items()}
        one |= {"exposed_share_worst": max(worst["exposed_share"])}
        results[f"{kind}, prefetch {PREFETCH}"] = one
        say(
            f"{kind}: exposed {one['exposed_share']:.2%} of the step (worst run "
            f"{one['exposed_share_worst']:.2%}), waited {one['waited_share']:.2%}; exchange "
            f"{one['exchange_s'] * 1e3:.0f} ms, step {one['step_s'] * 1e3:.0f} ms, sent "
            f"{one['sent_mb_a_step']:.1f} MB, moved in {one['applied_share']:.0%} of steps",
            one["exposed_share"] <= EXPOSED_TARGET if kind == "sleep" else None,
        )
    return results


def _overlap_on_rank(num_steps: int, repeats: int) -> list[dict[str, list[dict[str, float]]]]:
    """Return all runs of each rank."""
    pool = _make_pool(dist.get_rank())
    kinds = {"sleep": lambda: time.sleep(STEP_S), "matmul": _products()}
    runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for repeat in range(repeats):
        for kind, compute in kinds.items():
            runs[kind].append(_train(pool, compute, num_steps, seed=repeat))
    every: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(every, runs)
    return every


def _make_pool(rank: int) -> list[Sample]:
    """Samples to draw from: four patches a token, and a caption."""
    draw = np.random.default_rng([7, rank])
    pool: list[Sample] = []
    for _ in range(24):
        patches = int(draw.integers(*PATCHES))
        length = patches // 4 + int(np.clip(draw.lognormal(math.log(200), 1.0), 16, 2000))
        pixels = torch.from_numpy(draw.random((patches, PATCH_VALUES), dtype=np.float32))
        pool.append({"input_ids": torch.arange(length), "pixel_values": pixels})
    return pool


def _products() -> Callable[[], None]:
    """Return as many matrix products as take `STEP_S`; the same number on all ranks."""
    matrix = torch.rand(768, 768)
    times = time_interleaved({"mm": lambda: torch.mm(matrix, matrix)}, rounds=20)["mm"]
    number = torch.tensor([max(1, round(STEP_S / statistics.median(times)))])
    dist.broadcast(number, src=0)

    def products() -> None:
        for _ in range(int(number)):
            torch.mm(matrix, matrix)

    return products


def _train(
    pool: list[Sample], compute: Callable[[], object], num_steps: int, *, seed: int
) -> dict[str, float]:
    """Return what the measured steps took on this rank."""
    draw = np.random.default_rng([seed, dist.get_rank()])
    chosen = draw.integers(len(pool), size=(WARMUP + num_steps + PREFETCH, SAMPLES_A_RANK))
    options = LoaderOptions(
        weight_fn=lambda sample: len(sample["input_ids"]),
        collate_fn=lambda samples: {k: torch.cat([x[k] for x in samples]) for k in samples[0]},
        prefetch=PREFETCH,
    )
    loader = BalancedLoader(
        [[pool[k] for k in row] for row in chosen.tolist()],
        cost=TransformerCost(2048, num_layers=24),
        options=options,
    )
    waited, begin, before = 0.0, 0.0, loader.metrics()
    batches = iter(loader)
    for step in range(WARMUP + num_steps):
        if step == WARMUP:
            waited, begin, before = 0.0, time.perf_counter(), loader.metrics()
        start = time.perf_counter()
        next(batches)
        waited += time.perf_counter() - start
        compute()
    wall, after = time.perf_counter() - begin, loader.metrics()
    loader.close()
    counted = ("exchange_s", "exposed_s", "sent_bytes", "applied")
    exchange_s, exposed_s, sent, applied = (after[name] - before[name] for name in counted)
    return {
        "exposed_share": exposed_s / wall,
        "waited_share": waited / wall,
        "step_s": wall / num_steps,
        "exchange_s": exchange_s / num_steps,
        "sent_mb_a_step": sent / num_steps / 1e6,
        "applied_share": applied / num_steps,
    }


# --- the decision -------------------------------------------------------------------------------


def _measure_decision(seeds: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield quality over seeds and time on the first, of each cost and number of ranks."""
    _ = torch.empty(31 * 2**20, dtype=torch.uint8)  # settles glibc's allocator: see `overhead`
    for (b, cost), num_ranks in itertools.product(COSTS.items(), WORLDS):
        redistributor = _make_redistributor(num_ranks, cost)
        loads: dict[str, list[float]] = {"before": [], "bound": [], "bascule": [], "heapq": []}
        for seed in range(seeds):
            loaded = _make_loaded(num_ranks, seed)
            costs, decision = cost(loaded.lens), redistributor.decide(loaded)
            mean = float(costs.sum()) / num_ranks
            heap = np.bincount(bare_heap(costs.tolist(), num_ranks), costs)
            loads["before"].append(decision.verdict.before / mean)
            loads["bound"].append(max(float(costs.max()) / mean, 1.0))
            loads["bascule"].append(decision.plans[0].makespan / mean)
            loads["heapq"].append(float(heap.max()) / mean)
        above = max(a / c - 1.0 for a, c in zip(loads["bascule"], loads["bound"], strict=True))
        loaded = _make_loaded(num_ranks, 0)
        listed = cost(loaded.lens).tolist()
        candidates: dict[str, Callable[[], object]] = {
            "heapq": partial(bare_heap, listed, num_ranks),
            "decision": partial(redistributor.decide, loaded),
        }
        times = time_interleaved(candidates, rounds=rounds, calls=max(1, 64 // num_ranks))
        over = ratio(times["decision"], times["heapq"])
        means = {name: statistics.mean(values) for name, values in loads.items()}
        say(
            f"b {b}, {num_ranks} ranks: max/mean {means['before']:.3f} -> {means['bascule']:.4f} "
            f"(bound {means['bound']:.4f}, at most {above:.2%} above it; heapq "
            f"{means['heapq']:.4f}); decision {1e3 * min(times['decision']):.2f} ms, "
            f"{over['of_minima']:.2f}x the heap's in minima, {over['median']:.2f}x in the median",
            over["of_minima"] <= HEAP_TARGET if num_ranks == max(WORLDS) else None,
        )
        yield {
            "b": b,
            "ranks": num_ranks,
            "seeds": seeds,
            "max_over_mean": means | {"above_bound_max": above},
            "times": {name: summary(seconds) for name, seconds in times.items()},
            "decision_over_heapq": over,
        }


def _make_loaded(num_ranks: int, seed: int) -> Offer:
    """Sixteen samples a rank, log-normal lengths around 2048."""
    draw = np.random.default_rng([seed, num_ranks]).lognormal(math.log(2048), 1.2, 16 * num_ranks)
    own = np.split(np.clip(draw, 64, 32768).astype(np.int64), num_ranks)
    words = [Offer.of([[16]], lens, num_bytes=lens * 1024).to_words() for lens in own]
    return Offer.from_words(words)


def _make_redistributor(num_ranks: int, cost: TransformerCost) -> Redistributor:
    """What rank 0 decides with; no processes are behind its group, which decisions do not use."""
    group = RankGroup(lambda: None, 0, tuple(range(num_ranks)), (), "benchmark")
    rules = Rules(1, "microbatch", "drop_last", 0.02)
    ranks = DataRanks(group, np.arange(num_ranks), group)
    return Redistributor(ranks, rules, Terms("g1n1", cost), 1e-9)
