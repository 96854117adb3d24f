"""Training through the balanced loader: what ranks learn equals what one process learns."""

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bascule.data.steps import Batch
from tests.helpers.loader_cases import COST, FAST, TIMEOUT_S, Schedule, loader_with, sample_of
from tests.helpers.ranks import run_ranks


class Tiny(torch.nn.Module):
    """Embeds tokens and, where a sample has them, patches; predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = torch.nn.Embedding(50, 6)
        self.position = torch.nn.Embedding(4, 6)
        self.patch = torch.nn.Linear(3, 6)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(6, 12), torch.nn.GELU(), torch.nn.Linear(12, 50)
        )
        self.double()

    def forward(self, ids: Tensor, positions: Tensor, cu_seqlens: Tensor, seen: Tensor) -> Tensor:
        """(T, 50) logits; every token sees the mean of its segment, and what its sample shows."""
        x = self.embed(ids) + self.position(positions % 4)
        lens = cu_seqlens.diff().long()
        of_token = torch.arange(lens.numel()).repeat_interleave(lens)
        means = torch.zeros(lens.numel(), 6).double().index_add(0, of_token, x)
        means = means / lens.clamp(min=1)[:, None]
        return self.mlp(x + means[of_token] + seen[of_token])

    def token_losses(self, samples: list[dict[str, Any]]) -> Tensor:
        """Of every token that has a successor, sample after sample."""
        lens = torch.tensor([len(sample["input_ids"]) for sample in samples])
        cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lens.cumsum(0)])
        ids = torch.cat([sample["input_ids"] for sample in samples])
        positions = torch.cat([torch.arange(n) for n in lens.tolist()])
        seen = torch.stack([self.shown(sample) for sample in samples])
        logits = self(ids, positions, cu_seqlens, seen)
        keep = torch.ones(ids.numel(), dtype=torch.bool)
        keep[cu_seqlens[1:] - 1] = False
        return torch.nn.functional.cross_entropy(logits[keep], ids.roll(-1)[keep], reduction="none")

    def shown(self, sample: dict[str, Any]) -> Tensor:
        patches = sample.get("pixel_values")
        if patches is None or not len(patches):
            return torch.zeros(6).double()
        # Each image counts by its own grid, so images must stay with their grids.
        weights = sample["image_grid_thw"].prod(dim=1)
        parts = patches.double().split(weights.tolist())
        means = [self.patch(part).mean(dim=0) * (1 + k) for k, part in enumerate(parts)]
        return torch.stack(means).sum(dim=0)


LEARNING_RATE = 0.3


def train(schedule: Schedule, weights: str, packed: bool = False) -> float:
    """Largest difference between what DDP-like ranks and one process learn; rank 0 compares."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    model, alone = Tiny(), Tiny()
    lists = schedule.lists(rank)
    settings: dict[str, Any] = {"collate_fn": list}
    if packed:
        settings = {"pack": 64}
    if weights == "tokens":
        settings["weight_fn"] = lambda sample: len(sample["input_ids"]) - 1
    loader = loader_with(
        lists and [[trainable(*one, packed) for one in group] for group in lists],
        cost=COST,
        accumulate=schedule.accumulate,
        sync=schedule.sync,
        ends=schedule.ends,
        min_gain=0.0,
        bytes_per_s=FAST,
        timeout_s=TIMEOUT_S,
        **settings,
    )
    worst, moved, steps = 0.0, 0, []
    whole: dict[int, list[dict[str, Any]]] = {}
    for step, groups_of in enumerate(schedule.steps()):
        flat = [one for groups in groups_of for group in groups for one in group]
        whole[step] = [trainable(*one, packed) for one in flat]
    for batch in loader:
        if batch.microbatch == 0:
            model.zero_grad()
        loss = packed_loss(model, batch) if packed else plain_loss(model, batch, weights)
        if loss is not None:
            (loss * batch.loss_scale / schedule.accumulate).backward()
        moved += batch.verdict.applied
        if batch.microbatch < schedule.accumulate - 1:
            continue
        steps.append(batch.step)
        for parameter in model.parameters():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(grad)
            parameter.data -= LEARNING_RATE * grad / num_ranks
        if rank == 0 and not packed:
            alone.zero_grad()
            reference(alone, whole[batch.step], weights).backward()
            with torch.no_grad():
                for mine, theirs in zip(alone.parameters(), model.parameters(), strict=True):
                    if mine.grad is not None:
                        mine -= LEARNING_RATE * mine.grad
                    worst = max(worst, float((mine - theirs).abs().max()))
    if packed and rank == 0:
        worst = packed_difference(model, alone, schedule, steps)
    assert steps == list(range(len(steps))) and len(steps) >= 1
    assert moved or not schedule.ends
    return worst


def trainable(sample_id: int, length: int, packed: bool) -> dict[str, Any]:
    sample = sample_of(sample_id, length)
    if packed:
        return {"input_ids": sample["input_ids"], "labels": sample["input_ids"].clone()}
    return sample


def plain_loss(model: Tiny, batch: Batch, weights: str) -> Tensor | None:
    return reference(model, batch.data, weights) if batch.data else None


def reference(model: Tiny, samples: list[dict[str, Any]], weights: str) -> Tensor:
    """The mean over the tokens, or over the samples' means."""
    if weights == "tokens":
        return model.token_losses(samples).mean()
    return torch.stack([model.token_losses([sample]).mean() for sample in samples]).mean()


def packed_loss(model: Tiny, batch: Batch) -> Tensor | None:
    data = batch.data
    keep = data["shift_labels"] != -100
    if not keep.any():
        return None
    num_segments = len(data["cu_seqlens"]) - 1
    logits = model(
        data["input_ids"],
        data["positions"],
        data["cu_seqlens"],
        torch.zeros(num_segments, 6).double(),
    )
    return torch.nn.functional.cross_entropy(logits[keep], data["shift_labels"][keep])


def packed_difference(model: Tiny, alone: Tiny, schedule: Schedule, steps: list[int]) -> float:
    """One process that sees what packs of at most 64 tokens took from each rank in each step."""
    of_rank = []
    for rank in range(len(schedule.lens)):
        flat = [one for group in schedule.lists(rank) or [] for one in group]
        packs: list[list[tuple[int, int]]] = []
        total = 65
        for one in flat:
            if total + one[1] > 64:
                packs.append([])
                total = 0
            packs[-1].append(one)
            total += one[1]
        of_rank.append(packs)
    most = max(map(len, of_rank))
    assert len(steps) == -(-most // schedule.accumulate)
    for step in steps:
        micros = range(step * schedule.accumulate, (step + 1) * schedule.accumulate)
        ones = [one for packs in of_rank for k in micros if k < len(packs) for one in packs[k]]
        alone.zero_grad()
        alone.token_losses([trainable(*one, packed=True) for one in ones]).mean().backward()
        with torch.no_grad():
            for mine in alone.parameters():
                if mine.grad is not None:
                    mine -= LEARNING_RATE * mine.grad
    pairs = zip(alone.parameters(), model.parameters(), strict=True)
    differences = [(mine - theirs).detach().abs() for mine, theirs in pairs]
    return max(float(difference.max()) for difference in differences)


def trained(num_ranks: int) -> list[tuple[Schedule, str, bool]]:
    draw = random.Random(num_ranks)

    def lens(num_microbatches: int) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(draw.randint(2, 40) for _ in range(draw.choice((1, 2, 4))))
            for _ in range(num_microbatches)
        )

    uneven = tuple(lens(7 - 2 * (rank % 3)) for rank in range(num_ranks))
    compute_only = (*uneven[:-1], None)
    return [
        (Schedule(uneven, "finish", accumulate=1), "tokens", False),
        (Schedule(uneven, "pad_empty", "step", accumulate=2), "tokens", False),
        (Schedule(uneven, "finish", accumulate=3), "samples", False),
        (Schedule(uneven, "drop_last", "step", accumulate=1), "samples", False),
        (Schedule(compute_only, "pad_empty", accumulate=2), "tokens", False),
        (Schedule(uneven, "finish", accumulate=2), "tokens", True),
    ]


def train_all(cases: list[tuple[Schedule, str, bool]]) -> list[float]:
    return [train(schedule, weights, packed) for schedule, weights, packed in cases]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_what_is_learnt_equals_one_process(num_ranks: int) -> None:
    cases = trained(num_ranks)
    for case, worst in zip(cases, run_ranks(train_all, num_ranks, cases)[0], strict=True):
        assert worst < 1e-10, case
        assert worst > 0.0  # something was compared
