"""Measure block-sparse attention: how even plans are, what balance brings two ranks, the kernel."""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from measuring import in_turns, on_ranks, ratio, say, summary, time_interleaved, verdict
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import scaled_dot_product_attention

from bascule.attention.kernels.protocol import Attended
from bascule.attention.kernels.registry import CpuFlashKernel, CpuLoopKernel
from bascule.attention.mask import EVERYTHING, AttentionMask
from bascule.attention.mask import BlockRows as MaskRows
from bascule.attention.sparse.attend import (
    EXCHANGE_SPAN,
    MASKS_SPAN,
    rows_of,
    sparse_attention,
)
from bascule.comm.mesh import AttentionMesh
from bascule.diffusers import SparseConfig
from bascule.machine.cluster import HardwareProfile
from bascule.plan.sparse import (
    BlockLayout,
    PlanReuse,
    SparsePlan,
    SparsePlanner,
    block_lens,
    in_order,
    plan_under,
)
from bascule.plan.sparse.choose import CallSize, Strategies
from bascule.plan.sparse.layout import TURN_STEP, best_step
from bascule.plan.topology import all_degrees
from bascule.sim.sparse_study import Setting, mesh_name, study
from bascule.workload.masks import COGVIDEOX15, WAN21, MaskModel, synthetic_masks

# --- sparse_plan --------------------------------------------------------------------------------

PLANNED = ((1, 8), (2, 4), (4, 2), (8, 1))
"""(Ulysses degree, ring degree)"""
RHO_TARGETS = {"stripe": 1.012, "minimal": 1.005}
LARGEST_STILL_RHO = 1.02  # of a ring's critical path, with nothing moved


def sparse_plan(*, quick: bool = False) -> dict[str, Any]:
    """Measure how even plans of block-sparse attention get, and what moves for it.

    Five minutes. Synthetic masks of five layers (`bascule.workload.masks`). "before" and "paper"
    start from runs of blocks, as in the paper; "stripe" and "minimal" from turns that the masks
    chose; "fixed turns" and "turns by sqrt 2" did not look at masks. "families" has rings of 8 on
    periodic and random masks (`block_families`). "kept" has the plans of a layer over 50 steps, by
    tolerance; "rewards" the paper's greedy, by reward. "meshes": each layer of each step on the
    mesh that is predicted to be the fastest, of 16 steps on several machines; gains are over the
    best mesh for all, by what calls are predicted to take.
    """
    rows = list[dict[str, Any]]()
    for name, model in {"Wan2.1": WAN21, "CogVideoX1.5": COGVIDEOX15}.items():
        layers = [synthetic_masks(model, layer=layer) for layer in range(1 if quick else 5)]
        for mesh in PLANNED:
            rows += qualities(name, model.block_lens, layers, mesh)
    results: dict[str, Any] = {"quality": rows, "kept": [], "rewards": [], "meshes": []}
    results["families"] = [
        row | {"family": name}
        for name, masks in block_families(8).items()
        for row in qualities(name, np.full(len(masks[0]), 64), [masks], (8, 1), {})
    ]
    for name, model in {"Wan2.1": WAN21, "CogVideoX1.5": COGVIDEOX15}.items():
        model = replace(model, block=SWEPT_BLOCK)
        steps = (synthetic_masks(model, step=step) for step in range(3 if quick else 50))
        for key, swept in sweeps(name, model.block_lens, [steps]).items():
            results[key] += swept
        results["meshes"] += _meshes_chosen(name, replace(model, block=MESHES_BLOCK), quick)
    return results


def qualities(
    name: str,
    lens: Any,
    layers: list[Any],
    mesh: tuple[int, int],
    targets: dict[str, float] = RHO_TARGETS,
) -> Iterator[dict[str, Any]]:
    """Yield a row for each method on a mesh."""

    def dealt(step: int) -> BlockLayout:
        return BlockLayout.striped(lens, *mesh, step)

    runs = BlockLayout.contiguous(lens, *mesh)
    places = np.arange(len(lens))
    works = (x.sum(0, dtype=np.float64) for x in layers)
    striped = dealt(best_step(works, mesh[0], (places, places)))
    ones = BlockLayout.contiguous(np.ones_like(lens), *mesh)  # "before" counts blocks, not pairs
    planners = {
        "paper 2": (SparsePlanner(*mesh, method="paper", reward=2.0), runs),
        "fixed turns": (SparsePlanner(*mesh, method="stripe"), dealt(0)),
        "turns by sqrt 2": (SparsePlanner(*mesh, method="stripe"), dealt(TURN_STEP)),
        "stripe": (SparsePlanner(*mesh, method="stripe"), striped),
        "minimal": (SparsePlanner(*mesh), striped),
    }
    cases: dict[str, list[tuple[float, ...]]] = {name: [] for name in ("before", *planners)}
    for masks in layers:
        plan = plan_under(in_order(len(masks), ones, ones, *mesh), masks)
        cases["before"].append((plan.imbalance, plan.critical_path_imbalance, 0.0, 0.0))
        for method, (planner, home) in planners.items():
            plan = planner.plan(masks, home)
            cases[method].append((plan.imbalance, plan.critical_path_imbalance, *plan.moved))
    most = {method: np.max(rows, axis=0) for method, rows in cases.items()}
    if mesh[0] > 1:
        ways = "fixed turns", "turns by sqrt 2", "stripe"
        of_ways = ", ".join(f"{way} {most[way][1]:.3f} ({most[way][0]:.3f})" for way in ways)
        is_even = bool(most["stripe"][1] <= LARGEST_STILL_RHO)
        say(
            f"{name} {mesh_name(mesh)}, nothing moved, critical path (barriers): {of_ways}", is_even
        )
    for method, rows in cases.items():
        rho, critical, moved_q, moved_kv = np.mean(rows, axis=0).tolist()
        worst, target = max(row[0] for row in rows), targets.get(method)
        say(
            f"{name} U{mesh[1]}R{mesh[0]} {method}: rho {rho:.4f} ({worst:.4f} at most), critical "
            f"path {critical:.4f}, Q moved {moved_q:.1%}, KV {moved_kv:.1%}",
            None if target is None else rho <= target,
        )
        yield {
            "model": name,
            "ulysses": mesh[1],
            "ring": mesh[0],
            "method": method,
            "rho_mean": rho,
            "rho_max": worst,
            "critical_path_mean": critical,
            "moved_q": moved_q,
            "moved_kv": moved_kv,
        }


def block_families(ring: int) -> dict[str, Any]:
    """Return masks (H, N, N) of 64 turns that could be in tune with ranks, and random ones."""
    place, draw = np.arange(64 * ring), np.random.default_rng(0)
    far, families = np.abs(np.subtract.outer(place, place)), dict[str, Any]()
    for period in (ring, 2 * ring, 3 * ring, 8 * ring):
        row = place % period
        near = np.abs(np.subtract.outer(row, row)) <= period / 4
        families[f"frames of {period} blocks"] = near & (far // period <= 4)
        families[f"frames of {period} blocks, one row sees all"] = (far < 2) | (row == 0)[:, None]
    families |= {f"window of {window} blocks": far <= window for window in (1, ring, 4 * ring)}
    families["causal"] = far == np.subtract.outer(place, place)
    families["independent blocks"] = draw.random((8, *far.shape)) < 0.3
    densities = draw.beta(1, 2, (place.size, 1))
    families["independent rows"] = draw.random((8, *far.shape)) < densities
    few = 12 * ring
    densities = draw.beta(0.5, 1, (few, 1))
    families["independent rows, few blocks"] = draw.random((8, few, few)) < densities
    return {name: masks if masks.ndim == 3 else masks[None] for name, masks in families.items()}


SWEPT_BLOCK, MESHES_BLOCK, SIZE = (
    128,
    320,
    CallSize(1, 128, 256),
)  # larger blocks than 64, to be fast
TOLERANCES, REWARDS = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1), (0.0, 1.0, 2.0, 5.0, 7.0, 10.0)


def sweeps(
    name: str, lens: Any, layers: Iterable[Iterable[Any]]
) -> dict[str, list[dict[str, Any]]]:
    """Return means over layers of plans kept by tolerance, and of the greedy by reward."""
    machine = HardwareProfile.load("h100-datasheet")
    setting = Setting(PLANNED, lens, lens, machine, 128, 2, 1.005, 2.0, 0.05)
    studies = [study(name, [steps], setting, TOLERANCES, REWARDS) for steps in layers]
    kept, rewards = list[dict[str, Any]](), list[dict[str, Any]]()
    for mesh in PLANNED:
        where = {"model": name, "ulysses": mesh[1], "ring": mesh[0]}
        for tolerance in TOLERANCES:
            reuses = [one.runs[0].reuses[mesh, tolerance] for one in studies]
            rhos = [rho for reuse in reuses for rho in reuse.imbalances]
            made = statistics.mean(reuse.state.num_planned for reuse in reuses)
            row = {"plans_made": made, "rho_mean": statistics.mean(rhos), "rho_max": max(rhos)}
            kept.append(where | {"tolerance": tolerance, "steps": len(reuses[0].imbalances)} | row)
            say(
                f"{name} {mesh_name(mesh)} tolerance {tolerance:g}: {made:g} plans of "
                f"{kept[-1]['steps']} steps, rho {row['rho_mean']:.4f} ({row['rho_max']:.4f} most)"
            )
        for place, reward in enumerate(REWARDS):
            at = PLANNED.index(mesh) * len(REWARDS) + place
            outcomes = [one.rewards[at][1] for one in studies]
            values = [(x.imbalance, x.q_moved, x.kv_moved) for x in outcomes]
            rho, moved_q, moved_kv = np.mean(values, axis=0).tolist()
            row = {"reward": reward, "rho": rho, "moved_q": moved_q, "moved_kv": moved_kv}
            rewards.append(where | row)
            say(
                f"{name} {mesh_name(mesh)} reward {reward:g}: rho {rho:.4f}, Q moved "
                f"{moved_q:.1%}, KV {moved_kv:.1%}"
            )
    return {"kept": kept, "rewards": rewards}


MACHINES = ("h100-datasheet", "b200-datasheet", "a100-datasheet", "l40s-datasheet")
SCHEDULES = {
    "0.41": lambda step, layer: 0.41,
    "0.2": lambda step, layer: 0.2,
    "0.1": lambda step, layer: 0.1,
    "a quarter dense, then 0.41": lambda step, layer: 1.0 if step < 0.25 else 0.41,
    "a quarter dense, then 0.2": lambda step, layer: 1.0 if step < 0.25 else 0.2,
    "a quarter dense, then 0.1": lambda step, layer: 1.0 if step < 0.25 else 0.1,
    "0.05 to 0.6 by layer": lambda step, layer: (0.05, 0.15, 0.3, 0.6)[layer],
}
"""Density by share of the steps, and layer of `NUM_LAYERS`. Video models often begin dense."""
NUM_LAYERS, NUM_STEPS = 4, 16


def _meshes_chosen(name: str, model: MaskModel, quick: bool) -> Iterator[dict[str, Any]]:
    """Yield shares of the meshes that layers choose, and what the choice gains."""
    num_steps = 4 if quick else NUM_STEPS
    for schedule, density_of in SCHEDULES.items():
        layers = [
            [
                _masks_of_density(model, density_of(step / num_steps, layer), layer, step)
                for step in range(num_steps)
            ]
            for layer in range(NUM_LAYERS)
        ]
        for num_ranks in (2, 4, 8):
            meshes = all_degrees(num_ranks)
            plans = [[_plans(steps, model.block_lens, mesh) for mesh in meshes] for steps in layers]
            for machine in MACHINES:
                row = _choices(HardwareProfile.load(machine), meshes, plans)
                shares = ", ".join(f"{x} {share:.0%}" for x, share in row["shares"].items())
                say(
                    f"{name}, {num_ranks} ranks, {machine}, density {schedule}: {shares}; "
                    f"{row['gain']:.3f}x of {row['best_mesh']} alone, {row['gain_late']:.3f}x by "
                    "the step before"
                )
                where = {"model": name, "ranks": num_ranks, "machine": machine}
                yield where | {"density": schedule} | row


def _masks_of_density(model: MaskModel, density: float, layer: int, step: int) -> Any:
    if density == 1.0:
        return np.ones((model.num_heads, *[model.block_lens.size] * 2), np.bool_)
    return synthetic_masks(replace(model, density=density), layer=layer, step=step)


def _plans(steps: list[Any], lens: Any, mesh: tuple[int, int]) -> list[SparsePlan]:
    """Return the plans of a layer's steps on a mesh, kept where they can be, with their work."""
    planner, home = SparsePlanner(*mesh), BlockLayout.striped(lens, *mesh)
    state, plans = PlanReuse(planner, planner.plan(steps[0], home)), list[SparsePlan]()
    for masks in steps:
        state = state.after(masks) if plans else state
        plans.append(state.ran or state.plan)
    return plans


def _choices(
    machine: HardwareProfile,
    meshes: list[tuple[int, int]],
    plans: list[list[list[SparsePlan]]],
) -> dict[str, Any]:
    """Let layers choose in every step; `plans` are by layer, mesh and step."""
    strategies, chosen = Strategies(machine), list[tuple[int, int]]()
    seconds = np.array(
        [[[SIZE.seconds(plan, machine) for plan in of] for of in of_mesh] for of_mesh in plans]
    )
    now_s = late_s = 0.0
    for layer, of_meshes in enumerate(seconds):
        choice = None
        for step, of_step in enumerate(of_meshes.T.tolist()):
            seconds_of = dict(zip(meshes, of_step, strict=True))
            last, choice = choice, strategies.choose(seconds_of, choice)
            now_s += choice.predicted_s
            late_s += seconds[layer, meshes.index((last or choice).degrees), step]
            chosen.append(choice.degrees)
    alone_s = seconds.sum(axis=(0, 2))
    return {
        "shares": {mesh_name(x): chosen.count(x) / len(chosen) for x in meshes},
        "best_mesh": mesh_name(meshes[int(alone_s.argmin())]),
        "best_mesh_s": float(alone_s.min()),
        "gain": float(alone_s.min() / now_s),
        "gain_late": float(alone_s.min() / late_s),  # chosen by the step before, as rules do
    }


# --- sparse -------------------------------------------------------------------------------------

DENSITIES = (0.41, 0.68)
MESHES = ((2, 1), (1, 2))
"""(ring degree, Ulysses degree)"""
GRID, NUM_HEADS, HEAD_DIM = (6, 24, 32), 8, 64
SHARE_TARGET, LARGEST_ERROR = 0.95, 1e-5


def sparse(*, quick: bool = False) -> dict[str, Any]:
    """Time balanced block-sparse attention against the same attention unbalanced.

    Two minutes. Two ranks of one thread; synthetic masks of a small Wan2.1 grid at the densities of
    db-SP's table, blocks of 64 tokens, 8 heads of width 64, float32. "without": a run of blocks on
    each rank, heads in their order. "with": blocks dealt in turns, heads through the solver, and
    moves that pay. Predicted is the ratio of their imbalances with a barrier after each round, as
    db-SP defines it. Outputs are compared with dense masked attention in one process. Target: 95 %
    of the prediction. "split", on the ring alone: each rank has a part of every block, as in
    BurstEngine, which is even without a plan.
    """
    cases = on_ranks(_sparse_on_rank, 5 if quick else 40)
    for case in cases:
        say(
            f"ring {case['ring']} x Ulysses {case['ulysses']}, density {case['density']:.2f}: "
            f"{case['speedup']['median']:.3f}x of {case['predicted']:.3f}x predicted "
            f"({case['share']:.1%}; target {SHARE_TARGET:.0%}); rho {case['before']['rho']:.3f} to "
            f"{case['after']['rho']:.3f}; error {case['error']:.1e}",
            case["share"] >= SHARE_TARGET,
        )
        if "split" in case:
            say(
                f"    time over that of blocks split over all ranks: {case['split']['median']:.3f}x"
            )
        assert case["error"] < LARGEST_ERROR
    return {"cases": cases}


def _sparse_on_rank(rounds: int) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = []
    for ring, ulysses in MESHES:
        names = ("ring", "ulysses")
        mesh = AttentionMesh.of(init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=names))
        for density in DENSITIES:
            model = replace(WAN21, grid=GRID, num_heads=NUM_HEADS, density=density)
            masks, lens = synthetic_masks(model), model.block_lens
            plans = _both_plans(masks, lens, ring, ulysses)
            masks_of = dict.fromkeys(plans, masks)
            if ulysses == 1:
                plans["split"], masks_of["split"] = _split(masks, lens, ring)
            times, parts, error = _sparse_times(mesh, plans, masks_of, rounds)
            rho = {
                name: {"rho": plan.imbalance, "critical_path": plan.critical_path_imbalance}
                for name, plan in plans.items()
            }
            predicted = plans["without"].imbalance / plans["with"].imbalance
            speedup = ratio(times["without"], times["with"])
            split = {"split": ratio(times["with"], times["split"])} if ulysses == 1 else {}
            cases.append(
                {
                    "ring": ring,
                    "ulysses": ulysses,
                    "density": float(masks.mean()),
                    "before": rho["without"],
                    "after": rho["with"],
                    "predicted": predicted,
                    "speedup": speedup,
                    "share": speedup["median"] / predicted,
                    "median_s": parts,
                    "error": error,
                    **split,
                }
            )
    return cases


def _both_plans(masks: Any, lens: Any, ring: int, ulysses: int) -> dict[str, SparsePlan]:
    """Return what a library does that does not look at masks, and what `parallelize` does."""
    home, planner = BlockLayout.contiguous(lens, ring, ulysses), SparseConfig(keep=1.0).planner
    return {
        "without": plan_under(in_order(len(masks), home, home, ring, ulysses), masks),
        "with": planner(ring, ulysses, CallSize(1, HEAD_DIM, 4 * HEAD_DIM)).plan(
            masks, BlockLayout.striped(lens, ring, ulysses)
        ),
    }


def _split(masks: Any, lens: Any, num_ranks: int) -> tuple[SparsePlan, Any]:
    """Return the plan of a ring whose ranks have a part of every block, and its masks."""
    parts = np.stack([(lens + rank) // num_ranks for rank in range(num_ranks)], axis=1).ravel()
    masks = masks.repeat(num_ranks, axis=1).repeat(num_ranks, axis=2)
    home = BlockLayout.striped(parts, num_ranks, 1)
    return plan_under(in_order(len(masks), home, home, num_ranks, 1), masks), masks


def _sparse_times(
    mesh: AttentionMesh,
    plans: dict[str, SparsePlan],
    masks_of: dict[str, Any],
    rounds: int,
    checked: int | None = None,
) -> tuple[dict[str, list[float]], dict[str, dict[str, float]], float]:
    """Return what each plan takes, and the largest error of `checked` rows.

    In seconds: in each round; and the median, with that of its parts on the rank that computes
    most, for which others wait.
    """
    error, calls, spent = 0.0, {}, dict[str, list[list[float]]]()
    with torch.inference_mode(), _timed_parts() as seconds:
        for name, plan in plans.items():
            inputs, rows, expected = _sparse_inputs(plan, masks_of[name], checked)
            call = partial(sparse_attention, *inputs, mesh, plan, rows_of(masks_of[name]))
            error = max(error, float((call()[:, :, rows] - expected).norm() / expected.norm()))
            spent[name] = []
            calls[name] = partial(_with_parts, call, seconds, spent[name])
        times = in_turns(calls, rounds, warmup=1)
    medians = {name: {"call": statistics.median(one)} for name, one in times.items()}
    for name, one in spent.items():
        own = torch.tensor(one[1:], dtype=torch.float64).median(dim=0).values
        every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(every, own)
        busiest = max(every, key=lambda x: float(x[0])).tolist()
        medians[name] |= dict(zip(seconds, busiest, strict=True))
    return times, medians, error


@contextmanager
def _timed_parts() -> Iterator[dict[str, float]]:
    """Sum the seconds of the kernel, of exchanges but in a ring, and of masks, on this rank."""
    seconds: dict[str, float] = {"kernel": 0.0, "exchange": 0.0, "masks": 0.0}
    spans, forward = {EXCHANGE_SPAN: "exchange", MASKS_SPAN: "masks"}, CpuLoopKernel.forward

    @contextmanager
    def timed(part: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        seconds[part] += time.perf_counter() - begun

    def attend(*args: Any) -> Any:
        with timed("kernel"):
            return forward(*args)

    record = "bascule.attention.sparse.attend.record_function"
    with (
        mock.patch.object(CpuLoopKernel, "forward", attend),
        mock.patch(record, lambda span: timed(spans[span])),
    ):
        yield seconds


def _with_parts(
    call: Callable[[], Tensor], seconds: dict[str, float], spent: list[list[float]]
) -> None:
    """Make a call, and append the seconds of its parts."""
    seconds |= dict.fromkeys(seconds, 0.0)
    call()
    spent.append([*seconds.values()])


def _sparse_inputs(
    plan: SparsePlan, masks: Any, checked: int | None
) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """Return this rank's queries, keys and values; some rows, and what attention must give there.

    Rows are spread over all that the rank has.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (1, NUM_HEADS, int(plan.q.lens.sum()), HEAD_DIM)
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    own = np.flatnonzero(np.repeat(plan.q.home, plan.q.lens) == dist.get_rank())
    rows = np.linspace(0, own.size - 1, min(checked or own.size, own.size)).astype(int)
    block_of = np.repeat(np.arange(plan.q.lens.size), plan.q.lens)[own[rows]]
    seen = torch.from_numpy(masks[:, block_of].repeat(plan.kv.lens, axis=2))
    heads = zip(q[0][:, own[rows]], k[0], v[0], seen, strict=True)
    whole = torch.stack([scaled_dot_product_attention(a, b, c, mask) for a, b, c, mask in heads])
    inputs = tuple(x[:, :, own].contiguous() for x in (q, k, v))
    return inputs, torch.from_numpy(rows), whole[None]


# --- sparse_rho ---------------------------------------------------------------------------------

RHOS = (1.0, 1.2, 1.4, 1.6, 1.8)
RHO_TOKENS, RHO_BLOCK, RHO_DENSITY, RHO_CHECKED = 16_384, 256, 0.4, 32
RHO_MESHES = {"heads": (1, 2), "blocks": (2, 1)}
"""(ring degree, Ulysses degree)"""


def sparse_rho(*, quick: bool = False) -> dict[str, Any]:
    """Time what balance gains of block-sparse attention, over the imbalance that it finds.

    Seven minutes. Two ranks of one thread; masks at random at a density of 0.4, 8 heads of width
    64, 16,384 tokens in blocks of 256, float32. "heads": the first four have rho times the mean, on
    two Ulysses ranks. "blocks": the first half of the query blocks, on a ring.
    Balanced over unbalanced is compared with the bound, the ratio of their rho. Target: 95 % of it.
    "median_s" has parts on the rank that computes most. What the kernel gains on it may itself
    differ from rho: a core runs faster while the other waits. The other parts do not depend on rho.
    """
    points = on_ranks(
        _rho_on_rank, RHOS[::4] if quick else RHOS, RHO_TOKENS // 4 if quick else RHO_TOKENS, 5
    )
    for point in points:
        before, after = (point["median_s"][name] for name in ("without", "with"))
        say(
            f"{point['what']}, rho {point['rho']:.3f}: {point['speedup']['median']:.3f}x of "
            f"{point['bound']:.3f}x ({point['share']:.1%}; target {SHARE_TARGET:.0%}); kernel "
            f"{before['kernel'] / after['kernel']:.3f}x, {after['kernel'] / after['call']:.1%} of "
            f"a balanced call; exchange {after['exchange']:.3f} s, masks {after['masks']:.3f} s",
            point["share"] >= SHARE_TARGET,
        )
        assert point["error"] < LARGEST_ERROR
    return {"points": points}


def _rho_on_rank(rhos: tuple[float, ...], tokens: int, rounds: int) -> list[dict[str, Any]]:
    points, lens = list[dict[str, Any]](), block_lens((tokens,), RHO_BLOCK)
    for what, (ring, ulysses) in RHO_MESHES.items():
        names = ("ring", "ulysses")
        mesh = AttentionMesh.of(init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=names))
        for wanted in rhos:
            masks = _masks_of_rho(what, wanted, lens.size)
            plans = _both_plans(masks, lens, ring, ulysses)
            times, parts, error = _sparse_times(
                mesh, plans, dict.fromkeys(plans, masks), rounds, RHO_CHECKED
            )
            rho, after = plans["without"].imbalance, plans["with"].imbalance
            speedup = ratio(times["without"], times["with"])
            points.append(
                {
                    "what": what,
                    "rho": rho,
                    "rho_balanced": after,
                    "bound": rho / after,
                    "speedup": speedup,
                    "share": speedup["median"] * after / rho,
                    "median_s": parts,
                    "error": error,
                }
            )
    return points


def _masks_of_rho(what: str, rho: float, size: int) -> Any:
    """Draw (H, N, N) of which the first half of heads, or of query blocks, has rho of the mean."""
    half = (NUM_HEADS if what == "heads" else size) // 2
    shares = np.repeat([rho, 2 - rho], half)
    shares = shares[:, None, None] if what == "heads" else shares[:, None]
    drawn = np.random.default_rng(0).random((NUM_HEADS, size, size))
    return drawn < RHO_DENSITY * shares


# --- sparse_kernel ------------------------------------------------------------------------------

KERNEL_SHAPE, KERNEL_BLOCK = (1, 4, 8192, 64), 128
KERNEL_DENSITIES, KERNEL_TARGET = (1 / 8, 1 / 4, 0.41, 0.68), 1.25
SCALE = KERNEL_SHAPE[-1] ** -0.5
KERNEL_ERRORS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def sparse_kernel(*, quick: bool = False) -> dict[str, Any]:
    """Time the block-sparse kernel for CPUs over its share of dense attention.

    Three minutes. 4 heads of 8192 tokens and width 64, float32, one thread. Blocks of 128 are seen
    at random, the worst case for a kernel that gathers keys. A ratio is seconds / (density x
    seconds of torch's dense attention) of a round. Outputs are compared with dense masked attention
    of one head in float64.
    """
    torch.set_num_threads(1)
    cases = [row for density in KERNEL_DENSITIES for row in _kernel_rows(density, quick)]
    shape = dict(zip(("num_heads", "num_tokens", "head_dim"), KERNEL_SHAPE[1:], strict=True))
    return {**shape, "target": KERNEL_TARGET, "cases": cases}


def _kernel_rows(density: float, quick: bool) -> Iterator[dict[str, Any]]:
    """Yield forward and backward of one mask."""
    _, num_heads, num_tokens, dim = KERNEL_SHAPE
    blocks = (num_tokens // KERNEL_BLOCK,) * 2
    mask = np.random.default_rng(0).random((num_heads, *blocks)) < density
    seen, share = AttentionMask(blocks=mask_rows(mask, KERNEL_BLOCK)), float(mask.mean())
    generator = torch.Generator().manual_seed(0)
    heads = [torch.randn(KERNEL_SHAPE, generator=generator) for _ in range(4)]
    (q, k, v, grad), (q_, k_, v_, grad_) = heads, [x.view(1, 1, -1, dim) for x in heads]
    dense, kernel = CpuFlashKernel(), CpuLoopKernel()
    whole = dense.forward(q, k, v, EVERYTHING, SCALE)
    part = kernel.forward(q_, k_, v_, seen, SCALE)
    check(part[0].view(KERNEL_SHAPE)[0, -1], [x[0, -1] for x in heads[:3]], mask[-1], SCALE)
    of_whole = Attended(q, k, v, *whole, EVERYTHING, SCALE)
    of_part = Attended(q_, k_, v_, *part, seen, SCALE)
    for direction, candidates in {
        "forward": {
            "dense": lambda: dense.forward(q, k, v, EVERYTHING, SCALE),
            "sparse": lambda: kernel.forward(q_, k_, v_, seen, SCALE),
        },
        "backward": {
            "dense": lambda: dense.backward(grad, of_whole),
            "sparse": lambda: kernel.backward(grad_, of_part),
        },
    }.items():
        times = time_interleaved(candidates, rounds=3 if quick else 7)
        spread = ratio(times["sparse"], [share * seconds for seconds in times["dense"]])
        label, target = f"{direction}, density {share:.3f}", KERNEL_TARGET
        print(verdict(label, spread["median"], target, spread))
        yield {
            "direction": direction,
            "dtype": "float32",
            "block": KERNEL_BLOCK,
            "density": share,
            "over_density_times_dense": spread,
            "times": {name: summary(seconds) for name, seconds in times.items()},
        }


def mask_rows(mask: np.ndarray, block: int) -> MaskRows:
    """Return the rows of all heads' masks, (heads, blocks, blocks)."""
    num_heads, num_blocks, _ = mask.shape
    head, row, column = mask.nonzero()
    bounds = np.arange(num_heads * num_blocks + 1) * block
    counts = np.bincount(head * num_blocks + row, minlength=num_heads * num_blocks)
    row_bounds = np.concatenate([[0], np.cumsum(counts)])
    return MaskRows(bounds, bounds, row_bounds, head * num_blocks + column)


def check(out: Tensor, tensors: list[Tensor], mask: np.ndarray, scale: float) -> None:
    """Compare (S, D) output of the first queries of a head with dense masked attention."""
    q, k, v = (x.double() for x in tensors)
    block, num_blocks = len(q) // mask.shape[0], min(4, mask.shape[0])
    is_seen = torch.from_numpy(mask[:num_blocks].repeat(block, axis=0).repeat(block, axis=1))
    rows = num_blocks * block
    scores = (q[:rows] @ k.T * scale).masked_fill(~is_seen, -math.inf)
    expected = scores.softmax(-1) @ v
    error = float((out[:rows].double() - expected).norm() / expected.norm())
    assert error < KERNEL_ERRORS[out.dtype], f"off by {error}"
