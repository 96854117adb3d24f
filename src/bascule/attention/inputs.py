"""Tensors and settings that users give to attention, checked where they enter."""

import math
from typing import Any

import torch
from torch import Tensor

from bascule.errors import ConfigError

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_tensors(what: str, q: Any, k: Any, v: Any, mask: Any = None) -> None:
    """Refuse what attention computes nothing with, whatever its shapes."""
    for x in (q, k, v) if mask is None else (q, k, v, mask):
        if not isinstance(x, Tensor):
            raise ConfigError(f"{what}: q, k, v or the mask is a {type(x).__name__}: give tensors")
        if x.layout != torch.strided or x.is_nested:
            raise ConfigError(
                f"{what}: q, k, v or the mask is nested, or has the layout {x.layout}: give dense "
                "tensors"
            )
    if not q.dtype == k.dtype == v.dtype or q.dtype not in _DTYPES:
        raise ConfigError(
            f"{what}: q is {q.dtype}, k {k.dtype}, v {v.dtype}: give one floating-point dtype of "
            "16, 32 or 64 bits, under autocast too, as by k.to(q.dtype)"
        )
    devices = {x.device for x in (q, k, v, mask) if x is not None}
    if len(devices) > 1 or q.is_meta:
        raise ConfigError(
            f"{what}: q, k, v and the mask are on {sorted(map(str, devices))}: give all of them "
            "on one device with data"
        )
    if min(q.dim(), k.dim()) > 2 and 0 in (q.shape[-1], q.shape[-2 if q.dim() == 3 else 1]):
        raise ConfigError(
            f"{what}: q {tuple(q.shape)} has no heads, or heads of no width: give one at least"
        )


def check_settings(what: str, causal: Any, scale: Any) -> None:
    """Refuse a `causal` that is no bool, and a scale that is no finite number."""
    is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
    # For compilers a number may be a symbol; what runs checks it again.
    is_finite = is_number and (torch.compiler.is_compiling() or math.isfinite(scale))
    if not isinstance(causal, bool) or not (scale is None or is_finite):
        raise ConfigError(
            f"{what}: causal={causal!r} and scale={scale!r}: give True or False, and a finite "
            "number or None"
        )


def with_positive_scale(q: Tensor, scale: float | None) -> tuple[Tensor, float]:
    """Return queries and the factor of their scores, above 0, for the same scores.

    Torch's flash attention for CPUs (2.13) multiplies what a causal mask hides, -inf, by it.
    """
    factor = positive_scale(q.shape[-1], scale)
    return (q, factor) if scale is None or scale > 0 else (q * scale, factor)


def positive_scale(head_dim: int, scale: float | None) -> float:
    """Return the factor that `with_positive_scale` leaves."""
    if scale is None:
        return head_dim**-0.5
    return scale if scale > 0 else 1.0
