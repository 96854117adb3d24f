"""Planning for block-sparse attention: how even it gets, what moves, and what planning costs.

Run: `python benchmarks/bench_sparse_plan.py` (about five minutes; `--quick`: one, fewer layers,
draws and steps, nothing written); writes results/sparse_plan.json.

Masks are synthetic (`bascule.workload.masks`): those of the models are not published. "before"
and "paper" start from runs of blocks, as in the paper; "stripe" and "minimal" from a striped home.
"split" cuts every block over all ranks of its ring, as BurstEngine does: even, but its kernel then
has tiles of block / R tokens. Plan times are compared with `mask.sum(-1)`, one numpy pass over the
masks, in turns with it.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from _common import ratio, summary, time_interleaved, write_results
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from bascule.plan.metrics import imbalance
from bascule.plan.sparse import (
    BlockLayout,
    PlanReuse,
    SparsePlan,
    SparsePlanner,
    block_counts,
    critical_path_imbalance,
    partition_blocks,
    partition_heads,
    sparse_imbalance,
)
from bascule.plan.sparse.baselines import greedy, paper_blocks
from bascule.plan.sparse.counts import ring_work
from bascule.workload.masks import COGVIDEOX15, WAN21, MaskModel, synthetic_masks

Bools = NDArray[np.bool_]

MODELS = {"Wan2.1": WAN21, "CogVideoX1.5": COGVIDEOX15}
MESHES = ((4, 1), (2, 2), (1, 4), (8, 1), (4, 2), (2, 4), (1, 8))
DENSITY_SPREAD = 0.56
"""Standard deviation over mean of the density of heads: what Table 1 of db-SP implies for Wan."""

TARGETED_HEADS = (40, 48)
HEADS_MEAN, HEADS_P95, STILL, MOVED = 1.005, 1.015, 1.012, 1.005
"""Targets: heads, on average and at the 95th percentile; rings, without and with moves."""


@dataclass(frozen=True)
class Quality:
    """One way of planning, on the masks of several layers; shares of rows on other ring ranks."""

    model: str
    ulysses: int
    ring: int
    method: str
    rho_mean: float
    rho_max: float
    critical_path_mean: float
    moved_q: float
    moved_kv: float


def main() -> None:
    """Measure, print the tables, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer cases; writes nothing")
    quick = parser.parse_args().quick
    console = Console()
    quality = [row for name in MODELS for row in qualities(name, 1 if quick else 5)]
    console.print(quality_table(quality))
    heads = [head_draws(number, 8, 50 if quick else 400) for number in (12, 24, 30, 40, 48)]
    console.print(heads_table(heads))
    times = [row for mesh in ((8, 1), (4, 2), (2, 4), (1, 8)) for row in timed(mesh, quick)]
    console.print(times_table(times))
    reuse = list(reused(6 if quick else 50))
    console.print(reuse_table(reuse))
    if not quick:
        results = {
            "quality": [asdict(row) for row in quality],
            "heads": heads,
            "times": times,
            "reuse": reuse,
        }
        console.print(f"wrote {write_results('sparse_plan', results)}")


def qualities(name: str, num_layers: int) -> Iterator[Quality]:
    """All meshes and methods on the layers of a model."""
    model = MODELS[name]
    layers = [synthetic_masks(model, layer=layer) for layer in range(num_layers)]
    for ulysses, ring in MESHES:
        cases: dict[str, list[tuple[float, ...]]] = {}
        for masks in layers:
            rho = sparse_imbalance(masks, ulysses, ring)
            critical = critical_path_imbalance(masks, ulysses, ring)
            cases.setdefault("before", []).append((rho, critical, 0.0, 0.0))
            plans = dict(planned(model, masks, ulysses, ring))
            for method, plan in plans.items():
                row = (plan.imbalance, plan.critical_path_imbalance, *plan.moved)
                cases.setdefault(method, []).append(row)
            cut = split_imbalance(masks, plans["stripe"])
            cases.setdefault("split", []).append((cut, cut, 0.0, 0.0))
        for method, rows in cases.items():
            rho, critical, moved_q, moved_kv = np.mean(rows, axis=0).tolist()
            worst = max(row[0] for row in rows)
            yield Quality(name, ulysses, ring, method, rho, worst, critical, moved_q, moved_kv)


def planned(
    model: MaskModel, masks: Bools, ulysses: int, ring: int
) -> Iterator[tuple[str, SparsePlan]]:
    """Every method on one layer."""
    mesh = ulysses, ring
    contiguous = BlockLayout.contiguous(model.block_lens, *mesh)
    striped = BlockLayout.striped(model.block_lens, *mesh)
    for reward in (0.0, 2.0):
        planner = SparsePlanner(*mesh, method="paper", reward=reward)
        yield f"paper {reward:g}", planner.plan(masks, contiguous)
    yield "stripe", SparsePlanner(*mesh, method="stripe").plan(masks, striped)
    yield "minimal", SparsePlanner(*mesh).plan(masks, striped)


def split_imbalance(masks: Bools, plan: SparsePlan) -> float:
    """Heads as in the plan, and every block cut over the ranks of the ring."""
    heads = block_counts(masks, kv_lens=plan.kv.lens)[:, :, 0] * plan.q.lens
    return imbalance(ring_loads(plan.ring_of, heads, plan.ulysses_degree))


def ring_loads(
    ring_of: NDArray[np.int64], counts: NDArray[np.int64], num_rings: int
) -> NDArray[np.float64]:
    """Work of each ring, from that of every query block of every head."""
    return np.bincount(ring_of.ravel(), counts.ravel(), num_rings).astype(np.float64)


def head_draws(num_heads: int, num_ranks: int, num_draws: int) -> dict[str, Any]:
    """Max over mean of ranks, on heads of random densities."""
    mean = 0.414
    strength = mean * (1 - mean) / (DENSITY_SPREAD * mean) ** 2 - 1
    ways = {
        "before": None,
        "paper": None,
        "whole": {"cut_above": np.inf},
        "cut": {},
    }
    rho: dict[str, list[float]] = {way: [] for way in ways}
    num_cut: list[int] = []
    for draw in range(num_draws):
        random = np.random.default_rng((num_heads, draw))
        density = random.beta(mean * strength, (1 - mean) * strength, num_heads)
        counts = random.binomial(1184, density[:, None], (num_heads, 1184))
        for way, options in ways.items():
            if options is None:
                whole = np.arange(num_heads) * num_ranks // num_heads
                if way == "paper":
                    whole = greedy(counts.sum(axis=1), num_ranks)
                rank_of = np.repeat(whole, 1184)
                rho[way].append(imbalance(ring_loads(rank_of, counts, num_ranks)))
                continue
            plan = partition_heads(counts, num_ranks, **options)
            rho[way].append(imbalance(plan.loads))
            if way == "cut":
                num_cut.append(plan.cut_heads.size)
    result: dict[str, Any] = {"heads": num_heads, "ranks": num_ranks, "draws": num_draws}
    for way, values in rho.items():
        result[way] = {"mean": float(np.mean(values)), "p95": float(np.quantile(values, 0.95))}
    return result | {"cut_heads_mean": float(np.mean(num_cut))}


def timed(mesh: tuple[int, int], quick: bool) -> Iterator[dict[str, Any]]:
    """Stages of planning for 40 heads of 1184 x 1184 blocks, over one pass over the masks."""
    ulysses, ring = mesh
    masks = np.zeros((40, 1184, 1184), bool)
    drawn = synthetic_masks(WAN21)
    masks[:, : drawn.shape[1], : drawn.shape[2]] = drawn
    layout = BlockLayout.striped(np.full(1184, 64), *mesh)
    counts = block_counts(masks)[:, :, 0]
    heads = partition_heads(counts, ulysses)
    matrices = [masks[(heads.rank_of == u).all(axis=1)].sum(axis=0) for u in range(ulysses)]
    stages = {
        "mask.sum(-1)": lambda: masks.sum(-1),
        "counts, matrices": lambda: (
            block_counts(masks),
            ring_work(masks, heads.rank_of, ulysses),
        ),
        "heads": lambda: partition_heads(counts, ulysses),
        "whole plan": lambda: SparsePlanner(*mesh).plan(masks, layout),
    }
    if ring > 1:
        home = layout.home // ulysses
        homes: dict[str, Any] = {"q_home": home, "kv_home": home}
        for method in ("stripe", "minimal_move"):
            stages[f"blocks, {method}"] = lambda method=method: [
                partition_blocks(matrix, ring, method=method, **homes) for matrix in matrices
            ]
        stages["blocks, paper"] = lambda: paper_blocks(sum(matrices), ring, **homes)
    times = time_interleaved(stages, rounds=5 if quick else 21)
    targets = dict.fromkeys(stages, 1.0) | {"counts, matrices": 2.0}
    for untargeted in ("mask.sum(-1)", "whole plan"):
        del targets[untargeted]
    for stage, seconds in times.items():
        yield {
            "mesh": f"U{ulysses}R{ring}",
            "stage": stage,
            **summary(seconds),
            "ratio": ratio(seconds, times["mask.sum(-1)"])["of_minima"],
            "target": targets.get(stage),
        }


def reused(num_steps: int) -> Iterator[dict[str, Any]]:
    """A layer over denoising steps, planned from the step before: what staleness costs."""
    model = WAN21
    mesh, tolerances = (2, 4), (0.0, 0.01, 0.02, 0.05, 0.1)
    layout = BlockLayout.striped(model.block_lens, *mesh)
    planner = SparsePlanner(*mesh)
    states: dict[float, PlanReuse] = {}
    rho: dict[float, list[float]] = {tolerance: [] for tolerance in tolerances}
    for step in range(num_steps):
        masks = synthetic_masks(model, step=step)
        for tolerance in tolerances:
            if step == 0:
                states[tolerance] = PlanReuse(planner, planner.plan(masks, layout), tolerance)
            else:
                rho[tolerance].append(sparse_imbalance(masks, *mesh, states[tolerance].plan))
                states[tolerance] = states[tolerance].after(masks)
    for tolerance, state in states.items():
        yield {
            "mesh": "U{}R{}".format(*mesh),
            "steps": num_steps,
            "step_drift": model.step_drift,
            "tolerance": tolerance,
            "planned": state.num_planned,
            "rho_mean": float(np.mean(rho[tolerance])),
            "rho_max": max(rho[tolerance]),
        }


def quality_table(rows: Sequence[Quality]) -> Table:
    """A row a mesh and method; targets where there are any."""
    heads = ("mean", "max", "critical path", "Q moved", "KV moved", "")
    table = Table("model", "mesh", "method", *heads, title="rho over layers")
    for row in rows:
        shares = (f"{100 * share:.1f} %" for share in (row.moved_q, row.moved_kv))
        numbers = (row.rho_mean, row.rho_max, row.critical_path_mean)
        target = {"stripe": STILL, "minimal": MOVED}.get(row.method)
        verdict = "" if target is None else mark(row.rho_mean <= target)
        table.add_row(
            row.model,
            f"U{row.ulysses}R{row.ring}",
            row.method,
            *(f"{number:.4f}" for number in numbers),
            *shares,
            verdict,
        )
    return table


def heads_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Mean / 95th percentile."""
    ways = ("before", "paper", "whole", "cut")
    table = Table("heads", *ways, "heads cut", "", title="Heads on 8 ranks, mean / 95th percentile")
    for row in rows:
        cells = (f"{row[way]['mean']:.4f} / {row[way]['p95']:.4f}" for way in ways)
        met = row["cut"]["mean"] <= HEADS_MEAN and row["cut"]["p95"] <= HEADS_P95
        verdict = mark(met) if row["heads"] in TARGETED_HEADS else ""
        table.add_row(str(row["heads"]), *cells, f"{row['cut_heads_mean']:.2f}", verdict)
    return table


def times_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Milliseconds, and over one pass over the masks."""
    table = Table("mesh", "stage", "ms", "over sum", "target", "", title="40 x 1184 x 1184 blocks")
    for row in rows:
        target = row["target"]
        shown = ("", "") if target is None else (f"{target:g}x", mark(row["ratio"] <= target))
        table.add_row(
            row["mesh"], row["stage"], f"{row['min_us'] / 1e3:.1f}", f"{row['ratio']:.2f}x", *shown
        )
    return table


def reuse_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Plans made, and how even the steps were that ran with them."""
    table = Table("tolerance", "steps", "plans", "rho mean", "rho max", title="Reuse, U2R4")
    for row in rows:
        numbers = (f"{row['rho_mean']:.4f}", f"{row['rho_max']:.4f}")
        table.add_row(f"{row['tolerance']:g}", str(row["steps"]), str(row["planned"]), *numbers)
    return table


def mark(met: bool) -> str:
    """A word for a verdict."""
    return "met" if met else "MISSED"


if __name__ == "__main__":
    main()
