"""Measure the balanced loader: the exchange that training waits for, and the time of a decision."""

import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from host import bare_heap
from measuring import RESULTS, met, on_ranks, ratio, summary, time_interleaved

from bascule.comm.groups import RankGroup
from bascule.data.loader import BalancedLoader, LoaderOptions
from bascule.data.steps import DataRanks, RankCosts, Redistributor, Rules
from bascule.plan.costs import TransformerCost
from bascule.plan.items import Items
from bascule.plan.step import plan_step
from bascule.plan.topology import Topology

NUM_RANKS, SAMPLES_A_RANK, STEP_S = 2, 6, 0.1
PATCH_VALUES, PATCHES = 1176, (223, 892)  # float32 values of a patch; 1 to 4 MB a sample
WARMUP = 6
PREFETCH = (1, 2, 4)
EXPOSED_TARGET, HEAP_TARGET = 0.02, 3.0
WORLDS = (8, 32, 256, 1024)
COSTS = {4096: TransformerCost(4096, gamma=6.0), 24576: TransformerCost(4096)}
"""Proportional to L^2 + b L, by b: 24 d^2 / (4 gamma d)."""

Interval = tuple[float, float]
Sample = dict[str, torch.Tensor]


def loader(*, quick: bool = False) -> dict[str, Any]:
    """Measure how much of a loader's exchange training waits for, and what a decision takes.

    Five minutes; also writes results/loader_trace.json, which chrome://tracing shows. Overlap: two
    ranks, six samples of a vision-language model each (pixel values of 1 to 4 MB). The accelerator
    is a sleep; for comparison, matrix products of one thread, which compete for the cores. Exposed
    are the seconds of the exchange in which training waited; waited is all that it spent in `next`.
    The trace comes from the loader's own hooks: from the last `weight_fn` of a step to
    `collate_fn`. Decision: `Redistributor.decide` for lengths on which LoongForge's public code
    gives up, against the bound and a bare longest-first loop.
    """
    torch.set_num_threads(1)
    before = os.getloadavg()
    overlap, events = _overlap(*((10, 1) if quick else (40, 5)))
    _print_overlap(overlap)
    decision = list(_measure_decision(*((2, 5) if quick else (5, 25))))
    if not quick:
        text = json.dumps({"traceEvents": events}, separators=(",", ":")) + "\n"
        (RESULTS / "loader_trace.json").write_text(text)
    load = {"load_average_before": before, "load_average_after": os.getloadavg()}
    return {**load, "overlap": overlap, "decision": decision}


# --- overlap ------------------------------------------------------------------------------------


@dataclass
class Hooks:
    """Notes when exchanges ran, from what a loader calls before and after them."""

    started: float = 0.0
    exchanges: list[Interval] = field(default_factory=list)

    def weight(self, sample: Sample) -> int:
        self.started = time.perf_counter()
        return len(sample["input_ids"])

    def collate(self, samples: list[Sample]) -> Sample:
        self.exchanges.append((self.started, time.perf_counter()))
        return {name: torch.cat([one[name] for one in samples]) for name in samples[0]}


def _overlap(num_steps: int, repeats: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return both kinds of compute and all depths in turns; and the trace of 20 steps."""
    of_rank = on_ranks(_overlap_on_rank, num_steps, repeats)
    results: dict[str, Any] = {
        "ranks": NUM_RANKS,
        "samples_a_rank": SAMPLES_A_RANK,
        "sleep_s": STEP_S,
        "steps": num_steps,
        "repeats": repeats,
        "target_exposed_share": EXPOSED_TARGET,
    }
    for case in of_rank[0]["runs"]:
        runs = zip(*(ranks["runs"][case] for ranks in of_rank), strict=True)
        results[case] = _summarize_runs([list(ranks) for ranks in runs])
    for kind in ("sleep", "matmul"):
        results[f"trace, {kind}"] = {
            name: [ranks["traces"][kind][name] for ranks in of_rank]
            for name in ("exchange_s", "metrics_exchange_s", "inside_compute_share")
        }
    results["matmul_alone_s"] = [ranks["alone_s"] for ranks in of_rank]
    return results, [event for ranks in of_rank for event in ranks["events"]]


def _summarize_runs(runs: Sequence[Sequence[dict[str, float]]]) -> dict[str, Any]:
    """Medians over runs; where ranks differ, of the worse one."""

    def median(name: str, worst: Callable[..., float] = max) -> float:
        return statistics.median(worst(one[name] for one in ranks) for ranks in runs)

    shares = [max(one["exposed_s"] / one["wall_s"] for one in ranks) for ranks in runs]
    return {
        "exposed_share": statistics.median(shares),
        "exposed_share_worst": max(shares),
        "waited_share": statistics.median(
            max(one["waited_s"] / one["wall_s"] for one in ranks) for ranks in runs
        ),
        "step_s": median("step_s"),
        "compute_s": median("compute_s"),
        "exchange_s": median("exchange_s"),
        "sent_mb_a_step": median("sent_mb"),
        "applied_share": median("applied", min),
    }


def _overlap_on_rank(num_steps: int, repeats: int) -> list[dict[str, Any]]:
    """Return all runs of each rank."""
    rank = dist.get_rank()
    pool = _make_pool(rank)
    products, alone_s = _calibrate()
    kinds = {"sleep": lambda: time.sleep(STEP_S), "matmul": products}
    runs: dict[str, list[dict[str, float]]] = {}
    for repeat in range(repeats):
        for prefetch, (kind, compute) in itertools.product(PREFETCH, kinds.items()):
            run, _, _ = _train(pool, prefetch, compute, num_steps, seed=repeat)
            runs.setdefault(f"{kind}, prefetch {prefetch}", []).append(run)
    traces, events = {}, []
    for kind, compute in kinds.items():
        run, hooks, computes = _train(pool, 2, compute, 20, seed=99)
        exchanges = [part for part in hooks.exchanges if part[0] >= computes[0][0]]
        traces[kind] = {
            "exchange_s": sum(end - start for start, end in hooks.exchanges[WARMUP:]),
            "metrics_exchange_s": run["exchange_s"] * 20,
            "inside_compute_share": _inside(exchanges, computes),
        }
        if kind == "matmul":
            events = _trace_events(rank, hooks.exchanges, computes)
    every: list[Any] = [None] * NUM_RANKS
    local = {"runs": runs, "traces": traces, "events": events, "alone_s": alone_s}
    dist.all_gather_object(every, local)
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


def _calibrate() -> tuple[Callable[[], None], float]:
    """So many matrix products that a step takes `STEP_S` while the other ranks compute too."""
    matrix = torch.rand(768, 768)
    times: list[float] = []
    for _ in range(20):
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        times.append(time.perf_counter() - start)
    number = torch.tensor([max(1, round(STEP_S / statistics.median(times)))])
    dist.broadcast(number, src=0)

    def products() -> None:
        for _ in range(int(number)):
            torch.mm(matrix, matrix)

    dist.barrier()
    alone: list[float] = []
    for _ in range(10):
        start = time.perf_counter()
        products()
        alone.append(time.perf_counter() - start)
    return products, statistics.median(alone)


def _train(
    pool: list[Sample], prefetch: int, compute: Callable[[], object], num_steps: int, *, seed: int
) -> tuple[dict[str, float], Hooks, list[Interval]]:
    """What the measured steps took on this rank, and when it exchanged and computed."""
    draw = np.random.default_rng([seed, dist.get_rank()])
    chosen = draw.integers(len(pool), size=(WARMUP + num_steps + max(PREFETCH), SAMPLES_A_RANK))
    hooks = Hooks()
    loader = BalancedLoader(
        [[pool[k] for k in row] for row in chosen.tolist()],
        cost=TransformerCost(2048, num_layers=24),
        options=LoaderOptions(weight_fn=hooks.weight, collate_fn=hooks.collate, prefetch=prefetch),
    )
    computes: list[Interval] = []
    waited, begin, before = 0.0, 0.0, loader.metrics()
    batches = iter(loader)
    for step in range(WARMUP + num_steps):
        if step == WARMUP:
            waited, begin, before = 0.0, time.perf_counter(), loader.metrics()
        start = time.perf_counter()
        next(batches)
        waited += time.perf_counter() - start
        start = time.perf_counter()
        compute()
        computes.append((start, time.perf_counter()))
    wall, after = time.perf_counter() - begin, loader.metrics()
    hooks = Hooks(exchanges=hooks.exchanges[: WARMUP + num_steps])
    loader.close()
    counted = ("exchange_s", "exposed_s", "sent_bytes", "applied")
    exchange_s, exposed_s, sent, applied = (after[name] - before[name] for name in counted)
    measured = {
        "wall_s": wall,
        "waited_s": waited,
        "exposed_s": exposed_s,
        "step_s": wall / num_steps,
        "compute_s": statistics.median(end - start for start, end in computes[WARMUP:]),
        "exchange_s": exchange_s / num_steps,
        "sent_mb": sent / num_steps / 1e6,
        "applied": applied / num_steps,
    }
    return measured, hooks, computes


def _inside(parts: Sequence[Interval], covers: Sequence[Interval]) -> float:
    """Share of the time in `parts` that lies in `covers`, which do not overlap."""
    total = sum(end - start for start, end in parts)
    within = sum(
        max(0.0, min(end, last) - max(start, first))
        for start, end in parts
        for first, last in covers
    )
    return within / total if total else 1.0


def _trace_events(
    rank: int, exchanges: Sequence[Interval], computes: Sequence[Interval]
) -> list[dict[str, Any]]:
    """Complete events of Chrome's trace format, in microseconds of the machine's clock."""
    rows = (("compute", 0, computes), ("exchange", 1, exchanges))
    return [
        {
            "name": f"{name} {step}",
            "ph": "X",
            "ts": round(start * 1e6),
            "dur": round((end - start) * 1e6),
            "pid": rank,
            "tid": row,
        }
        for name, row, parts in rows
        for step, (start, end) in enumerate(parts)
    ]


def _print_overlap(results: dict[str, Any]) -> None:
    for case, found in results.items():
        if case.startswith(("sleep, ", "matmul, ")):
            word = met(found["exposed_share"] <= EXPOSED_TARGET) if case[0] == "s" else ""
            print(
                f"{word:6}  {case}: exposed {found['exposed_share']:.2%} of the step (worst run "
                f"{found['exposed_share_worst']:.2%}), waited {found['waited_share']:.2%}; "
                f"exchange {found['exchange_s'] * 1e3:.0f} ms, step "
                f"{found['step_s'] * 1e3:.0f} ms, sent {found['sent_mb_a_step']:.1f} MB, moved in "
                f"{found['applied_share']:.0%} of steps"
            )
        elif case.startswith("trace"):
            shares = ", ".join(f"{share:.1%}" for share in found["inside_compute_share"])
            print(f"{case}: of the exchange inside compute, by rank: {shares}")


# --- the decision -------------------------------------------------------------------------------


def _measure_decision(seeds: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Quality over seeds and time on the first, of each cost and number of ranks."""
    _ = torch.empty(31 * 2**20, dtype=torch.uint8)  # settles glibc's allocator: bench_overhead
    for (b, cost), num_ranks in itertools.product(COSTS.items(), WORLDS):
        before, after, bound, of_heap, applied = [], [], [], [], 0
        for seed in range(seeds):
            loaded, redistributor = (
                _make_loaded(num_ranks, seed),
                _make_redistributor(num_ranks, cost),
            )
            costs = cost(loaded.lens)
            mean = float(costs.sum()) / num_ranks
            decision = redistributor.decide(loaded)
            (plan,), verdict = decision.plans, decision.verdict
            before.append(verdict.before / mean)
            after.append(plan.makespan / mean)
            bound.append(max(float(costs.max()), mean) / mean)
            bins = bare_heap(costs.tolist(), num_ranks)
            of_heap.append(float(np.bincount(bins, costs).max()) / mean)
            applied += verdict.applied
        times = _time_decision(num_ranks, cost, rounds)
        row = {
            "b": b,
            "ranks": num_ranks,
            "applied": applied,
            "seeds": seeds,
            "max_over_mean": {
                "before": statistics.mean(before),
                "bound": statistics.mean(bound),
                "bascule": statistics.mean(after),
                "heapq": statistics.mean(of_heap),
                "above_bound_max": max(a / c - 1.0 for a, c in zip(after, bound, strict=True)),
            },
            "times": {name: summary(seconds) for name, seconds in times.items()},
            "plan_over_heapq": ratio(times["plan"], times["heapq"]),
            "decision_over_heapq": ratio(times["decision"], times["heapq"]),
        }
        _print_decision(row)
        yield row


def _time_decision(num_ranks: int, cost: TransformerCost, rounds: int) -> dict[str, list[float]]:
    """The heap, the plan alone and the whole decision, in turns."""
    loaded, redistributor = _make_loaded(num_ranks, 0), _make_redistributor(num_ranks, cost)
    topology, costs = Topology(((1, 1),), num_ranks), cost(loaded.lens).tolist()
    lens = [loaded.lens_by_rank(0)]
    candidates: dict[str, Callable[[], object]] = {
        "heapq": lambda: bare_heap(costs, num_ranks),
        "plan": lambda: plan_step(lens, topology, cost),
        "decision": lambda: redistributor.decide(loaded),
    }
    return time_interleaved(candidates, rounds=rounds, calls=max(1, 64 // num_ranks))


def _make_loaded(num_ranks: int, seed: int) -> Items:
    """Sixteen samples a rank, log-normal lengths around 2048."""
    draw = np.random.default_rng([seed, num_ranks]).lognormal(math.log(2048), 1.2, 16 * num_ranks)
    own = np.split(np.clip(draw, 64, 32768).astype(np.int64), num_ranks)
    words = [Items.own([16], lens.tolist(), (lens * 1024).tolist()).to_words() for lens in own]
    return Items.from_words(words)


def _make_redistributor(num_ranks: int, cost: TransformerCost) -> Redistributor:
    """What rank 0 decides with; no processes are behind its group, which decisions do not use."""
    group = RankGroup(lambda: None, 0, tuple(range(num_ranks)), (), "benchmark")
    rules = Rules(1, "microbatch", None, "drop_last", 0.02, None)
    ranks = DataRanks(group, np.arange(num_ranks), group)
    return Redistributor(ranks, rules, RankCosts.of(cost), 1e-9)


def _print_decision(row: dict[str, Any]) -> None:
    found, times = row["max_over_mean"], row["times"]
    over = row["decision_over_heapq"]
    word = met(over["of_minima"] <= HEAP_TARGET) if row["ranks"] == max(WORLDS) else ""
    print(
        f"{word:6}  b {row['b']}, {row['ranks']} ranks: max/mean {found['before']:.3f} -> "
        f"{found['bascule']:.4f} (bound {found['bound']:.4f}, at most "
        f"{found['above_bound_max']:.2%} above it; heapq {found['heapq']:.4f}), applied "
        f"{row['applied']}/{row['seeds']}; heapq {times['heapq']['min_us'] / 1e3:.2f} ms, plan "
        f"{times['plan']['min_us'] / 1e3:.2f} ms, decision "
        f"{times['decision']['min_us'] / 1e3:.2f} ms: {over['of_minima']:.2f}x of minima, "
        f"{over['median']:.2f}x median (plan {row['plan_over_heapq']['of_minima']:.2f}x)",
        flush=True,
    )
