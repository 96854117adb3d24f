"""Training through the balanced loader: what ranks learn equals what one process learns."""

import logging
import random
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bascule.data import step_timer
from tests.helpers.loader_cases import TIMEOUT_S, Schedule, loader_of, sample_of
from tests.helpers.ranks import on_ranks, run_ranks


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


def train(schedule: Schedule, by_token: bool) -> float:
    """Largest difference between what DDP-like ranks and one process learn; rank 0 compares."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    model, alone = Tiny(), Tiny()
    lists = schedule.lists(rank)
    loader = loader_of(
        lists and [[sample_of(*one) for one in group] for group in lists],
        accumulate=schedule.accumulate,
        sync=schedule.sync,
        ends=schedule.ends,
        timeout_s=TIMEOUT_S,
        weight_fn=(lambda sample: len(sample["input_ids"]) - 1) if by_token else None,
    )
    worst, num_moved, done, steps = 0.0, 0, 0, schedule.steps()
    for batch in loader:
        if batch.microbatch == 0:
            model.zero_grad()
        if batch.data:
            loss = mean_loss(model, batch.data, by_token)
            (loss * batch.loss_scale / schedule.accumulate).backward()
        num_moved += batch.verdict.applied
        if batch.microbatch < schedule.accumulate - 1:
            continue
        done += 1
        for parameter in model.parameters():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(grad)
            parameter.data -= LEARNING_RATE * grad / num_ranks
        if rank == 0:
            groups = [group for micro in steps[batch.step] for group in micro]
            alone.zero_grad()
            samples = [sample_of(*one) for group in groups for one in group]
            mean_loss(alone, samples, by_token).backward()
            with torch.no_grad():
                for mine, theirs in zip(alone.parameters(), model.parameters(), strict=True):
                    if mine.grad is not None:
                        mine -= LEARNING_RATE * mine.grad
                    worst = max(worst, float((mine - theirs).abs().max()))
    assert num_moved and done == len(steps)
    return worst


def mean_loss(model: Tiny, samples: list[dict[str, Any]], by_token: bool) -> Tensor:
    """The mean over the tokens, or over the samples' means."""
    if by_token:
        return model.token_losses(samples).mean()
    return torch.stack([model.token_losses([sample]).mean() for sample in samples]).mean()


def schedules(num_ranks: int) -> list[tuple[Schedule, bool]]:
    draw = random.Random(num_ranks)

    def lens(num_microbatches: int) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(draw.randint(2, 40) for _ in range(draw.choice((1, 2, 4))))
            for _ in range(num_microbatches)
        )

    uneven = tuple(lens(7 - 2 * (rank % 3)) for rank in range(num_ranks))
    compute_only = (*uneven[:-1], None)
    return [
        (Schedule(uneven, "finish", accumulate=1), True),
        (Schedule(uneven, "pad_empty", "step", accumulate=2), True),
        (Schedule(uneven, "finish", accumulate=3), False),
        (Schedule(uneven, "drop_last", "step", accumulate=1), False),
        (Schedule(compute_only, "pad_empty", accumulate=2), True),
    ]


def train_all(cases: list[tuple[Schedule, bool]]) -> list[float]:
    return [train(schedule, by_token) for schedule, by_token in cases]


@pytest.mark.parametrize("num_ranks", [2, 3, pytest.param(4, marks=pytest.mark.stress)])
def test_what_is_learnt_equals_one_process(num_ranks: int) -> None:
    cases = schedules(num_ranks)
    for case, worst in zip(cases, run_ranks(train_all, num_ranks, cases)[0], strict=True):
        assert 0.0 < worst < 1e-10, case  # something was compared


@pytest.mark.parametrize("cause", ["slow rank", "loader"])
@on_ranks(3)
def test_the_slow_rank_is_named_with_its_cause(cause: str) -> None:
    """Rank 1 computes, or reads samples, far longer than the others, who wait for it."""
    heard, handler = list[str](), logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("bascule.data.slow_rank").addHandler(handler)
    rank = dist.get_rank()
    seconds = {"slow rank": 0.001, "loader": 0.001} | ({cause: 0.02} if rank == 1 else {})

    def load() -> Iterator[list[dict[str, Any]]]:
        for step in range(60):
            time.sleep(seconds["loader"])
            yield [sample_of(3 * step + rank, 5)]

    loader = loader_of(load())
    with mock.patch.object(step_timer, "moment", lambda *_: time.perf_counter()):
        for _ in loader:
            time.sleep(seconds["slow rank"])
            loader.computed()
            dist.barrier()
    logging.getLogger("bascule.data.slow_rank").removeHandler(handler)
    did = loader.metrics()
    assert (did["slow_rank"], did["slow_cause"]) == (1, cause)
    assert 0.05 < did["slow_share"] <= 1.0
    assert heard == [] if rank else len(heard) == 1 and heard[0].startswith("rank 1 is slow since")
