"""Two ranks over gloo that really run the steps of policies: a small transformer, in turns."""

import multiprocessing
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from _baseline_cases import DATA, Case, makespan, samples_with_repeats
from _baseline_policies import padded, whole
from _baselines import Step
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from bascule.plan.costs import TransformerCost
from bascule.plan.fits import fit_latency

NUM_RANKS, WIDTH, HEADS, LAYERS = 2, 128, 2, 2
SHRINK = 16
"""Lengths are divided by it, so that a step takes a fraction of a second."""

PROBES = (32, 128, 512, 1024)

Batches = list[list[list[list[int]]]]
"""[step][microbatch][rank]: lengths of the samples."""


class Block(nn.Module):
    """Attention and an MLP over sequences of their own, packed or padded."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, lens: list[int]) -> Tensor:
        """Rows (tokens, width) of sequences of these lengths; equal ones are one batch."""
        rows = self.qkv(self.norms[0](x))
        if len(set(lens)) == 1:
            attended = _attend(rows.view(len(lens), lens[0], 3 * WIDTH)).reshape(-1, WIDTH)
        else:
            attended = torch.cat([_attend(part[None])[0] for part in rows.split(lens)])
        x = x + self.out(attended)
        return x + self.mlp(self.norms[1](x))


def _attend(rows: Tensor) -> Tensor:
    """(batch, tokens, 3 * width) to (batch, tokens, width)."""
    q, k, v = rows.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
    return scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)


def compute(model: nn.ModuleList, lens: list[int]) -> None:
    """Forward and backward of a microbatch; nothing where there are no samples."""
    if not lens:
        return
    x = torch.ones(sum(lens), WIDTH)
    for block in model:
        x = block(x, lens)
    x.square().mean().backward()


def fitted() -> TransformerCost:
    """What a sequence costs here."""
    torch.set_num_threads(1)
    model = nn.ModuleList(Block() for _ in range(LAYERS))
    seconds: list[float] = []
    for length in PROBES:
        times: list[float] = []
        for _ in range(5):
            start = time.perf_counter()
            compute(model, [length])
            times.append(time.perf_counter() - start)
        seconds.append(statistics.median(times[1:]))
    return fit_latency(PROBES, seconds, WIDTH, num_layers=LAYERS)


def measure(num_steps: int) -> dict[str, Any]:
    """For each mix and policy: time of the same work over that of nothing, and as predicted."""
    cost = replace(fitted(), seconds_per_unit=None, fit_error=None)
    return {data: _measure(two_ranks(data, cost), num_steps) for data in DATA}


def two_ranks(data: str, cost: TransformerCost) -> Case:
    """The epoch of eight ranks, shorter, for two."""
    base = Case.draw(data, 8)
    lens = np.maximum(base.lens // SHRINK, 8)
    return Case(data, NUM_RANKS, lens, base.batch_size * 8 // NUM_RANKS, cost)


def _measure(case: Case, num_steps: int) -> dict[str, Any]:
    batches: dict[str, Batches] = {}
    predicted: dict[str, float] = {}
    work: dict[str, list[float]] = {}
    for make, is_padded in ((whole, False), (padded, True)):
        for policy in make(case, num_steps):
            name = policy.name if not is_padded or policy.is_ours else f"{policy.name}, padded"
            steps = [policy.step(number) for number in range(num_steps)]
            batches[name] = [lengths(case, step, is_padded=is_padded) for step in steps]
            work[name] = [float(case.costs[samples_with_repeats(s)].sum()) for s in steps]
            spent = sum(makespan(case, step, padded=is_padded) for step in steps)
            predicted[name] = spent / sum(work[name])
    seconds = run(batches)
    found: dict[str, Any] = {}
    for name in batches:
        ratios = [
            (a / b) / (c / d)
            for a, b, c, d in zip(
                seconds[name], work[name], seconds["nothing"], work["nothing"], strict=True
            )
        ]
        found[name] = {
            "ratio": statistics.median(ratios),
            "predicted": predicted[name] / predicted["nothing"],
            "step_s": statistics.median(seconds[name]),
        }
    return found


def lengths(case: Case, step: Step, *, is_padded: bool) -> list[list[list[int]]]:
    """What the ranks compute on."""
    given = [[case.lens[samples].tolist() for samples in ranks] for ranks in step]
    if not is_padded:
        return given
    return [[[max(lens)] * len(lens) for lens in ranks] for ranks in given]


def run(batches: dict[str, Batches]) -> dict[str, list[float]]:
    """Seconds of each step of each policy: of the slower rank."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(NUM_RANKS, context) as pool:
        store = str(Path(folder) / "store")
        tasks = [pool.submit(run_rank, rank, store, batches) for rank in range(NUM_RANKS)]
        of_rank = [task.result() for task in tasks]
    return {name: np.max([times[name] for times in of_rank], axis=0).tolist() for name in batches}


def run_rank(rank: int, store: str, batches: dict[str, Batches]) -> dict[str, list[float]]:
    """All steps on one rank; policies take turns in each step, and in who begins."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS)
    torch.manual_seed(0)
    model = nn.ModuleList(Block() for _ in range(LAYERS))
    names = list(batches)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-1, len(batches[names[0]])):  # the first one warms up
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            taken = _step(model, batches[name][max(number, 0)], rank)
            if number >= 0:
                seconds[name].append(taken)
    dist.destroy_process_group()
    return seconds


def _step(model: nn.ModuleList, step: list[list[list[int]]], rank: int) -> float:
    """Seconds of all microbatches, after each of which gradients are averaged."""
    dist.barrier()
    start = time.perf_counter()
    for ranks in step:
        compute(model, ranks[rank])
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
    taken = time.perf_counter() - start
    model.zero_grad()
    return taken
