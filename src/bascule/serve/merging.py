"""Calls of a transformer for several requests, computed as one call of a larger batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bascule.comm.items import mapped
from bascule.diffusers.pending import Pending, samples_of
from bascule.diffusers.split_table import SplitTable

Inputs = Mapping[str, Any]  # of a call, by name


def fits(call: Inputs, other: Inputs, table: SplitTable) -> bool:
    """Return whether two calls of a model can be one: inputs without a batch must be equal."""
    if call.keys() != other.keys():
        return False
    num = samples_of(call, table.unbatched).number
    for name, value in call.items():
        form = _form(name, value, table, num)
        if form != _form(name, other[name], table, num):
            return False
        if (form is None or name in table.alike) and not _equal(value, other[name]):
            return False
    return True


def merged(calls: Sequence[Inputs], table: SplitTable) -> dict[str, Any]:
    """Return the inputs of one call in place of calls of which each fits the first one."""
    num, inputs = samples_of(calls[0], table.unbatched).number, dict(calls[0])
    for name, value in inputs.items():
        if _form(name, value, table, num) is not None:
            values = [call[name] for call in calls]
            if isinstance(value, Tensor):
                inputs[name] = torch.cat(values, table.batch_dims.get(name, 0))
            else:
                inputs[name] = [entry for entries in values for entry in entries]
    return inputs


def parts_of(output: Any, call: Inputs, table: SplitTable, num_calls: int) -> list[Any]:
    """Split the output of a merged call into the outputs of its calls, as views."""
    num = samples_of(call, table.unbatched).number
    total = num * num_calls

    def is_column(nest: Any) -> bool:
        is_list = table.listed and isinstance(nest, list) and len(nest) == total
        return isinstance(nest, Tensor) or bool(is_list)

    def part(column: Any, place: int) -> Any:
        # A pending tensor is not asked for its shape: that would fetch it.
        if isinstance(column, list | Pending) or column.shape[:1] == (total,):
            return column[place * num : (place + 1) * num]
        return column

    return [
        mapped(output, lambda x, place=place: part(x, place), is_column)
        for place in range(num_calls)
    ]


def _form(name: str, value: Any, table: SplitTable, num: int) -> Any:
    """Return shapes and dtypes of an input with a batch of `num`; None for other inputs."""
    dim = table.batch_dims.get(name, 0)
    if isinstance(value, Tensor) and name not in table.unbatched:
        if value.dim() > dim and value.shape[dim] == num:
            return value.shape, value.dtype, value.device
    elif name in table.listed and isinstance(value, list) and len(value) == num:
        return [mapped(entry, lambda x: (x.shape, x.dtype)) for entry in value]
    return None


def _equal(value: Any, other: Any) -> bool:
    if value is other:
        return True
    if type(value) is not type(other):
        return False
    if isinstance(value, Tensor):
        are_alike = value.shape == other.shape and value.dtype == other.dtype
        return are_alike and torch.equal(value, other)
    if isinstance(value, Mapping):
        return value.keys() == other.keys() and all(_equal(value[key], other[key]) for key in value)
    if isinstance(value, list | tuple):
        return len(value) == len(other) and all(map(_equal, value, other))
    return bool(value == other)
