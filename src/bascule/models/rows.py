"""Row gathers whose backward is one cheap operation instead of a scatter of atomics.

Shapes: T tokens, N samples, C channels.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def sum_rows(values_TC: Tensor, slot_T: Tensor, num_rows: int) -> Tensor:
    """Add up the rows of each slot: (T, C) to (num_rows, C), zero rows where a slot is unused."""
    if values_TC.device.type == "cpu":
        sums_NC = values_TC.new_zeros(num_rows, values_TC.shape[1])
        return sums_NC.index_add(0, slot_T, values_TC)
    return sum_rows_by_matmul(values_TC, slot_T, num_rows)


def sum_rows_by_matmul(values_TC: Tensor, slot_T: Tensor, num_rows: int) -> Tensor:
    """Return the same as a one-hot product: no atomics, whose order and rounding vary."""
    rows_N1 = torch.arange(num_rows, device=slot_T.device).unsqueeze(1)
    return (rows_N1 == slot_T).to(values_TC.dtype) @ values_TC


class _LookUp(Function):
    @staticmethod
    def forward(table_NC: Tensor, slot_T: Tensor) -> Tensor:
        return table_NC.index_select(0, slot_T)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        table_NC, slot_T = inputs
        ctx.save_for_backward(slot_T)
        ctx.num_rows = table_NC.shape[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (slot_T,) = ctx.saved_tensors
        return sum_rows(grads[0], slot_T, ctx.num_rows), None


class _Scale(Function):
    @staticmethod
    def forward(x_TC: Tensor, table_NC: Tensor, slot_T: Tensor) -> Tensor:
        return x_TC * table_NC.index_select(0, slot_T)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x_TC, table_NC, slot_T = ctx.saved_tensors
        grad_x_TC = _Scale.apply(grads[0], table_NC, slot_T)
        return grad_x_TC, sum_rows(grads[0] * x_TC, slot_T, table_NC.shape[0]), None


class _Permute(Function):
    @staticmethod
    def forward(x: Tensor, order_T: Tensor, inverse_T: Tensor) -> Tensor:
        return x.index_select(0, order_T)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        order_T, inverse_T = ctx.saved_tensors
        return _Permute.apply(grads[0], inverse_T, order_T), None, None


def look_up(table_NC: Tensor, slot_T: Tensor) -> Tensor:
    """Return the row of each token's sample: (N, C) to (T, C)."""
    return _LookUp.apply(table_NC, slot_T)


def scale_rows(x_TC: Tensor, table_NC: Tensor, slot_T: Tensor) -> Tensor:
    """Return `x * table[slot]`; the backward gathers again, to keep no (T, C) factor."""
    return _Scale.apply(x_TC, table_NC, slot_T)


def permute_rows(x: Tensor, order_T: Tensor, inverse_T: Tensor) -> Tensor:
    """Return `x[order]` for a permutation with a known inverse: the backward is a gather too."""
    return _Permute.apply(x, order_T, inverse_T)
