"""Modality, sample and angles of each packed token, and gathers of rows with cheap gradients.

A gather's backward is one operation, not a scatter of atomics. Rotary embedding is FLUX's: over
several axes, with pairs of neighbouring channels.

Shapes: T tokens, of which t are text and i are image tokens; N samples, C channels; A axes, H
heads, D head_dim, P = D/2 pairs.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from bascule.errors import ConfigError


def sum_rows(values_TC: Tensor, slot_T: Tensor, num_rows: int) -> Tensor:
    """Add up the rows of each slot: (T, C) to (num_rows, C), zero rows where a slot is unused."""
    if values_TC.device.type == "cpu":
        sums_NC = values_TC.new_zeros(num_rows, values_TC.shape[1])
        return sums_NC.index_add(0, slot_T, values_TC)
    return sum_rows_by_matmul(values_TC, slot_T, num_rows)


def sum_rows_by_matmul(values_TC: Tensor, slot_T: Tensor, num_rows: int) -> Tensor:
    """Add up the rows of each slot by a one-hot product: atomics vary in order and rounding."""
    rows_N1 = torch.arange(num_rows, device=slot_T.device).unsqueeze(1)
    return (rows_N1 == slot_T).to(values_TC.dtype) @ values_TC


class _LookUp(Function):
    @staticmethod
    def forward(ctx: Any, table_NC: Tensor, slot_T: Tensor) -> Tensor:
        ctx.save_for_backward(slot_T)
        ctx.num_rows = table_NC.shape[0]
        return table_NC.index_select(0, slot_T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (slot_T,) = ctx.saved_tensors
        return sum_rows(grads[0], slot_T, ctx.num_rows), None


class _Scale(Function):
    @staticmethod
    def forward(ctx: Any, x_TC: Tensor, table_NC: Tensor, slot_T: Tensor) -> Tensor:
        ctx.save_for_backward(x_TC, table_NC, slot_T)
        return x_TC * table_NC.index_select(0, slot_T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x_TC, table_NC, slot_T = ctx.saved_tensors
        grad_x_TC = _Scale.apply(grads[0], table_NC, slot_T)
        return grad_x_TC, sum_rows(grads[0] * x_TC, slot_T, table_NC.shape[0]), None


class _Permute(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order_T: Tensor, inverse_T: Tensor) -> Tensor:
        ctx.save_for_backward(order_T, inverse_T)
        return x.index_select(0, order_T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        order_T, inverse_T = ctx.saved_tensors
        return _Permute.apply(grads[0], inverse_T, order_T), None, None


def look_up(table_NC: Tensor, slot_T: Tensor) -> Tensor:
    """Return the row of each token's sample: (N, C) to (T, C)."""
    return _LookUp.apply(table_NC, slot_T)


def scale_rows(x_TC: Tensor, table_NC: Tensor, slot_T: Tensor) -> Tensor:
    """Return `x * table[slot]`; the backward gathers again instead of saving a (T, C) factor."""
    return _Scale.apply(x_TC, table_NC, slot_T)


def permute_rows(x: Tensor, order_T: Tensor, inverse_T: Tensor) -> Tensor:
    """Return `x[order]` for a permutation with a known inverse: the backward is a gather too."""
    return _Permute.apply(x, order_T, inverse_T)


def rotary_table(
    pos_TA: Tensor, axes_dim: tuple[int, ...], theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of every token's angles, (T, D/2) each, in float32 at least."""
    device = pos_TA.device
    axes = [torch.full((dim // 2,), axis, device=device) for axis, dim in enumerate(axes_dim)]
    powers = [torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim for dim in axes_dim]
    # Angles in float64: at position 4096 a float32 angle is off by 2e-4.
    radians_P = theta ** -torch.cat(powers)
    angle_TP = pos_TA.double().index_select(1, torch.cat(axes)) * radians_P
    table_dtype = torch.promote_types(dtype, torch.float32)
    return angle_TP.cos().to(table_dtype), angle_TP.sin().to(table_dtype)


def apply_rotary(x_THD: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> Tensor:
    """Turn every pair of channels by its token's angle, in the tables' precision."""
    even_THP, odd_THP = x_THD.to(cos_TP.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    cos_T1P, sin_T1P = cos_TP.unsqueeze(1), sin_TP.unsqueeze(1)
    turned = (even_THP * cos_T1P - odd_THP * sin_T1P, even_THP * sin_T1P + odd_THP * cos_T1P)
    return torch.stack(turned, dim=-1).flatten(-2).to(x_THD.dtype)


class Interleaving:
    """Order of text and image rows in a packed tensor; without `num_text`, the host counts it."""

    def __init__(self, is_image_T: Tensor, num_text: int | None = None) -> None:
        _check(is_image_T)
        self.order = is_image_T.to(torch.uint8).argsort(stable=True)  # int64 (T,), text first
        self.inverse = self.order.argsort()  # int64 (T,), the permutation back
        self.num_text = count_text(is_image_T) if num_text is None else num_text

    def pack(self, text: Tensor, image: Tensor) -> Tensor:
        """Interleave two streams into packed order."""
        return permute_rows(torch.cat([text, image]), self.inverse, self.order)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Split packed rows into text and image; the inverse of `pack`."""
        rows = permute_rows(x, self.order, self.inverse)
        return rows[: self.num_text], rows[self.num_text :]


def count_text(is_image_T: Tensor) -> int:
    """Count the text rows of a mask. On a device, the host waits for it."""
    _check(is_image_T)
    return is_image_T.shape[0] - int(is_image_T.sum())


def _check(is_image_T: Tensor) -> None:
    if is_image_T.dtype != torch.bool or is_image_T.ndim != 1:
        got = f"{is_image_T.dtype} {tuple(is_image_T.shape)}"
        raise ConfigError(f"is_image must be a bool vector, got {got}")


class TokenLayout:
    """Rows, samples and angles of tokens for all blocks; FSDP2 would cast a dataclass's tensors."""

    def __init__(
        self,
        *,
        is_image: Tensor,
        slot: Tensor,
        rotary: tuple[Tensor, Tensor],
        num_text: int | None = None,
    ) -> None:
        self.interleaving = Interleaving(is_image, num_text)
        self.slot = slot  # int64 (T,), the row of the per-sample vectors that each token uses
        self.text_slot, self.image_slot = self.interleaving.split(slot)
        self.cos, self.sin = rotary  # (T, D/2), float64 for float64 models, else float32
