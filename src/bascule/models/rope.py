"""Rotary position embedding over several axes, FLUX's way: neighbouring channels form a pair.

Shapes: T tokens, A axes, H heads, D head_dim, P = D/2 pairs.
"""

import torch
from torch import Tensor


def rotary_table(
    pos_TA: Tensor, axes_dim: tuple[int, ...], theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of every token's angles, (T, D/2) each, in float32 at least."""
    device = pos_TA.device
    axes = [torch.full((dim // 2,), axis, device=device) for axis, dim in enumerate(axes_dim)]
    exponents = [
        torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim for dim in axes_dim
    ]
    # Angles in float64: at position 4096 a float32 angle is off by 2e-4.
    radians_P = theta ** -torch.cat(exponents)
    angle_TP = pos_TA.double().index_select(1, torch.cat(axes)) * radians_P
    table_dtype = torch.promote_types(dtype, torch.float32)
    return angle_TP.cos().to(table_dtype), angle_TP.sin().to(table_dtype)


def apply_rotary(x_THD: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> Tensor:
    """Turn every pair of channels by its token's angle, in the tables' precision."""
    even_THP, odd_THP = x_THD.to(cos_TP.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    cos_T1P, sin_T1P = cos_TP.unsqueeze(1), sin_TP.unsqueeze(1)
    turned = (even_THP * cos_T1P - odd_THP * sin_T1P, even_THP * sin_T1P + odd_THP * cos_T1P)
    return torch.stack(turned, dim=-1).flatten(-2).to(x_THD.dtype)
