"""What the Trainer is given, without processes: samples without columns, and batches of padding."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bascule import ConfigError
from bascule.data.loader import BalancedLoader
from bascule.integrations.transformers.balance_config import BalanceConfig
from bascule.integrations.transformers.dataset_columns import Columns
from bascule.integrations.transformers.train_loader import TrainLoader
from bascule.integrations.transformers.train_settings import checked_dataset

BALANCE = BalanceConfig(learns=True)


class Words(Dataset[Any]):
    """Samples with two columns, which remembers the epochs that it was told."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        return index if index == 4 else {"input_ids": [index], "name": str(index)}

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class ManyWords(Words):
    """The same, read many at a time."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


@pytest.mark.parametrize("kind", [Words, ManyWords])
def test_a_dataset_without_columns_is_else_the_same(kind: type[Words]) -> None:
    dataset = kind()
    columns = Columns(dataset, frozenset({"input_ids", "labels"}))
    wanted = [{"input_ids": [0]}, {"input_ids": [1]}, {"input_ids": [2]}, {"input_ids": [3]}, 4]
    assert len(columns) == 5 and [columns[index] for index in range(5)] == wanted
    assert columns.__getitems__([3, 0, 4]) == [wanted[3], wanted[0], 4]
    for epoch in (2, 0):
        columns.set_epoch(epoch)
    assert dataset.epochs == [2, 0]
    Columns(cast(Any, [1]), frozenset()).set_epoch(1)  # what wants to know of no epoch


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("is_padding", [False, True])
def test_no_label_of_padding_counts_where_labels_are_counted(
    counts: bool, is_padding: bool
) -> None:
    given: dict[str, Tensor] = {
        name: torch.tensor([[5, 6, -100]]) for name in ("input_ids", "labels", "shift_labels")
    }
    batch = cast(Any, SimpleNamespace(data=dict(given), is_padding=is_padding, loss_scale=0.25))
    loader = TrainLoader(
        DataLoader(cast(Any, [1])),
        cast(BalancedLoader, [batch]),
        None,
        pack=None,
        inputs_of=dict,
        counts_labels=counts,
    )
    (inputs,) = loader
    aside = inputs.pop("bascule_aside")
    assert isinstance(inputs, Mapping) and aside.loss_scale == 0.25
    assert inputs.keys() == given.keys()
    for name, value in inputs.items():
        is_hidden = counts and is_padding and name != "input_ids"
        wanted = torch.full_like(given[name], -100) if is_hidden else given[name]
        assert value.dtype == wanted.dtype and torch.equal(value, wanted)
        assert (name in aside.labels) == is_hidden
        assert torch.equal(aside.labels.get(name, given[name]), given[name])


def _loss(*_: object, **__: object) -> None:
    """A loss function of the user's own."""


def _trainer(*, counts: bool, loss: object, peers: tuple[int, int, int], **args: object) -> Any:
    """What `checked_dataset` asks a Trainer."""
    usual = {
        "train_sampling_strategy": "random",
        "n_gpu": 0,
        "average_tokens_across_devices": True,
    }
    tp, cp, sp = peers
    return SimpleNamespace(
        args=SimpleNamespace(**usual | args),
        train_dataset=Words(),
        model_accepts_loss_kwargs=counts,
        compute_loss_func=loss,
        get_tp_size=lambda: tp,
        get_cp_size=lambda: cp,
        get_sp_size=lambda: sp,
    )


@pytest.mark.parametrize("averages", [True, False])
@pytest.mark.parametrize("loss", [None, _loss])
@pytest.mark.parametrize("counts", [True, False])
def test_a_loss_over_the_labels_of_one_process_is_refused_whoever_divides_it(
    counts: bool, loss: object, averages: bool
) -> None:
    """The Trainer gives the number of labels to such a model, and to any loss function."""
    trainer = _trainer(
        counts=counts, loss=loss, peers=(1, 1, 1), average_tokens_across_devices=averages
    )
    if averages or not (counts or loss):
        assert checked_dataset(trainer, BALANCE) is trainer.train_dataset
        return
    with pytest.raises(ConfigError, match="average_tokens_across_devices=False"):
        checked_dataset(trainer, BALANCE)


@pytest.mark.parametrize(
    ("peers", "num_gpus"), [((2, 1, 1), 1), ((1, 2, 1), 1), ((1, 1, 2), 1), ((1, 1, 1), 2)]
)
def test_processes_that_are_no_data_parallel_rank_of_one_device_are_refused(
    peers: tuple[int, int, int], num_gpus: int
) -> None:
    trainer = _trainer(counts=False, loss=None, peers=peers, n_gpu=num_gpus)
    with pytest.raises(ConfigError, match="data-parallel rank with one device"):
        checked_dataset(trainer, BALANCE)
