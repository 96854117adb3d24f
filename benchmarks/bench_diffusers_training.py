"""What balance is worth to unmodified models of diffusers: wall clock of training steps.

Run: `python benchmarks/bench_diffusers_training.py` (about ten minutes on two idle cores); writes
results/diffusers_training.json.

Flux and Wan, float32, in DDP on two ranks of one thread. Without balance each rank trains on what
it loaded, a shape at a time; with balance samples change ranks (g1n2), or both ranks share each of
them (g2n1). Two loads: "uneven", where one rank loads large samples and the other small ones, and
"one giant", four samples of which one is so long that only sharing it helps. The ways take turns;
the ratio is that of a step without balance, the quartiles those of the rounds. It is predicted from
compute alone, and, for samples that change ranks, simulated with the wires that `bascule calibrate`
measured: routing of what the model takes, and DDP's reduction of gradients. Target: the simulation
within 5 % of the median on unlike shapes.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _common import calibrated, ratio, time_interleaved, write_results
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from bascule import HardwareProfile, SequenceParallel, TransformerCost, simulate
from bascule.costs import fit_latency
from bascule.diffusers import BalancedModel
from bascule.plan.machine import FORWARD
from bascule.sim import SimulationOptions
from bascule.sim.seconds import Sharding
from bascule.train import train_step

Sample = dict[str, Any]
HEADS, HEAD_DIM, TEXT, TEXT_DIM, CHANNELS = 4, 32, 16, 64, 16
WIDTH = HEADS * HEAD_DIM
TOPOLOGIES = ("g1n2", "g2n1")
MEASURED = (12, 20, 32, 48)  # grids whose steps are timed for the cost model
LOADS: dict[str, tuple[list[tuple[int, int]], list[tuple[int, int]]]] = {
    "uneven": ([(36, 48), (48, 36), (42, 42), (48, 48)], [(16, 20), (20, 16), (24, 24), (20, 20)]),
    "one giant": ([(56, 56), (8, 8)], [(8, 8), (12, 12)]),
}
"""The grid of tokens of each sample, by rank."""


def flux() -> nn.Module:
    """Two double and four single blocks."""
    return FluxTransformer2DModel(
        in_channels=CHANNELS,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=HEADS,
        joint_attention_dim=TEXT_DIM,
        pooled_projection_dim=TEXT_DIM,
        axes_dims_rope=(8, 12, 12),
    )


def wan() -> nn.Module:
    """Four blocks."""
    return WanTransformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        text_dim=TEXT_DIM,
        freq_dim=32,
        ffn_dim=4 * WIDTH,
        num_layers=4,
        rope_max_seq_len=64,
    )


def flux_sample(rows: int, columns: int) -> Sample:
    """An image."""
    tokens = rows * columns
    ids = torch.zeros(tokens, 3)
    ids[:, 1:] = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
    return {
        "hidden_states": torch.randn(1, tokens, CHANNELS),
        "encoder_hidden_states": torch.randn(1, TEXT, TEXT_DIM),
        "pooled_projections": torch.randn(1, TEXT_DIM),
        "timestep": torch.rand(1),
        "img_ids": ids,
        "txt_ids": torch.zeros(TEXT, 3),
        "target": torch.randn(1, tokens, CHANNELS),
        "num_tokens": tokens + TEXT,
    }


def wan_sample(rows: int, columns: int) -> Sample:
    """A video of one latent frame, of which a token is two by two."""
    shape = (1, CHANNELS, 1, 2 * rows, 2 * columns)
    return {
        "hidden_states": torch.randn(shape),
        "encoder_hidden_states": torch.randn(1, TEXT, TEXT_DIM),
        "timestep": torch.rand(1) * 1000,
        "target": torch.randn(shape),
        "num_tokens": rows * columns,
    }


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Sample]]] = {
    "flux": (flux, flux_sample),
    "wan": (wan, wan_sample),
}


def loss_fn(output: Tensor, batch: Sample) -> Tensor:
    """The loss of each sample."""
    return (output - batch["target"]).square().flatten(1).mean(1)


def loss_of(sample: Sample, share: float) -> Callable[[nn.Module], Tensor]:
    """What a script without balance computes of a sample."""
    inputs = {name: x for name, x in sample.items() if name not in ("target", "num_tokens")}
    return lambda model: loss_fn(model(**inputs)[0], sample).sum() * share


def measured_cost(model: nn.Module, make: Callable[[int, int], Sample]) -> TransformerCost:
    """From the seconds of single samples, the mean of both ranks."""
    samples = [make(size, size) for size in MEASURED]
    seconds = torch.zeros(len(samples))
    for place, sample in enumerate(samples):
        times: list[float] = []
        for _ in range(4):
            start = time.perf_counter()
            loss_of(sample, 1.0)(model).backward()
            times.append(time.perf_counter() - start)
        seconds[place] = statistics.median(times[1:])
    dist.all_reduce(seconds)
    lens = [sample["num_tokens"] for sample in samples]
    return fit_latency(lens, (seconds / 2).double().numpy(), WIDTH)


def bytes_per_token(sample: Sample) -> float:
    """What travels with a sample that changes ranks."""
    tensors = [x for x in sample.values() if isinstance(x, Tensor)]
    return sum(x.numel() * x.element_size() for x in tensors) / sample["num_tokens"]


def simulated(
    profile: HardwareProfile, cost: TransformerCost, model: nn.Module, samples: list[list[Sample]]
) -> float:
    """The speed-up of g1n2 by the simulator; the cost model is of forward and backward."""
    num_params = sum(p.numel() for p in model.parameters())
    largest = max((one for own in samples for one in own), key=lambda one: one["num_tokens"])
    options = SimulationOptions(
        passes=FORWARD,
        sharding=Sharding(num_params, shard_ranks=1),
        routed_bytes_per_token=bytes_per_token(largest),
    )
    found = simulate(
        [[[one["num_tokens"] for one in own] for own in samples]],
        profile=profile,
        model=cost,
        topologies=["none", "g1n2"],
        options=options,
    )
    before, after = found.runs
    return before.fbl_s / after.fbl_s


def measure(rank: int, store: str, results: str, rounds: int, profile: HardwareProfile) -> None:
    """All loads of all models; rank 0 saves seconds and predictions."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    found: dict[str, Any] = {}
    for name, (build, make) in MODELS.items():
        cost = measured_cost(build(), make)
        plain = DistributedDataParallel(build())
        balanced = {topology: balanced_model(build(), topology, cost) for topology in TOPOLOGIES}
        for load, grids in LOADS.items():
            torch.manual_seed(rank)
            samples = [[make(*grid) for grid in of_rank] for of_rank in grids]
            one = measured(plain, balanced, samples[rank], rounds)
            simulated_ratio = {"g1n2": simulated(profile, cost, plain, samples)}
            found[f"{name}, {load}"] = one | {"simulated": simulated_ratio}
    if rank == 0:
        torch.save(found, results)
    dist.barrier()
    dist.destroy_process_group()


Balanced = tuple[DistributedDataParallel, BalancedModel]


def balanced_model(model: nn.Module, topology: str, cost: TransformerCost) -> Balanced:
    """A model on some bags."""
    wrapped, sp = DistributedDataParallel(model), SequenceParallel(None, topology, cost)
    return wrapped, BalancedModel(wrapped, sp, length_fn=lambda one: one["num_tokens"])


def measured(
    plain: nn.Module, balanced: Mapping[str, Balanced], samples: list[Sample], rounds: int
) -> dict[str, Any]:
    """Seconds of each way in each round, and the ratio that is predicted."""
    share = 1 / len(samples)

    def step_without() -> None:
        dist.barrier()
        train_step(plain, [loss_of(one, share) for one in samples])

    def step_with(topology: str) -> None:
        dist.barrier()
        model, one = balanced[topology]
        train_step(model, one.microbatches(samples, loss_fn))

    ways = {topology: partial(step_with, topology) for topology in balanced}
    seconds = time_interleaved({"none": step_without, **ways}, rounds=rounds)
    metrics = {topology: one.step.metrics() for topology, (_, one) in balanced.items()}
    predicted = {k: one["makespan_unbalanced"] / one["makespan"] for k, one in metrics.items()}
    return {"seconds": seconds, "predicted": predicted}


def judged(found: Mapping[str, Any]) -> dict[str, Any]:
    """Ratios of the ways, printed."""
    judged: dict[str, Any] = {}
    for name, one in found.items():
        seconds = one["seconds"]
        for way, predicted in one["predicted"].items():
            spread = ratio(seconds["none"], seconds[way])
            judged[f"{name}, {way}"] = {"predicted": predicted, **spread}
            text = (
                f"{name}, {way}: {spread['median']:.2f}x (quartiles {spread['lower_quartile']:.2f} "
                f"to {spread['upper_quartile']:.2f}), predicted {predicted:.2f}x"
            )
            if way in one["simulated"]:
                found_ratio = one["simulated"][way]
                judged[f"{name}, {way}"]["simulated"] = found_ratio
                off = spread["median"] / found_ratio - 1
                text += f", simulated {found_ratio:.2f}x ({off:+.1%} off)"
            print(text)
        judged[name] = {way: statistics.median(times) for way, times in seconds.items()}
    return judged


def main() -> None:
    """Measure in spawned processes, print the ratios, write the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--dry", action="store_true", help="write nothing")
    options = parser.parse_args()
    load_before = os.getloadavg()
    with tempfile.TemporaryDirectory() as folder:
        profile = calibrated(Path(folder), "--ranks", "2", "--d-model", str(WIDTH))
        results = str(Path(folder) / "times.pt")
        spawn(measure, (f"file://{folder}/store", results, options.rounds, profile), nprocs=2)
        found = judged(torch.load(results))
    if not options.dry:
        written = write_results("diffusers_training", {"load_before": load_before, **found})
        print("written:", written)


if __name__ == "__main__":
    main()
