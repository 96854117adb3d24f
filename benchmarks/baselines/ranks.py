"""Two ranks over gloo that really run the steps of policies: a small transformer, in turns."""

import statistics
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from measuring import on_ranks
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from bascule.machine.costs import TransformerCost
from bascule.machine.fits import fit_latency
from baselines.algorithms import Step
from baselines.cases import DATA, Case, makespan, samples_with_repeats
from baselines.policies import padded, whole

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
    seconds = on_ranks(_run_on_rank, batches)
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
    loaded = [[case.lens[samples].tolist() for samples in ranks] for ranks in step]
    if not is_padded:
        return loaded
    return [[[max(lens)] * len(lens) for lens in ranks] for ranks in loaded]


def _run_on_rank(batches: dict[str, Batches]) -> dict[str, list[float]]:
    """Return the seconds of each step of each policy on the slower rank; policies take turns."""
    torch.manual_seed(0)
    model, rank = nn.ModuleList(Block() for _ in range(LAYERS)), dist.get_rank()
    names = list(batches)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-1, len(batches[names[0]])):  # the first one warms up
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            taken = torch.tensor(_step(model, batches[name][max(number, 0)], rank))
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            if number >= 0:
                seconds[name].append(float(taken))
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
