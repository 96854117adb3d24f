"""CPU time of the host for a Flux of eight blocks over two ranks: bascule and diffusers' own way.

Both run in turns on the same ranks. Run `python benchmarks/bench_flux_host.py [--quick]`.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from diffusers.models._modeling_parallel import ContextParallelConfig
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from torch.multiprocessing.spawn import spawn

import bascule


def flux() -> Any:
    torch.manual_seed(1)
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=4,
        num_single_layers=4,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=8,
        pooled_projection_dim=8,
        axes_dims_rope=(4, 4, 8),
    ).eval()


def rank_main(rank: int, path: str, num_turns: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    inputs: dict[str, Any] = {
        "hidden_states": torch.randn(1, 16, 4),
        "encoder_hidden_states": torch.randn(1, 8, 8),
        "pooled_projections": torch.randn(1, 8),
        "timestep": torch.ones(1),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(8, 3),
    }
    for x in inputs.values():
        dist.broadcast(x, 0)
    inputs["return_dict"] = False  # diffusers gathers nothing else
    ours, theirs = flux(), flux()
    bascule.parallelize(ours, ulysses_degree=2)
    with mock.patch("torch.accelerator.device_count", lambda: 1):  # diffusers divides by it
        theirs.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2))
    seconds: dict[str, list[float]] = {"bascule": [], "diffusers": []}

    def timed(call: Callable[[], object]) -> float:
        dist.barrier()
        before = time.process_time()
        for _ in range(5):
            call()
        return (time.process_time() - before) / 5

    with torch.no_grad():
        difference = (ours(**inputs)[0] - theirs(**inputs)[0]).abs().max()
        for turn in range(num_turns):
            for name, model in (("bascule", ours), ("diffusers", theirs)):
                one = timed(lambda model=model: model(**inputs))
                if turn:
                    seconds[name].append(one)
    if rank == 0:
        ratio = median(a / b for a, b in zip(*seconds.values(), strict=True))
        for name, values in seconds.items():
            print(f"{name}: {median(values) * 1e3:.2f} ms of CPU a pass")
        print(f"ratio {ratio:.2f}, outputs differ by {difference:.1e} at most")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few turns")
    turns = 4 if parser.parse_args().quick else 40
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        spawn(rank_main, (f"{folder}/store", turns), nprocs=2)
