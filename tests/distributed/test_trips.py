"""How far data travels in a steady call: files of bascule that it enters, and functions it calls.

The limits are what was counted last. A change that lowers a number lowers its limit here.
"""

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import bascule
from tests.helpers.ranks import run_fresh_ranks

HOME = str(Path(bascule.__file__).parent)
COST = bascule.TransformerCost(d_model=64, num_layers=2)
LENS = [[1000, 30, 7], [64]]

LIMITS = {  # (files, calls)
    "plan": (27, 308),
    "route": (14, 90),
    "attend": (21, 187),
    "attend and backward": (23, 375),
    "mesh": (28, 427),
    "loader": (34, 660),
    "pipeline": (35, 1900),
}

Trip = tuple[list[str], int]


def trip(call: Callable[[], object], times: int = 1) -> Trip:
    """Files entered and functions called, in all threads of this rank, by one of so many calls."""
    files, num_calls = set[str](), 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal num_calls
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(HOME):
            num_calls += 1
            files.add(name.removeprefix(HOME))

    threading.setprofile(count)  # of threads that begin from here on
    sys.setprofile(count)
    try:
        for _ in range(times):
            call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return sorted(files), num_calls // times


def steps() -> dict[str, Trip]:
    rank = dist.get_rank()
    parallel = bascule.SequenceParallel(None, "g2n1", COST)
    step = parallel.plan(LENS[rank])
    x = torch.randn(sum(LENS[rank]), 4, 8)
    rows = step.route(x=x)["x"]

    def attend_and_back() -> None:
        q = rows.clone().requires_grad_()
        step.attend(q, rows, rows).sum().backward()

    calls: dict[str, Callable[[], object]] = {
        "plan": lambda: parallel.plan(LENS[rank]),
        "route": lambda: step.route(x=x),
        "attend": lambda: step.attend(rows, rows, rows),
        "attend and backward": attend_and_back,
    }
    return {name: steady(call) for name, call in calls.items()}


def steady(call: Callable[[], object], warm_up: int = 3) -> Trip:
    for _ in range(warm_up):
        call()
    return trip(call)


def mesh() -> dict[str, Trip]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ring", "ulysses"))
    q = torch.randn(1, 4, 16, 8)
    with bascule.sequence_parallel(mesh):
        return {"mesh": steady(lambda: functional.scaled_dot_product_attention(q, q, q))}


def loader() -> dict[str, Trip]:
    data: list[Any] = [{"input_ids": torch.arange(5 + 37 * (7 * i % 11))} for i in range(400)]
    own: Any = torch.utils.data.DataLoader(data[dist.get_rank() :: 2], 4, collate_fn=list)  # pyright: ignore
    balanced = bascule.BalancedLoader(own, cost=COST)
    steps: list[object] = []

    def whole() -> None:  # its thread begins within, and goes ahead of those who take
        steps.extend(balanced)

    files, num_calls = trip(whole)
    return {"loader": (files, num_calls // len(steps))}


def pipeline() -> dict[str, Trip]:
    from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel

    torch.manual_seed(1)
    model: Any = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=8,
        pooled_projection_dim=8,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=False,
    )
    inputs = {
        "hidden_states": torch.randn(1, 16, 4),
        "encoder_hidden_states": torch.randn(1, 6, 8),
        "pooled_projections": torch.randn(1, 8),
        "timestep": torch.ones(1),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(6, 3),
    }
    with bascule.parallelize(model.eval(), ulysses_degree=2), torch.no_grad():
        return {"pipeline": steady(lambda: model(**inputs), warm_up=20)}


@pytest.mark.parametrize("calls", [steps, mesh, loader, pipeline])
def test_a_steady_call_makes_no_longer_trip(calls: Callable[[], dict[str, Trip]]) -> None:
    for trips in run_fresh_ranks(calls, 2):
        for name, (files, num_calls) in trips.items():
            most_files, most_calls = LIMITS[name]
            assert len(files) <= most_files and num_calls <= most_calls, (
                f"{name}: {len(files)} files, {num_calls} calls: {' '.join(files)}"
            )
