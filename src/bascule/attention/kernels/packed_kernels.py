"""Attention kernels on packed sequences: one protocol, several back ends.

Shapes: T tokens of all sequences, H heads, K key-value heads (H is a multiple of K), D head width.
"""

import functools
import importlib.util
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from bascule.attention.kernels.protocol import with_adjacent_values
from bascule.comm.guard.derivatives import only_first
from bascule.comm.staging import table_on
from bascule.errors import ConfigError


@dataclass(frozen=True, slots=True, eq=False)
class PackedSequences:
    """The bounds of sequences packed one after another, none of them empty.

    Attributes:
        cu_seqlens: (n + 1,) int32 on the device of the tokens.
        seq_lens: Tokens of each, on the host: kernels must not read the device to learn them.
    """

    cu_seqlens: Tensor
    seq_lens: tuple[int, ...]

    @classmethod
    def build(cls, seq_lens: Sequence[int], device: torch.device) -> "PackedSequences":
        """From lengths; empty sequences are left out, since kernels disagree about them."""
        kept = tuple(length for length in seq_lens if length)
        bounds = np.cumsum((0, *kept), dtype=np.int32)
        return cls(table_on(bounds, device), kept)

    @property
    def max_len(self) -> int:
        """Tokens of the longest, 0 if there is none."""
        return max(self.seq_lens, default=0)


def check_call(
    what: str, tensors: Sequence[Any], causal: Any, scale: Any, kernel: Any = None
) -> None:
    """Refuse what attention cannot be called with, whatever its shapes.

    Raises:
        ConfigError: What should be a dense tensor is none, causal is no bool, the scale no finite
            number, or the kernel no name.
    """
    for x in tensors:
        if not isinstance(x, Tensor):
            raise ConfigError(f"{what}: q, k or v is a {type(x).__name__}: give tensors")
        if x.layout != torch.strided:
            raise ConfigError(f"{what}: q, k or v has the layout {x.layout}: give dense tensors")
    if not isinstance(kernel, str | None):
        raise ConfigError(f"{what}: kernel={kernel!r}: give a kernel's name, or None")
    is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
    if not isinstance(causal, bool) or not (scale is None or (is_number and math.isfinite(scale))):
        raise ConfigError(
            f"{what}: causal={causal!r} and scale={scale!r}: give True or False, and a finite "
            "number or None"
        )


class Kernel(Protocol):
    """Exact attention within each packed sequence; differentiable in `out`.

    Returns out (T, H, D) and the natural-log sum-exp of the scaled scores (T, H), float64 for
    float64 inputs and float32 otherwise, or None from a back end that has none: such a kernel
    cannot merge partial results, so a ring refuses it. The log-sum-exp carries no gradient.
    """

    def __call__(
        self,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        seqs: PackedSequences,
        *,
        causal: bool,
        scale: float | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; causal masks what comes later in a sequence, scale defaults to D^-0.5."""
        ...


def reference(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    seqs: PackedSequences,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Plain matmul and masked softmax over all pairs of tokens: O(T^2) memory, for comparison."""
    num_tokens, num_heads, head_dim = q_THD.shape
    repeat = num_heads // k_TKD.shape[1]
    k_THD, v_THD = (x.repeat_interleave(repeat, dim=1) for x in (k_TKD, v_TKD))
    scores = torch.einsum("thd,shd->hts", q_THD, k_THD) * _scale(scale, head_dim)
    place = torch.arange(num_tokens, device=q_THD.device)
    seq_of = torch.bucketize(place, seqs.cu_seqlens[1:], right=True)
    visible = seq_of[:, None] == seq_of[None, :]
    if causal:
        visible &= place[:, None] >= place[None, :]
    wide = torch.promote_types(q_THD.dtype, torch.float32)
    scores = scores.to(wide).masked_fill(~visible, -math.inf)
    lse_HT = torch.logsumexp(scores, dim=-1)
    out = torch.einsum("hts,shd->thd", (scores - lse_HT[..., None]).exp().to(q_THD.dtype), v_THD)
    return out, lse_HT.T.detach()


def cpu_flash(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    seqs: PackedSequences,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Torch's flash attention for CPUs, a call for each sequence (it has no packed form)."""
    return _CpuFlash.apply(q_THD, k_TKD, v_TKD, seqs, causal, scale)


class _CpuFlash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        seqs: PackedSequences,
        causal: bool,
        scale: float | None,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(q_THD.dtype, torch.float32)
        out = torch.empty(q_THD.shape, dtype=q_THD.dtype)
        lse = torch.empty(q_THD.shape[:2], dtype=wide)
        splits = [x.split(seqs.seq_lens) for x in (q_THD, k_TKD, v_TKD, out, lse)]
        for q, k, v, out_part, lse_part in zip(*splits, strict=True):
            result, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                _batched(q), _batched(k), _batched(v), 0.0, causal, scale=scale
            )
            out_part.copy_(result[0].transpose(0, 1))
            lse_part.copy_(log_sum[0].T)
        ctx.save_for_backward(q_THD, k_TKD, v_TKD, out, lse)
        ctx.seqs, ctx.causal, ctx.scale = seqs, causal, scale
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @only_first
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad_THD, _ = grad_outputs  # the log-sum-exp has no gradient
        saved = ctx.saved_tensors
        grads = [torch.empty(x.shape, dtype=x.dtype) for x in saved[:3]]
        splits = [x.split(ctx.seqs.seq_lens) for x in (grad_THD, *saved, *grads)]
        for grad, q, k, v, out, lse, *parts in zip(*splits, strict=True):
            results = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *map(_batched, (grad, q, k, v, out)), lse.T[None], 0.0, ctx.causal, scale=ctx.scale
            )
            for part, result in zip(parts, results, strict=True):
                part.copy_(result[0].transpose(0, 1))
        return (*grads, None, None, None)


def sdpa(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    seqs: PackedSequences,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, None]:
    """Torch's scaled_dot_product_attention on jagged nested tensors: any device, no log-sum-exp.

    Raises:
        ConfigError: Causal on a CPU or in float64, for which torch has no jagged form.
    """
    if causal and (q_THD.device.type == "cpu" or q_THD.dtype == torch.float64):
        raise ConfigError(
            f"kernel 'sdpa' cannot attend causally in {q_THD.dtype} on {q_THD.device.type}: use "
            f"{'cpu_flash' if q_THD.device.type == 'cpu' else 'reference'!r}"
        )
    if not seqs.seq_lens:
        return _of_no_tokens(q_THD, k_TKD, v_TKD)[0], None
    repeat = q_THD.shape[1] // k_TKD.shape[1]
    k_THD, v_THD = (
        (x.repeat_interleave(repeat, dim=1) if repeat > 1 else x) for x in (k_TKD, v_TKD)
    )
    q, k, v = (
        torch.nested.nested_tensor_from_jagged(
            x.contiguous(),
            seqs.cu_seqlens.long(),
            min_seqlen=min(seqs.seq_lens),
            max_seqlen=seqs.max_len,
        ).transpose(1, 2)
        for x in (q_THD, k_THD, v_THD)
    )
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    return out.transpose(1, 2).values(), None


def varlen(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    seqs: PackedSequences,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """torch.nn.attention.varlen, flash attention on packed sequences: CUDA, half precision."""
    if not seqs.seq_lens:
        return _of_no_tokens(q_THD, k_TKD, v_TKD)
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    cu, longest = seqs.cu_seqlens, seqs.max_len
    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"window_size": (-1, 0 if causal else -1)}
    if "window_size" not in known:
        options = {"is_causal": causal}
    if "enable_gqa" in known:
        options["enable_gqa"] = q_THD.shape[1] != k_TKD.shape[1]
    out, lse_HT = varlen_attn(
        q_THD,
        k_TKD,
        v_TKD,
        cu,
        cu,
        longest,
        longest,
        scale=scale,
        return_aux=AuxRequest(lse=True),
        **options,
    )
    return out, lse_HT.T


def flash_attn(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    seqs: PackedSequences,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The flash-attn package, version 2.6 or later: CUDA, half precision."""
    if not seqs.seq_lens:
        return _of_no_tokens(q_THD, k_TKD, v_TKD)
    from flash_attn import (  # pyright: ignore[reportMissingImports]
        flash_attn_varlen_func,
    )

    cu, longest = seqs.cu_seqlens, seqs.max_len
    out, lse_HT, _ = flash_attn_varlen_func(
        q_THD,
        k_TKD,
        v_TKD,
        cu,
        cu,
        longest,
        longest,
        causal=causal,
        softmax_scale=scale,
        return_attn_probs=True,
    )
    return out, lse_HT.T


KERNELS: dict[str, Callable[..., tuple[Tensor, Tensor | None]]] = {
    "reference": reference,
    "cpu_flash": cpu_flash,
    "sdpa": sdpa,
    "varlen": varlen,
    "flash_attn": flash_attn,
}


@functools.cache
def select_kernel(name: str | None, device_type: str, dtype: torch.dtype) -> Kernel:
    """The kernel of that name, or (None) the fastest for the device and dtype.

    Raises:
        ConfigError: There is no such kernel, or it cannot run there.
    """
    if name is None:
        return KERNELS[_automatic(device_type, dtype)]
    if name not in KERNELS:
        raise ConfigError(f"kernel {name!r}: choose one of {', '.join(KERNELS)}")
    reason = _unfit(name, device_type, dtype)
    if reason:
        raise ConfigError(f"kernel {name!r} {reason}: use {_automatic(device_type, dtype)!r}")
    return KERNELS[name]


def _automatic(device_type: str, dtype: torch.dtype) -> str:
    preferred = ("flash_attn", "varlen", "cpu_flash", "sdpa")
    return next(name for name in preferred if _unfit(name, device_type, dtype) is None)


def _unfit(name: str, device_type: str, dtype: torch.dtype) -> str | None:
    """Why a kernel cannot run there, or None."""
    if name == "cpu_flash" and device_type != "cpu":
        return f"runs on CPUs, not on {device_type}"
    if name in ("varlen", "flash_attn"):
        if device_type != "cuda":
            return f"runs on CUDA devices, not on {device_type}"
        if dtype not in (torch.bfloat16, torch.float16):
            return f"takes bfloat16 or float16, not {dtype}"
        module = "flash_attn" if name == "flash_attn" else "torch.nn.attention.varlen"
        if importlib.util.find_spec(module) is None:
            return f"needs the module {module}, which is not installed"
    return None


def _of_no_tokens(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> tuple[Tensor, Tensor]:
    """Out and log-sum-exp of an idle rank: flash attention refuses a batch of no sequences."""
    out = torch.einsum("thd,tkd,tkd->thd", q_THD, k_TKD, v_TKD)
    wide = torch.promote_types(q_THD.dtype, torch.float32)
    return out, q_THD.new_empty(q_THD.shape[:2], dtype=wide)


def _batched(x_THD: Tensor) -> Tensor:
    return with_adjacent_values(x_THD).transpose(0, 1)[None]


def _scale(scale: float | None, head_dim: int) -> float:
    return 1.0 / math.sqrt(head_dim) if scale is None else scale
