"""Two ranks with a plain DataLoader and a BalancedSampler train as one process does on the same
samples: under DDP, with accelerate, and in the Trainer of transformers."""

import itertools
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from bascule import BalancedSampler, TransformerCost
from bascule.data import SamplerOptions
from tests.helpers.jobs import join_trainer_world
from tests.helpers.ranks import on_ranks, run_ranks
from tests.helpers.trainer_runs import make_trainer

WIDTH, NUM_SAMPLES, EPOCHS = 4, 29, 2
COST = TransformerCost(16)
LENGTHS = np.random.default_rng(0).lognormal(2.0, 1.0, NUM_SAMPLES).astype(int) + 1
KINDS = {
    "even": SamplerOptions(),
    "step": SamplerOptions(sync="step"),
    "free": SamplerOptions(even_counts=False),
    "padded": SamplerOptions(even_counts=False, padded=True),
    "tokens": SamplerOptions(weights=LENGTHS.tolist()),
}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)).double()


def parameters_of(model: nn.Module) -> list[Tensor]:
    return [parameter.detach() for parameter in model.parameters()]


def sample(index: int) -> Tensor:
    random = torch.Generator().manual_seed(index)
    return torch.randn(int(LENGTHS[index]), WIDTH, generator=random, dtype=torch.float64)


def mean_loss(model: nn.Module, samples: list[Tensor], by_token: bool) -> Tensor:
    """One forward of all samples: a mean over tokens, or over samples."""
    each = model(torch.cat(samples)).square().split([len(rows) for rows in samples])
    return torch.cat(each).mean() if by_token else torch.stack([one.mean() for one in each]).mean()


def make_sampler(kind: str, rank: int | None, size: int | None, batch_size: int) -> BalancedSampler:
    """Without a rank: of this process group."""
    given: dict[str, Any] = {"batch_size": batch_size, "accumulate": 2, "seed": 3}
    return BalancedSampler(LENGTHS, COST, num_ranks=size, rank=rank, options=KINDS[kind], **given)


def reference(kind: str, batch_size: int) -> list[Tensor]:
    """One process that takes all samples of each step at once."""
    model, sampler = make_model(), make_sampler(kind, 0, 2, batch_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for step in range(len(sampler) // sampler.accumulate):
            samples = [sample(index) for index in sampler.deal(step).samples.tolist()]
            mean_loss(model, samples, kind == "tokens").backward()
            optimizer.step()
            optimizer.zero_grad()
    return parameters_of(model)


def trained(kind: str, batch_size: int) -> list[Tensor]:
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = make_sampler(kind, None, None, batch_size)
    samples: Any = list(map(sample, range(NUM_SAMPLES)))
    loader = DataLoader(samples, batch_sampler=sampler, collate_fn=list)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for number, batch in enumerate(loader):
            loss = mean_loss(model, batch, kind == "tokens") * sampler.loss_scale(number) / 2
            if number % 2 == 0:
                with model.no_sync():
                    loss.backward()
                continue
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return parameters_of(model)


@on_ranks(2)
def test_two_ranks_train_as_one_process_on_the_same_samples() -> None:
    for kind, batch_size in itertools.product(KINDS, (3, 1)):  # a short step; two in a batch
        want, got = reference(kind, batch_size), trained(kind, batch_size)
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-13, msg=f"{kind} {batch_size}")


# --- accelerate


def with_accelerate(is_shard: bool, folder: str) -> tuple[list[Tensor], int]:
    from accelerate import Accelerator
    from accelerate.data_loader import DataLoaderShard

    join_trainer_world()
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    bare = make_model()
    model, optimizer = accelerator.prepare(
        bare, torch.optim.SGD(bare.parameters(), lr=0.1, momentum=0.9)
    )
    sampler = make_sampler("even", None, None, 3)
    accelerator.register_for_checkpointing(sampler)
    samples: Any = list(map(sample, range(NUM_SAMPLES)))
    make: Any = DataLoaderShard if is_shard else DataLoader
    loader = make(samples, batch_sampler=sampler, collate_fn=list)

    def use(batches: Iterable[Any]) -> int:
        num = 0
        for num, batch in enumerate(batches, start=1):
            with accelerator.accumulate(model):
                loss = mean_loss(model, batch, False) * sampler.loss_scale(num - 1)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        return num

    if is_shard:  # which sets the epoch of its sampler by itself
        return parameters_of(bare), sum(use(loader) for _ in range(EPOCHS))
    num_batches = use(loader)
    sampler.set_epoch(1)
    num_batches += use(itertools.islice(loader, 2))
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()  # the first rank writes what all read
    state = sampler.state_dict()
    sampler.load_state_dict(state | {"epoch": 5})
    accelerator.load_state(folder)
    assert sampler.state_dict() == state
    return parameters_of(bare), num_batches + use(loader)


@pytest.mark.parametrize("is_shard", [False, True], ids=["plain loader", "DataLoaderShard"])
def test_accelerate_with_a_loader_that_is_not_prepared(is_shard: bool, tmp_path: Path) -> None:
    want = reference("even", 3)
    for got, num_batches in run_ranks(with_accelerate, 2, is_shard, str(tmp_path)):
        assert num_batches == EPOCHS * 6
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-13)


# --- the Trainer


class Texts(torch.utils.data.Dataset[Any]):
    """Texts of unlike lengths; knows which were read."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(1)
        self.ids = [torch.randint(0, 32, (int(n) + 1,), generator=random) for n in LENGTHS]
        self.read: list[int] = []

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.read.append(index)
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def trainer_of(folder: str, batch_sampler: bool, **given: Any) -> Any:
    from accelerate.data_loader import DataLoaderShard
    from transformers import Trainer

    class SampledTrainer(Trainer):
        def get_train_dataloader(self) -> Any:
            sampler = BalancedSampler(
                LENGTHS + 1,
                COST,
                batch_size=self.args.train_batch_size,
                num_ranks=self.args.world_size,
                rank=self.args.process_index,
                accumulate=self.args.gradient_accumulation_steps,
                options=SamplerOptions(shuffle=self.args.train_sampling_strategy == "random"),
            )
            return DataLoaderShard(
                self.train_dataset, batch_sampler=sampler, collate_fn=self.data_collator
            )

    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    base = SampledTrainer if batch_sampler else Trainer
    given = {"train_sampling_strategy": "random", "dataset": Texts(), **settings, **given}
    return make_trainer(folder, "qwen2", balanced=False, base=base, **given)


def the_trainer(folder: str) -> dict[str, Any]:
    join_trainer_world()
    in_order = {"train_sampling_strategy": "sequential", "max_steps": 3}
    plain = trainer_of(folder, False, **in_order)
    balanced = trainer_of(folder, True, **in_order)
    whole = trainer_of(folder, True, save_strategy="steps", save_steps=6)
    again = trainer_of(folder, True)
    for trainer in (plain, balanced, whole):
        trainer.train()
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-6")
    trainers = {"plain": plain, "balanced": balanced, "whole": whole, "again": again}
    found: dict[str, Any] = {name: parameters_of(one.model) for name, one in trainers.items()}
    return found | {"read": whole.train_dataset.read, "rest": again.train_dataset.read}


def test_the_trainer_takes_it_in_a_loader_that_accelerate_does_not_shard() -> None:
    pytest.importorskip("transformers")
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(the_trainer, 2, folder)
    for left in ranks:
        for pair in (("balanced", "plain"), ("again", "whole")):
            torch.testing.assert_close(*map(left.get, pair), rtol=1e-4, atol=1e-5)
    read = np.concatenate([left["read"] for left in ranks])
    assert np.array_equal(np.bincount(read), np.full(NUM_SAMPLES, EPOCHS))
    halves = [left["read"][: len(left["read"]) // 2] for left in ranks]
    assert halves[0] != ranks[0]["read"][-len(halves[0]) :]  # the second epoch has another order
    rest = np.concatenate([left["rest"] for left in ranks])
    assert NUM_SAMPLES > np.unique(rest).size == rest.size  # what was trained is not read again
