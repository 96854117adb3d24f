"""What the Trainer is given, without processes: samples without columns, and batches of padding."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bascule.data.loader import BalancedLoader
from bascule.integrations.transformers.dataset_columns import Columns
from bascule.integrations.transformers.trainer import _TrainLoader


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


@pytest.mark.parametrize("ignores", [False, True])
@pytest.mark.parametrize("is_padding", [False, True])
def test_no_label_of_padding_counts_where_labels_are_counted(
    ignores: bool, is_padding: bool
) -> None:
    given: dict[str, Tensor] = {
        name: torch.tensor([[5, 6, -100]]) for name in ("input_ids", "labels", "shift_labels")
    }
    batch = cast(Any, SimpleNamespace(data=dict(given), is_padding=is_padding, loss_scale=0.25))
    loader = _TrainLoader(
        DataLoader(cast(Any, [1])),
        cast(BalancedLoader, [batch]),
        ignore_padding=ignores,
    )
    (inputs,) = loader
    assert isinstance(inputs, Mapping) and inputs.pop("bascule_loss_scale") == 0.25
    assert inputs.keys() == given.keys()
    for name, value in inputs.items():
        is_hidden = ignores and is_padding and name != "input_ids"
        wanted = torch.full_like(given[name], -100) if is_hidden else given[name]
        assert value.dtype == wanted.dtype and torch.equal(value, wanted)
