"""A training script as people write it, which knows nothing of bascule: DDP, a profiler, a loop."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule

WIDTH, NUM_SAMPLES = 192, 6


def samples_of(rank: int, step: int) -> list[Tensor]:
    """(L, WIDTH) samples: log-normal lengths; in each step, one rank in two has longer ones."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    median = 130 if (rank + step) % 2 else 350
    lens = median * (torch.randn(NUM_SAMPLES, generator=generator) * 0.6).exp()
    return [torch.randn(int(length), WIDTH, generator=generator) for length in lens.clamp(32, 1536)]


def new_model() -> DistributedDataParallel:
    """Three transformer layers, without dropout."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
    return DistributedDataParallel(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False))


class Trainer:
    """One step after the other."""

    def __init__(self) -> None:
        self.model = new_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def step(self, samples: Sequence[Tensor], scale: float = 1.0) -> None:
        """Forward, backward and update; the loss is the mean over the samples."""
        losses = [self.model(sample[None]).square().mean() for sample in samples]
        (torch.stack(losses).mean() * scale).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def profiled(
    folder: Path, rank: int, num_steps: int, step: Callable[[int], Any], *, warmup: int = 2
) -> None:
    """Write the trace of some steps, after a few that only warm up."""

    def save(profiler: Any) -> None:
        profiler.export_chrome_trace(str(folder / f"rank{rank}.json"))

    plan = schedule(wait=0, warmup=warmup, active=num_steps, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=plan, on_trace_ready=save) as profiler:
        for number in range(warmup + num_steps):
            step(number)
            profiler.step()


def write_lens(path: Path, num_ranks: int, num_steps: int) -> None:
    """What a run knows of its data: one line for each step and rank."""
    rows = [
        {"step": step, "rank": rank, "lens": [len(sample) for sample in samples_of(rank, step)]}
        for step in range(num_steps)
        for rank in range(num_ranks)
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
