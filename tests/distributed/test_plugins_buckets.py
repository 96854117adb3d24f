"""A script with the structure of diffusers' dreambooth, as it is and as the guide changes it."""

import math
import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, Dataset

from bascule.plugins.buckets import BalancedBuckets
from tests.helpers.jobs import join_trainer_world
from tests.helpers.pages import blocks_of
from tests.helpers.ranks import run_ranks

pytest.importorskip("accelerate")

F64 = torch.float64
COUNTS, SHAPES, BATCH_SIZE = [9, 4, 1, 3], [(4, 4), (2, 4), (2, 2), (6, 2)], 2


class Images(Dataset[Any]):
    """Images of four buckets, as the scripts keep them."""

    def __init__(self) -> None:
        self.buckets = SHAPES
        draw = torch.Generator().manual_seed(0)
        self.pixel_values = [
            (torch.randn(3, *SHAPES[bucket], generator=draw, dtype=F64), bucket)
            for bucket, count in enumerate(COUNTS)
            for _ in range(count)
        ]

    def __len__(self) -> int:
        return len(self.pixel_values)

    def __getitem__(self, index: int) -> Tensor:
        return self.pixel_values[index][0]


class BucketBatchSampler(BatchSampler):
    """With the arguments, attributes and order of the scripts' own."""

    def __init__(self, dataset: Images, batch_size: int, drop_last: bool, seed: int) -> None:
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        self.random = random.Random(seed)
        self.bucket_indices: list[list[int]] = [[] for _ in dataset.buckets]
        for index, (_, bucket) in enumerate(dataset.pixel_values):
            self.bucket_indices[bucket].append(index)

    def __len__(self) -> int:
        return sum(len(one) // self.batch_size for one in self.bucket_indices)

    def __iter__(self) -> Any:
        size, batches = self.batch_size, list[list[int]]()
        for indices in self.bucket_indices:
            order = self.random.sample(indices, len(indices))
            batches += [order[i : i + size] for i in range(0, len(order) - size + 1, size)]
        return iter(self.random.sample(batches, len(batches)))


class Gradients(torch.optim.SGD):
    """Keeps the gradients and the number of samples of each step, and changes nothing."""

    def step(self, closure: Any = None) -> None:
        self.kept = [*getattr(self, "kept", []), gradient_of(self.param_groups[0]["params"])]


def gradient_of(parameters: Any) -> Tensor:
    return torch.cat(
        [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]
    )


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1, bias=False, dtype=F64)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch.movedim(1, -1)).square().flatten(1).mean(1).mean()


def read_loss(read: list[list[int]], model: nn.Module, batch: Tensor) -> Tensor:
    read.append(list(batch.shape))
    return loss_of(model, batch)


def scripts() -> list[str]:
    """The script as it is, and as it is changed."""
    (block,) = (b for b in blocks_of("docs/plugins.md") if "BalancedBuckets(" in b.text)
    lines = block.text.splitlines()
    return ["\n".join(line[1:] for line in lines if line[:1] in kinds) for kinds in (" -", " +")]


def test_the_guide_changes_six_lines() -> None:
    (block,) = (b for b in blocks_of("docs/plugins.md") if "BalancedBuckets(" in b.text)
    assert [line[:1] for line in block.text.splitlines()].count("+") == 6


def trained(accumulate: int) -> list[tuple[list[Tensor], list[list[int]], float]]:
    """Of both scripts: gradients of each step, samples that this rank read, gradients left."""
    join_trainer_world()
    from accelerate import Accelerator

    runs = []
    for script in scripts():
        read: list[list[int]] = []
        dataset, model = Images(), make_model()
        optimizer = Gradients(model.parameters(), lr=0.1)
        names = {
            "accelerator": Accelerator(cpu=True, gradient_accumulation_steps=accumulate),
            "args": SimpleNamespace(train_batch_size=BATCH_SIZE, seed=3, num_train_epochs=2),
            "BucketBatchSampler": BucketBatchSampler,
            "collate_fn": torch.stack,
            "loss_of": partial(read_loss, read),
            "math": math,
            "optimizer": optimizer,
            "torch": torch,
            "train_dataset": dataset,
            "transformer": model,
        }
        exec(compile(script, "script", "exec"), names)
        left = float(gradient_of(model.parameters()).abs().sum())
        runs.append((optimizer.kept, read, left))
    return runs


def alone(dataset: Images, accumulate: int) -> list[Tensor]:
    """Of each step of the changed script, in one process."""
    from accelerate import Accelerator

    Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    theirs = BucketBatchSampler(dataset, BATCH_SIZE, True, 3)
    ranks = [BalancedBuckets(theirs, 2, rank) for rank in range(2)]
    grads = []
    for _ in range(2):
        used: list[int] = []
        for number, step in enumerate(zip(*ranks, strict=True)):
            scales = [sampler.loss_scale(number) for sampler in ranks]
            used += [i for batch, scale in zip(step, scales, strict=True) if scale for i in batch]
            if (number + 1) % accumulate:
                continue
            model = make_model()
            for index in used:
                (loss_of(model, dataset[index][None]) / len(used)).backward()
            grads.append(gradient_of(model.parameters()))
            used = []
    return grads


@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_are_even_and_gradients_those_of_one_process(accumulate: int) -> None:
    (wanted,) = run_ranks(alone, 1, Images(), accumulate)
    (plain, ours), (other_plain, other) = run_ranks(trained, 2, accumulate)
    for grads, _, left in (ours, other):
        assert len(grads) == len(wanted) and left == 0.0
        for one, reference in zip(grads, wanted, strict=True):
            assert torch.allclose(one, reference, rtol=1e-10, atol=0)
    uneven = [
        sum(a != b for a, b in zip(one[1], two[1], strict=True))
        for one, two in ((plain, other_plain), (ours, other))
    ]
    assert uneven[0] > 0 and uneven[1] <= 4  # the last of several buckets, twice an epoch
