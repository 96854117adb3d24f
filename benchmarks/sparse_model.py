"""Time denoising steps of small video models: dense, block-sparse, and block-sparse in balance."""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from diffusers.models.transformers.cogvideox_transformer_3d import CogVideoXTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from measuring import met, on_ranks, ratio, say
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from bascule import HardwareProfile, SparseConfig, parallelize
from bascule.attention.sparse.attend import EXCHANGE_SPAN, MASKS_SPAN
from bascule.diffusers import ParallelHandle
from bascule.diffusers.sparse_layers import PLAN_SPAN
from bascule.plan.topology import all_degrees
from bascule.sim.sparse_study import BEFORE, DEFAULT, Setting, mesh_name
from bascule.workload.masks import COGVIDEOX15, WAN21, MaskModel, synthetic_masks

GRID, HEAD_DIM, NUM_LAYERS, NUM_STEPS, BLOCK, TEXT_DIM = (5, 24, 32), 64, 2, 3, 64, 64
MESHES = {"1 rank": (2, 1, 1), "Ulysses": (1, 1, 2), "ring": (1, 2, 1)}
"""(replicas, ring degree, Ulysses degree): two ranks, or each by itself"""
FOUR = {"U4R1": (1, 1, 4), "U2R2": (1, 2, 2), "U1R4": (1, 4, 1)}
ALONE, SHARED = ("dense", "sparse"), ("dense", "in order", "balanced")
MACHINES = ("h100-datasheet", "l40s-datasheet")
SPANS = {"planning": PLAN_SPAN, "masks": MASKS_SPAN, "exchange": EXCHANGE_SPAN}
LARGEST_SHARE, LARGEST_ERROR = 0.05, 1e-5
FOUR_KEYS = ("cpu_s", "rho", "error")
_attend = functional.scaled_dot_product_attention


def sparse_model(*, quick: bool = False) -> dict[str, Any]:
    """Time denoising steps of a small Wan: dense, block-sparse, and block-sparse in balance.

    Eight minutes. Two ranks of one thread; WanTransformer3DModel with random weights, float32. Of
    Wan2.1-14B's 40 layers of 40 heads of width 128 and 75,600 tokens, it has 2 layers of 10 heads
    of width 64 and 3,840 tokens; synthetic masks of density 0.41 for each layer and step. Eight
    copies take their steps in turns: dense, heads and blocks in order, and with the defaults of
    `SparseConfig`, each on Ulysses and on a ring; and dense and sparse on each rank by itself.
    "attention" is the module, with its projections. Every sparse step is compared with one process:
    dense attention with the mask. Targets: exact to 1e-5; planning, and exchange that is due to
    balance, below 5 % of a step. "four ranks" has the CPU seconds of the busiest of four ranks,
    which share two cores: these leave out what ranks wait for. "planned" has rho and bytes on 1, 2
    and 4 ranks of this shape and of the whole one, with what a call is predicted to take.
    """
    return _results("Wan2.1", quick)


def sparse_cogvideox(*, quick: bool = False) -> dict[str, Any]:
    """Time denoising steps of a small CogVideoX, as `sparse_model` does those of a Wan.

    Nine minutes. Of CogVideoX1.5-5B's 42 layers of 48 heads of width 64, 226 tokens of text and
    85,680 of video, it has 2 layers of 12 heads, 56 tokens of text and 3,840 of video.
    """
    return _results("CogVideoX1.5", quick)


def _results(name: str, quick: bool) -> dict[str, Any]:
    results = on_ranks(_model_on_rank, name, MESHES, 1 if quick else 3)
    four = on_ranks(_model_on_rank, name, FOUR, 1, num_ranks=4)
    for arm, found in (results["arms"] | four["arms"]).items():
        say(
            f"{arm}: {found['step_s']:.3f} s a step, {found['attention_s']:.3f} s of it attention; "
            f"{found['cpu_s']:.3f} CPU s; rho {found['rho']:.3f}; error {found['error']:.1e}"
        )
        assert found["error"] < LARGEST_ERROR
    for arm, shares in results["shares"].items():
        due = shares["planning"] + shares["moved"] * shares["exchange"]
        print(
            f"{met(due < LARGEST_SHARE)}  {arm}: planning and the exchange that balance adds take "
            f"{due:.1%} of a step (target below {LARGEST_SHARE:.0%}; all exchange: "
            f"{shares['exchange']:.1%})"
        )
    for label, ratios in results["speedup"].items():
        say(", ".join(f"{label}, {part}: {x['median']:.3f}x" for part, x in ratios.items()))
    cpu = {label: ratios["cpu"] for label, ratios in four["speedup"].items()}
    for label, one in cpu.items():
        say(f"{label}, CPU of the busiest of four ranks: {one['median']:.3f}x")
    results["four ranks"] = {
        "arms": {x: {key: row[key] for key in FOUR_KEYS} for x, row in four["arms"].items()},
        "speedup": cpu,
    }
    shape = SHAPES[name]
    planned = [*_planned("scaled", shape.masks, HEAD_DIM, 4)]
    if not quick:
        planned += _planned("whole", shape.whole, shape.whole_head_dim, 2)
    return results | {"planned": planned}


# --- the models ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A model, its inputs and its masks."""

    whole: MaskModel
    whole_head_dim: int
    num_heads: int
    text_tokens: int  # that attention sees with the video
    make: Callable[["Shape"], Any]
    inputs: Callable[["Shape", torch.Generator], dict[str, Tensor]]

    @property
    def masks(self) -> MaskModel:
        """Masks of the scaled model."""
        sizes = {"num_heads": self.num_heads, "text_tokens": self.text_tokens}
        return replace(self.whole, grid=GRID, block=BLOCK, **sizes)


def _wan(shape: Shape) -> Any:
    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=shape.num_heads,
        attention_head_dim=HEAD_DIM,
        in_channels=4,
        out_channels=4,
        text_dim=TEXT_DIM,
        freq_dim=64,
        ffn_dim=2 * shape.num_heads * HEAD_DIM,
        num_layers=NUM_LAYERS,
        rope_max_seq_len=64,
    )


def _wan_inputs(shape: Shape, generator: torch.Generator) -> dict[str, Tensor]:
    frames, height, width = GRID
    return {
        "hidden_states": torch.randn(1, 4, frames, 2 * height, 2 * width, generator=generator),
        "encoder_hidden_states": torch.randn(1, 32, TEXT_DIM, generator=generator),
    }


def _cogvideox(shape: Shape) -> Any:
    return CogVideoXTransformer3DModel(
        num_attention_heads=shape.num_heads,
        attention_head_dim=HEAD_DIM,
        in_channels=4,
        out_channels=4,
        time_embed_dim=64,
        text_embed_dim=TEXT_DIM,
        num_layers=NUM_LAYERS,
        max_text_seq_length=shape.text_tokens,
        use_rotary_positional_embeddings=True,
    )


def _cogvideox_inputs(shape: Shape, generator: torch.Generator) -> dict[str, Tensor]:
    frames, height, width = GRID
    return {
        "hidden_states": torch.randn(1, frames, 4, 2 * height, 2 * width, generator=generator),
        "encoder_hidden_states": torch.randn(1, shape.text_tokens, TEXT_DIM, generator=generator),
    }


SHAPES = {
    "Wan2.1": Shape(WAN21, 128, 10, 0, _wan, _wan_inputs),
    "CogVideoX1.5": Shape(COGVIDEOX15, 64, 12, 56, _cogvideox, _cogvideox_inputs),
}


def _make_model(shape: Shape) -> Any:
    """The same weights in every copy and on every rank."""
    torch.manual_seed(0)
    return shape.make(shape).eval()


def _output(model: Any, shape: Shape, step: int) -> Tensor:
    inputs = shape.inputs(shape, torch.Generator().manual_seed(step))
    return model(timestep=torch.tensor([1000.0 - step]), **inputs, return_dict=False)[0]


def _masks_of(shape: Shape, step: int) -> Any:
    """(layers, heads, blocks, blocks)."""
    return np.stack([synthetic_masks(shape.masks, layer=x, step=step) for x in range(NUM_LAYERS)])


def _in_one_process(shape: Shape, masks: Any, step: int) -> Tensor:
    """What a step must give: dense attention of the unsplit model with the masks, head by head."""
    of_layers, lens = iter(masks), shape.masks.block_lens

    def attend(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if key.shape[2] != lens.sum():
            return _attend(query, key, value, *args, **kwargs)
        dense = (torch.from_numpy(x.repeat(lens, 0).repeat(lens, 1)) for x in next(of_layers))
        heads = zip(query[0], key[0], value[0], dense, strict=True)
        return torch.stack([_attend(q, k, v, mask) for q, k, v, mask in heads])[None]

    with mock.patch.object(functional, "scaled_dot_product_attention", attend):
        return _output(_make_model(shape), shape, step)


# --- on ranks -----------------------------------------------------------------------------------


def _model_on_rank(name: str, meshes: dict[str, Any], turns: int) -> dict[str, Any]:
    shape, names = SHAPES[name], ("replicas", "ring", "ulysses")
    masks = np.stack([_masks_of(shape, step) for step in range(NUM_STEPS)])
    run = BLOCK * math.ceil(math.prod(GRID) / BLOCK / dist.get_world_size())
    configs = {
        "dense": None,
        "sparse": SparseConfig(masks=masks, block=BLOCK),
        "in order": SparseConfig(masks=masks, block=BLOCK, method="in_order", stripe=run),
        "balanced": SparseConfig(masks=masks, block=BLOCK),
    }
    arms: dict[str, ParallelHandle] = {}
    for of_mesh, degrees in meshes.items():
        mesh = init_device_mesh("cpu", degrees, mesh_dim_names=names)
        for arm in ALONE if of_mesh == "1 rank" else SHARED:
            model = _make_model(shape)
            arms[f"{arm}, {of_mesh}"] = parallelize(model, mesh=mesh, sparse=configs[arm])
    with torch.inference_mode():
        dense = [_output(_make_model(shape), shape, step) for step in range(NUM_STEPS)]
        sparse = [_in_one_process(shape, masks[step], step) for step in range(NUM_STEPS)]
        outputs = {name: dense if "dense" in name else sparse for name in arms}
        errors, parts = _steps_in_turns(arms, shape, outputs, turns)
        plans = {arm: _plans_of(handle) for arm, handle in arms.items()}
        spent = {x: _spent(arms[x], shape) for x in arms if "balanced" in x}
    speedup: dict[str, Any] = {}
    for of_mesh in (x for x in meshes if x != "1 rank"):
        befores = f"in order, {of_mesh}", f"dense, {of_mesh}", "sparse, 1 rank"
        for before in (x for x in befores if x in arms):
            label, after = f"{of_mesh} balanced over {before}", f"balanced, {of_mesh}"
            speedup[label] = {part: ratio(x[before], x[after]) for part, x in parts.items()}
    rows = {
        arm: {f"{part}_s": statistics.median(x[arm]) for part, x in parts.items()}
        | {
            "error": errors[arm],
            "rho": statistics.mean(plan.imbalance for plan in of_arm) if of_arm else 1.0,
        }
        for arm, of_arm in plans.items()
    }
    return {"arms": rows, "shares": spent, "speedup": speedup}


@contextmanager
def _attention_seconds(model: Any) -> Iterator[list[float]]:
    """Collect the seconds of the calls of self-attention within."""
    seconds, starts = list[float](), list[float]()
    modules = [module for name, module in model.named_modules() if name.endswith("attn1")]
    assert len(modules) == NUM_LAYERS
    hooks = [
        hook
        for module in modules
        for hook in (
            module.register_forward_pre_hook(lambda *_: starts.append(time.perf_counter())),
            module.register_forward_hook(
                lambda *_: seconds.append(time.perf_counter() - starts.pop())
            ),
        )
    ]
    yield seconds
    for hook in hooks:
        hook.remove()


Times = dict[str, list[float]]


def _steps_in_turns(
    arms: dict[str, ParallelHandle], shape: Shape, outputs: dict[str, list[Tensor]], turns: int
) -> tuple[dict[str, float], dict[str, Times]]:
    """Return the largest error; of each step, of the rank with most: seconds, of CPU, attention."""
    errors = dict.fromkeys(arms, 0.0)
    parts = {part: {name: list[float]() for name in arms} for part in ("step", "attention", "cpu")}
    for turn in range(turns + 1):  # the first warms up
        for handle in arms.values():
            handle.restart()
        for step in range(NUM_STEPS):
            for name in list(arms)[:: 1 if (turn + step) % 2 else -1]:
                with _attention_seconds(arms[name].model) as attention:
                    dist.barrier()
                    start, cpu_start = time.perf_counter(), time.process_time()
                    out = _output(arms[name].model, shape, step)
                    cpu_s = time.process_time() - cpu_start
                    dist.barrier()
                    total = time.perf_counter() - start
                local = torch.tensor([total, sum(attention), cpu_s], dtype=torch.float64)
                dist.all_reduce(local, dist.ReduceOp.MAX)
                expected = outputs[name][step]
                error = float((out - expected).norm() / expected.norm())
                errors[name] = max(errors[name], error)
                for seconds, of_arms in zip(local.tolist(), parts.values(), strict=True):
                    if turn > 0:
                        of_arms[name].append(seconds)
    return errors, parts


def _plans_of(handle: ParallelHandle) -> list[Any]:
    """Return what the layers of the last step ran with."""
    return [layer.used for layer in handle.explain().sparse]


def _spent(handle: ParallelHandle, shape: Shape) -> dict[str, float]:
    """Return shares of steps by span, of the rank that spent most; and what moves of the bytes."""
    handle.restart()
    plans: list[Any] = []
    seconds = dict.fromkeys(SPANS.values(), 0.0)

    @contextmanager
    def timed(span: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        seconds[span] += time.perf_counter() - begun

    modules = "bascule.attention.sparse.attend", "bascule.diffusers.sparse_layers"
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch(f"{module}.record_function", timed))
        dist.barrier()
        start = time.perf_counter()
        for step in range(NUM_STEPS):
            _output(handle.model, shape, step)
            plans += _plans_of(handle)
        total = time.perf_counter() - start
    shares = torch.tensor([seconds[span] / total for span in SPANS.values()])
    dist.all_reduce(shares, dist.ReduceOp.MAX)
    sent = sum(plan.wire_bytes(HEAD_DIM, 4) for plan in plans)
    needed = sum(_ulysses_bytes(plan, shape) for plan in plans)
    moved = {"moved": (sent - needed) / max(sent, 1)}
    return dict(zip(SPANS, shares.tolist(), strict=True)) | moved


def _ulysses_bytes(plan: Any, shape: Shape) -> int:
    """Bytes of its exchanges that are needed with heads in order, and nothing moved."""
    if plan.ulysses_degree == 1:
        return 0
    rows = shape.num_heads * int(shape.masks.block_lens.sum())
    return 4 * rows * (plan.ulysses_degree - 1) // plan.ulysses_degree * HEAD_DIM * 4


# --- without ranks ------------------------------------------------------------------------------


def _planned(of: str, model: MaskModel, head_dim: int, itemsize: int) -> Iterator[dict[str, Any]]:
    """Yield rho, bytes of a rank and predicted calls, on all meshes of 1, 2 and 4 ranks."""
    lens = model.block_lens
    machines = {x: HardwareProfile.load(x) for x in MACHINES}
    setting = Setting((), lens, lens, machines[MACHINES[0]], head_dim, itemsize, 1.005, 2.0, 0.05)
    layers = [synthetic_masks(model, layer=layer) for layer in range(NUM_LAYERS)]
    for mesh in (mesh for num_ranks in (1, 2, 4) for mesh in all_degrees(num_ranks)):
        for way in (BEFORE, DEFAULT):
            plans = [setting.plan(way, masks, mesh) for masks in layers]
            row_bytes, num_ranks = head_dim * itemsize, mesh[0] * mesh[1]
            passed = statistics.mean(2 * plan.most_kv_tokens * row_bytes for plan in plans)
            sent = statistics.mean(plan.wire_bytes(head_dim, itemsize) for plan in plans)
            row = {
                "rho": statistics.mean(plan.imbalance for plan in plans),
                "exchanged_mib": sent / num_ranks / 2**20,
                "passed_mib": passed * (mesh[0] - 1) / 2**20,  # around the ring
                "call_ms": {
                    name: 1e3 * statistics.mean(setting.size.seconds(x, machine) for x in plans)
                    for name, machine in machines.items()
                },
            }
            say(
                f"{of} shape, {mesh_name(mesh)} {way}: rho {row['rho']:.4f}, a rank exchanges "
                f"{row['exchanged_mib']:.1f} MiB and passes on {row['passed_mib']:.1f} MiB a call"
            )
            yield {"shape": of, "mesh": mesh_name(mesh), "way": way} | row
