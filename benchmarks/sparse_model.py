"""Time denoising steps of a small Wan with block-sparse attention, without and with balance."""

import math
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from measuring import met, on_ranks, ratio
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional

from bascule import SparseConfig, parallelize
from bascule.attention.sparse.attend import EXCHANGE_SPAN, MASKS_SPAN
from bascule.attention.sparse.timing import CallShape
from bascule.diffusers import ParallelHandle
from bascule.diffusers.sparse_layers import PLAN_SPAN
from bascule.sparse import Strategies, measure_attention_latency
from bascule.workload.masks import WAN21, synthetic_masks

GRID, NUM_HEADS, HEAD_DIM, NUM_LAYERS, NUM_STEPS, BLOCK = (8, 24, 32), 8, 64, 2, 5, 64
NUM_TOKENS = math.prod(GRID)
MODEL = replace(WAN21, grid=GRID, num_heads=NUM_HEADS, density=0.41, block=BLOCK)
MESHES = {"Ulysses": (1, 2), "ring": (2, 1)}
"""(ring degree, Ulysses degree)"""
SPANS = {"planning": PLAN_SPAN, "masks": MASKS_SPAN, "exchange": EXCHANGE_SPAN}
LARGEST_SHARE, LARGEST_ERROR = 0.05, 1e-5
_attend = functional.scaled_dot_product_attention


def sparse_model(*, quick: bool = False) -> dict[str, Any]:
    """Time denoising steps of a small Wan with block-sparse attention, without and with balance.

    Five minutes. Two ranks; WanTransformer3DModel with random weights, 6,144 tokens, 8 heads of
    width 64, float32; synthetic masks for each layer and step. Five copies take their steps in
    turns: without balance (heads in order, runs of blocks) and with the defaults of `SparseConfig`,
    each on Ulysses and on a ring; and "strategies", each layer on the mesh that is predicted to be
    the fastest. Every step is compared with one process: dense attention with the mask. Shares of a
    step come from other steps, by the spans that the library gives profiles. Targets: exact to
    1e-5; planning, and exchange that is due to balance, below 5 % of a step.
    """
    results = on_ranks(_model_on_rank, 1 if quick else 5)
    _report(results)
    return results


def _report(results: dict[str, Any]) -> None:
    """The verdicts."""
    for name, arm in results["arms"].items():
        shares = ", ".join(f"{part} {share:.1%}" for part, share in arm["shares"].items())
        print(
            f"        {name}: {arm['step_s']:.3f} s a step; rho {arm['rho']:.3f} "
            f"({arm['critical_path']:.3f} on the critical path); {shares}; "
            f"meshes {arm['meshes']}; error {arm['error']:.1e}"
        )
        assert arm["error"] < LARGEST_ERROR
    for name in MESHES:
        arm, faster = results["arms"][f"with, {name}"], results["speedup"][name]
        due = arm["shares"]["planning"] + arm["moved"] * arm["shares"]["exchange"]
        print(
            f"{met(due < LARGEST_SHARE)}  {name}: planning and the exchange "
            f"that balance adds take {due:.1%} of a step (target below {LARGEST_SHARE:.0%}; all "
            f"exchange: {arm['shares']['exchange']:.1%}); {faster['median']:.3f}x the steps "
            f"without ({faster['lower_quartile']:.3f} to {faster['upper_quartile']:.3f})"
        )
    print(f"        strategies over the faster mesh: {results['speedup']['strategies']}")


def _model_on_rank(turns: int) -> dict[str, Any]:
    names = ("ring", "ulysses")
    meshes = {k: init_device_mesh("cpu", v, mesh_dim_names=names) for k, v in MESHES.items()}
    shape = CallShape(NUM_TOKENS, NUM_HEADS, HEAD_DIM, BLOCK, torch.float32)
    with torch.inference_mode():
        latency = measure_attention_latency(meshes["ring"], shape, device="cpu")
        masks = np.stack([_masks_of(step) for step in range(NUM_STEPS)])
        expected = [_in_one_process(masks[step], step) for step in range(NUM_STEPS)]
        arms = _make_arms(meshes, masks, Strategies(latency))
        errors, times, seen = _steps_in_turns(arms, expected, turns)
        rows = {name: _summary(handle, errors[name], seen[name]) for name, handle in arms.items()}
    for name, seconds in times.items():
        rows[name]["step_s"] = statistics.median(seconds)
    best = [min(pair) for pair in zip(times["with, Ulysses"], times["with, ring"], strict=True)]
    speedup = {name: ratio(times[f"without, {name}"], times[f"with, {name}"]) for name in MESHES}
    speedup["strategies"] = ratio(best, times["strategies"])
    return {"arms": rows, "speedup": speedup, "latency": asdict(latency)}


def _masks_of(step: int) -> Any:
    """(layers, heads, blocks, blocks)."""
    return np.stack([synthetic_masks(MODEL, layer=x, step=step) for x in range(NUM_LAYERS)])


def _make_model() -> Any:
    """The same weights in every copy and on every rank."""
    torch.manual_seed(0)
    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=NUM_HEADS,
        attention_head_dim=HEAD_DIM,
        in_channels=4,
        out_channels=4,
        text_dim=64,
        freq_dim=64,
        ffn_dim=2 * NUM_HEADS * HEAD_DIM,
        num_layers=NUM_LAYERS,
        rope_max_seq_len=64,
    ).eval()


def _inputs_of(step: int) -> dict[str, Any]:
    """Of one step."""
    generator = torch.Generator().manual_seed(step)
    frames, height, width = GRID
    return {
        "hidden_states": torch.randn(1, 4, frames, 2 * height, 2 * width, generator=generator),
        "timestep": torch.tensor([1000.0 - step]),
        "encoder_hidden_states": torch.randn(1, 32, 64, generator=generator),
    }


def _in_one_process(masks: Any, step: int) -> Tensor:
    """What a step must give: dense attention of the unsplit model with the masks, head by head."""
    of_layers = iter(torch.from_numpy(masks))

    def attend(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if key.shape[2] != NUM_TOKENS:
            return _attend(query, key, value, *args, **kwargs)
        dense = (x.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1) for x in next(of_layers))
        heads = zip(query[0], key[0], value[0], dense, strict=True)
        return torch.stack([_attend(q, k, v, mask) for q, k, v, mask in heads])[None]

    with mock.patch.object(functional, "scaled_dot_product_attention", attend):
        return _make_model()(**_inputs_of(step), return_dict=False)[0]


def _make_arms(
    meshes: dict[str, DeviceMesh], masks: Any, strategies: Strategies
) -> dict[str, ParallelHandle]:
    """The copies of the model."""
    run = BLOCK * math.ceil(NUM_TOKENS / BLOCK / 2)
    without = SparseConfig(masks=masks, block=BLOCK, method="in_order", stripe=run)
    balanced = SparseConfig(masks=masks, block=BLOCK)
    free = SparseConfig(masks=masks, block=BLOCK, strategies=strategies)
    arms: dict[str, ParallelHandle] = {}
    for name, mesh in meshes.items():
        arms[f"without, {name}"] = parallelize(_make_model(), mesh=mesh, sparse=without)
        arms[f"with, {name}"] = parallelize(_make_model(), mesh=mesh, sparse=balanced)
    arms["strategies"] = parallelize(_make_model(), mesh=meshes["ring"], sparse=free)
    return arms


def _steps_in_turns(
    arms: dict[str, ParallelHandle], expected: list[Tensor], turns: int
) -> tuple[dict[str, float], dict[str, list[float]], dict[str, dict[str, Any]]]:
    """Largest error, seconds of each step, and what another turn shows."""
    errors, times = dict.fromkeys(arms, 0.0), {name: list[float]() for name in arms}
    for turn in range(turns + 1):  # the first warms up
        for handle in arms.values():
            handle.restart()
        for step, output in enumerate(expected):
            for name in list(arms)[:: 1 if (turn + step) % 2 else -1]:
                dist.barrier()
                start = time.perf_counter()
                out = arms[name].model(**_inputs_of(step), return_dict=False)[0]
                dist.barrier()
                if turn > 0:
                    times[name].append(time.perf_counter() - start)
                error = float((out - output).norm() / output.norm())
                errors[name] = max(errors[name], error)
    return errors, times, {name: spent(handle) for name, handle in arms.items()}


def spent(handle: ParallelHandle) -> dict[str, Any]:
    """Shares of a turn by span, of the rank that spent most; and the layers of every step."""
    handle.restart()
    layers: list[Any] = []
    seconds = dict.fromkeys(SPANS.values(), 0.0)

    @contextmanager
    def timed(span: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        seconds[span] += time.perf_counter() - begun

    modules = (
        "bascule.attention.sparse.attend",
        "bascule.diffusers.sparse_layers",
    )
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch(f"{module}.record_function", timed))
        dist.barrier()
        start = time.perf_counter()
        for step in range(NUM_STEPS):
            handle.model(**_inputs_of(step), return_dict=False)
            layers += handle.explain().sparse
        total = time.perf_counter() - start
    shares = torch.tensor([seconds[span] / total for span in SPANS.values()])
    dist.all_reduce(shares, dist.ReduceOp.MAX)
    return {"shares": dict(zip(SPANS, shares.tolist(), strict=True)), "layers": layers}


def _summary(handle: ParallelHandle, error: float, seen: dict[str, Any]) -> dict[str, Any]:
    """What is reported of a copy."""
    plans = [layer.used for layer in seen["layers"]]
    sent = sum(plan.wire_bytes(HEAD_DIM, 4) for plan in plans)
    needed = sum(_ulysses_bytes(plan) for plan in plans)
    last = handle.explain().sparse
    return {
        "error": error,
        "rho": statistics.mean(plan.imbalance for plan in plans),
        "critical_path": statistics.mean(plan.critical_path_imbalance for plan in plans),
        "shares": seen["shares"],
        "moved": (sent - needed) / max(sent, 1),
        "meshes": {
            f"U{u}R{r}": sum((p.ulysses_degree, p.ring_degree) == (u, r) for p in plans)
            for r, u in MESHES.values()
        },
        "plans_made": sum(layer.num_planned for layer in last),
        "plans_kept": sum(layer.num_kept for layer in last),
    }


def _ulysses_bytes(plan: Any) -> int:
    """Bytes of its exchanges that are needed with heads in order, and nothing moved."""
    if plan.ulysses_degree == 1:
        return 0
    rows = NUM_HEADS * NUM_TOKENS * (plan.ulysses_degree - 1) // plan.ulysses_degree
    return 4 * rows * HEAD_DIM * 4
