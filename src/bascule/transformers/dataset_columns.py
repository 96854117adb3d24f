"""A dataset, or ready-made packs, without the columns that a model does not take."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from torch.utils.data import Dataset


class Columns(Dataset[Any]):
    """A dataset whose samples have the named columns only."""

    def __init__(self, dataset: Dataset[Any], names: frozenset[str]) -> None:
        self._dataset = dataset
        self._names = names

    def __len__(self) -> int:
        return len(self._dataset)  # pyright: ignore[reportArgumentType]

    def __getitem__(self, index: int) -> Any:
        return self._kept(self._dataset[index])

    def __getitems__(self, indices: list[int]) -> list[Any]:
        read = getattr(self._dataset, "__getitems__", None)  # as DataLoader looks for it
        samples = [self._dataset[index] for index in indices] if read is None else read(indices)
        return [self._kept(sample) for sample in samples]

    def set_epoch(self, epoch: int) -> None:
        """Tell the dataset which epoch begins, if it wants to know."""
        tell = getattr(self._dataset, "set_epoch", None)
        if tell is not None:
            tell(epoch)

    def _kept(self, sample: Any) -> Any:
        return _kept(sample, self._names)


def unpacked_columns(
    unpack: Callable[[Any], list[Any]], names: frozenset[str]
) -> Callable[[Any], list[Any]]:
    """The samples of an item with the named columns only: `unpack` itself needs the others."""

    @wraps(unpack)  # its name is what ranks compare
    def unpacked(item: Any) -> list[Any]:
        return [_kept(sample, names) for sample in unpack(item)]

    return unpacked


def _kept(sample: Any, names: frozenset[str]) -> Any:
    if not isinstance(sample, Mapping):
        return sample
    return {name: value for name, value in sample.items() if name in names}
