"""The attention kernels: attention of some queries to some keys.

Shapes: B batch, H query heads, K key-value heads (H is a multiple of K), Sq and Sk tokens, D head
width. LSE is the natural-log sum-exp of the scaled scores, (B, H, Sq), in float64 for float64
inputs and in float32 otherwise; -inf where a query has no key. Kernels of blocks take one long
row, queries (1, 1, Sq, D) and keys (1, 1, Sk, D), cut as in `BlockRows`.
"""

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from bascule.arrays import Ints
from bascule.attention.kernels.cuda import (
    AtenEfficientKernel,
    AtenFlashKernel,
    FlashAttn2Kernel,
    FlashAttn3Kernel,
)
from bascule.attention.kernels.protocol import (
    Attended,
    Grads,
    KernelQuery,
    OutLse,
    backward_each,
    blocks_of,
    finite,
    forward_each,
    misfit,
    no_module,
    nothing_seen,
    repeated_heads,
    summed_heads,
    wide_dtype,
    with_adjacent_values,
    without_empty_rows,
)
from bascule.attention.kernels.protocol import AttentionKernel as AttentionKernel
from bascule.attention.mask import EVERYTHING, AttentionMask, BlockRows
from bascule.comm.groups import Cache
from bascule.errors import ConfigError

_NUM_CALLS = 64  # most calls that a `FunctionKernel` remembers

_aten: Any = torch.ops.aten


class CpuLoopKernel:
    """Torch's flash attention for CPUs, any floating dtype, in a loop over query blocks."""

    def unfit(self, query: KernelQuery) -> str | None:
        return misfit(query, device="cpu", needs_blocks=True)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float) -> OutLse:
        rows = blocks_of(mask)
        q, k, v = map(with_adjacent_values, (q, k, v))
        keys, values = _Blocks(rows, k), _Blocks(rows, v)
        out, lse = nothing_seen(q)
        for at, columns in rows.runs:
            if columns.size:
                out[:, :, at], lse[:, :, at] = _aten._scaled_dot_product_flash_attention_for_cpu(
                    q[:, :, at], keys.take(columns), values.take(columns), scale=scale
                )
        return out, lse

    def backward(self, grad: Tensor, done: Attended) -> Grads:
        q, k, v, out, lse, mask, scale = done
        rows, wide = blocks_of(mask), wide_dtype(q)
        grad, q, k, v, out = map(with_adjacent_values, (grad, q, k, v, out))
        keys, values = _Blocks(rows, k), _Blocks(rows, v)
        dq = torch.zeros_like(q)
        dk, dv = (torch.zeros(k.shape, dtype=wide) for _ in range(2))
        dkeys, dvalues = _Blocks(rows, dk), _Blocks(rows, dv)
        for at, columns in rows.runs:
            if columns.size:
                parts = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    *(grad[:, :, at], q[:, :, at], keys.take(columns), values.take(columns)),
                    *(out[:, :, at], lse[:, :, at], 0.0, False),
                    scale=scale,
                )
                dq[:, :, at] = parts[0]
                dkeys.add(columns, parts[1])
                dvalues.add(columns, parts[2])
        return dq, dk.to(k.dtype), dv.to(v.dtype)


class _Blocks:
    """Keys, values or their gradients (1, 1, Sk, D), by key block."""

    def __init__(self, rows: BlockRows, tokens: Tensor) -> None:
        self._bounds = rows.k_bounds
        self._tokens = tokens
        self._parts = tokens.tensor_split(rows.k_bounds[1:-1].tolist(), dim=2)

    def take(self, columns: Ints) -> Tensor:
        """Gather the tokens of blocks, next to each other; a view if they already are."""
        run = self._run(columns)
        return torch.cat(self._pick(columns), dim=2) if run is None else self._tokens[:, :, run]

    def add(self, columns: Ints, added: Tensor) -> None:
        """Add to the tokens of blocks, which lie as `take` returns them."""
        run = self._run(columns)
        if run is not None:
            self._tokens[:, :, run] += added
            return
        parts = self._pick(columns)
        _aten._foreach_add_.List(parts, added.split([part.shape[2] for part in parts], dim=2))

    def _pick(self, columns: Ints) -> list[Tensor]:
        return [self._parts[column] for column in columns.tolist()]

    def _run(self, columns: Ints) -> slice | None:
        """Return the rows of the blocks if nothing is between them."""
        first, last = int(columns[0]), int(columns[-1])
        if last - first + 1 != columns.size:
            return None
        return slice(int(self._bounds[first]), int(self._bounds[last + 1]))


class TritonKernel:
    """Triton kernels of `triton_sparse`: half and single precision, blocks of any length."""

    def unfit(self, query: KernelQuery) -> str | None:
        if query.head_dim not in (16, 32, 64, 128):
            return f"takes head widths 16, 32, 64 and 128, not {query.head_dim}"
        dtypes = torch.bfloat16, torch.float16, torch.float32
        refused = misfit(query, device="cuda", dtypes=dtypes, needs_blocks=True)
        return refused or no_module("triton")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float) -> OutLse:
        from bascule.attention.kernels import triton_sparse

        return triton_sparse.attend(q, k, v, blocks_of(mask), scale)

    def backward(self, grad: Tensor, done: Attended) -> Grads:
        q, k, v, out, lse, mask, scale = done
        from bascule.attention.kernels import triton_sparse

        return triton_sparse.gradients(grad, q, k, v, out, lse, blocks_of(mask), scale)


@dataclass(frozen=True)
class PlainKernel:
    """Matmul and softmax: any device and dtype, O(Sq Sk) memory."""

    cap: float = 0.0

    def unfit(self, query: KernelQuery) -> str | None:
        return misfit(query, takes_packed=True, takes_cap=True)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float) -> OutLse:
        if mask.packed is not None:
            return forward_each(self.forward, q, k, v, mask, scale)
        scores = _scores(q, k, mask, scale, self.cap)
        lse = torch.logsumexp(scores, dim=-1)
        weights = _weights(scores, lse)
        return (weights @ repeated_heads(v, q).to(weights.dtype)).to(q.dtype), lse

    def backward(self, grad: Tensor, done: Attended) -> Grads:
        q, k, v, out, lse, mask, scale = done
        if mask.packed is not None:
            return backward_each(self.backward, grad, done)
        wide = wide_dtype(q)
        grad, out = grad.to(wide), out.to(wide)
        weights = _weights(_scores(q, k, mask, scale, self.cap), lse)
        delta = (grad * out).sum(dim=-1, keepdim=True)
        dscores = weights * (grad @ repeated_heads(v, q).to(wide).mT - delta) * scale
        if self.cap:
            dscores *= 1.0 - (_scores(q, k, EVERYTHING, scale, self.cap) / self.cap) ** 2
        dq = dscores @ repeated_heads(k, q).to(wide)
        dk, dv = dscores.mT @ q.to(wide), weights.mT @ grad
        return dq, summed_heads(dk, k), summed_heads(dv, v)


class CpuFlashKernel:
    """Torch's flash attention for CPUs: any floating dtype, with bias."""

    def unfit(self, query: KernelQuery) -> str | None:
        return misfit(query, device="cpu", takes_packed=True)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float) -> OutLse:
        if not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
            q, k, v = map(with_adjacent_values, (q, k, v))
        if mask.packed is not None:
            return forward_each(self._attend, q, k, v, mask, scale)
        return self._attend(q, k, v, mask, scale)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float) -> OutLse:
        """Attend with tensors of adjacent values."""
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, mask.causal, attn_mask=mask.bias, scale=scale
        )
        if k.shape[2] < _FEW_KEYS:
            wide_q, wide_k = q.to(lse.dtype), k.to(lse.dtype)
            out, lse = _by_highest(out, lse, _scores(wide_q, wide_k, mask, scale))
        return (out, lse) if mask.bias is None else without_empty_rows(out, lse, mask.bias)

    def backward(self, grad: Tensor, done: Attended) -> Grads:
        # In float32 at least: torch is slow in 16 bits, and rounds parts.
        *qkv_out, lse, mask, scale = done
        wide = wide_dtype(done.q)
        grad, q, k, v, out = [with_adjacent_values(x.to(wide)) for x in (grad, *qkv_out)]
        done = Attended(q, k, v, out, lse, mask, scale)
        if mask.packed is not None:
            return backward_each(self._gradients, grad, done)
        return self._gradients(grad, done)

    def _gradients(self, grad: Tensor, done: Attended) -> Grads:
        """Take gradients with wide tensors of adjacent values."""
        q, k, v, out, lse, mask, scale = done
        bias = mask.bias
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(grad, q, k, v, out, lse if bias is None else finite(lse), 0.0, mask.causal),
            attn_mask=None if bias is None else bias.to(q.dtype),
            scale=scale,
        )


def gradients_by_recomputation(
    attend: Callable[[Tensor, Tensor, Tensor], OutLse],
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
) -> Grads:
    """Compute a block again and return its gradients, by autograd through its output and LSE.

    With w = exp(lse_i - lse), the merged output moves by w with the block's output out_i, and by
    w (out_i - out) with its LSE: the derivatives of the sum that `merge` computes.
    """
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    # Autograd is off below an operator, even where gradients are enabled.
    below = torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)
    with torch.enable_grad(), below:
        part, part_lse = attend(q, k, v)
    is_empty = torch.isneginf(part_lse.detach())
    weight = (part_lse.detach() - lse).exp().masked_fill(is_empty, 0.0)[..., None]
    wide = grad.to(weight.dtype)
    lse_grad = (weight * wide * (part.detach() - out)).sum(-1).masked_fill(is_empty, 0.0)
    pairs = [(part, (weight * wide).to(part.dtype)), (part_lse, lse_grad)]
    outputs, grads = zip(*[pair for pair in pairs if pair[0].requires_grad], strict=True)
    dq, dk, dv = torch.autograd.grad(outputs, (q, k, v), grads)
    return dq, dk, dv


@dataclass(frozen=True, eq=False, repr=False)
class FunctionKernel:
    """A function of yours that computes attention on one device, for `kernel=`.

    It gets packed sequences one by one, as a batch of one. Keys and values have as many heads as
    queries; a causal call has as many keys as queries.

    Attributes:
        name: Name in errors. Ranks compare it; all ranks must give the same function.
        attend: `attend(q, k, v, is_causal=.., scale=..)` returns out as q (B, H, Sq, D), for keys
            and values (B, H, Sk, D) and scores times `scale`.
        gradients: `gradients(grad, q, k, v, out, lse, is_causal=.., scale=..)` returns gradients of
            q, k and v; in a ring, out and lse cover more keys than k. Default: autograd.
        gives_lse: True if `attend` returns (out, lse). Rings and `overlap` need lse (B, H, Sq), the
            log-sum-exp of scaled scores; without `gradients` it must be differentiable.
        takes_mask: True if both functions accept `attn_mask=`, which is added to the scores and
            broadcasts to (B, H, Sq, Sk).

    Raises:
        ConfigError: The name is empty, or a function cannot be called.
    """

    name: str
    attend: Callable[..., Any]
    gradients: Callable[..., Grads] | None = None
    gives_lse: bool = False
    takes_mask: bool = False
    key: str = field(default_factory=lambda: str(next(_numbers)), init=False)
    # Calls of meshes that use this kernel: they live no longer than the kernel.
    calls: Cache[Hashable, Any] = field(
        default_factory=lambda: Cache(_NUM_CALLS), init=False, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        if not (self.name and callable(self.attend) and callable(self.gradients or self.attend)):
            raise ConfigError(f"FunctionKernel({self}, ..): give a name, and functions")
        _by_key()[self.key] = self  # where recorded programs find it

    def __repr__(self) -> str:
        return repr(self.name)

    def __deepcopy__(self, memo: object) -> "FunctionKernel":
        return self  # frozen, and its calls hold groups

    def unfit(self, query: KernelQuery) -> str | None:
        refused = misfit(query, takes_bias=self.takes_mask, takes_packed=True)
        return f"{refused} (takes_mask=True says so)" if refused == "takes no mask" else refused

    def check_parts(self, num_parts: int) -> None:
        """Refuse several parts of an attention if the kernel gives no LSE to merge them."""
        if num_parts > 1 and not self.gives_lse:
            wrong = f"kernel {self.name!r} gives no log-sum-exp to merge parts of attention by"
            raise ConfigError(f"{wrong}: set gives_lse=True, or leave out rings, overlap and masks")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float) -> OutLse:
        if mask.packed is not None:
            return forward_each(self.forward, q, k, v, mask, scale)
        bias, options = mask.bias, dict[str, Any]()
        if bias is not None:  # queries that see nothing see all here, and get 0 afterwards
            is_empty = torch.isneginf(bias).all(dim=-1, keepdim=True)
            options["attn_mask"] = bias.masked_fill(is_empty, 0.0)
        k, v = repeated_heads(k, q), repeated_heads(v, q)
        made = self.attend(q, k, v, is_causal=mask.causal, scale=scale, **options)
        is_pair = isinstance(made, tuple)
        out, lse = made if is_pair else (made, q.new_zeros(q.shape[:3]))
        if is_pair != self.gives_lse or (out.shape, lse.shape) != (q.shape, q.shape[:3]):
            raise ConfigError(
                f"kernel {self.name!r} returned shapes {tuple(out.shape)} and {tuple(lse.shape)}: "
                f"return out {tuple(q.shape)}, and with gives_lse=True LSE {tuple(q.shape[:3])}"
            )
        return without_empty_rows(out, lse.to(wide_dtype(q)), bias)

    def backward(self, grad: Tensor, done: Attended) -> Grads:
        q, k, v, out, lse, mask, scale = done
        if mask.packed is not None:
            return backward_each(self.backward, grad, done)
        if self.gradients is None:
            return gradients_by_recomputation(self._recorded(mask, scale), grad, q, k, v, out, lse)
        options = {} if mask.bias is None else {"attn_mask": mask.bias}
        both = repeated_heads(k, q), repeated_heads(v, q), out, finite(lse)
        dq, dk, dv = self.gradients(grad, q, *both, is_causal=mask.causal, scale=scale, **options)
        return dq, summed_heads(dk, k), summed_heads(dv, v)

    def _recorded(self, mask: AttentionMask, scale: float) -> Callable[..., OutLse]:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> OutLse:
            out, lse = self.forward(q, k, v, mask, scale)
            if not (out.requires_grad and (lse.requires_grad or not self.gives_lse)):
                raise ConfigError(f"kernel {self.name!r} has no autograd: set its gradients=..")
            return out, lse

        return attend


_numbers = count()


@lru_cache(maxsize=1)
def _by_key() -> "WeakValueDictionary[str, FunctionKernel]":
    return WeakValueDictionary()


Kernel = str | FunctionKernel


def named(name: str | None) -> Kernel | None:
    """Return the `FunctionKernel` that has this key; else the name."""
    return name if name is None else _by_key().get(name, name)


# The first kernel that fits is chosen: kernels of a device stand fastest first.
KERNELS: dict[str, AttentionKernel] = {
    "cpu_flash": CpuFlashKernel(),
    "cpu_loop": CpuLoopKernel(),
    "flash_attn_3": FlashAttn3Kernel(),
    "flash_attn": FlashAttn2Kernel(),
    "aten_flash": AtenFlashKernel(),
    "efficient": AtenEfficientKernel(),
    "plain": PlainKernel(),
    "triton": TritonKernel(),
}
_FEW_KEYS = 16  # than a vector register holds: of fewer, torch (2.13) takes nan for a hidden key


def check_name(name: object) -> None:
    """Refuse a kernel that is neither a key of `KERNELS`, a `FunctionKernel` nor None."""
    is_key = isinstance(name, str) and name in KERNELS
    if not (is_key or isinstance(name, FunctionKernel | None)):
        advice = ", or give FunctionKernel(name, function)" if callable(name) else ""
        raise ConfigError(f"kernel {name!r}: choose one of {', '.join(KERNELS)}{advice}")


@lru_cache(maxsize=256)  # looks for packages, and runs in every call of attention
def _unfit(query: KernelQuery) -> dict[str, str | None]:
    """Return why each kernel of `KERNELS` does not fit a query, None if it does."""
    return {name: kernel.unfit(query) for name, kernel in KERNELS.items()}


def select_kernel(
    name: Kernel | None,
    device_type: str,
    *,
    dtype: torch.dtype | None = None,
    head_dim: int | None = None,
    has_bias: bool = False,
    block: int | None = None,
    is_packed: bool = False,
    cap: float = 0.0,
) -> AttentionKernel:
    """Return the kernel of that name, or (None) the first in `KERNELS` that fits the query."""
    query = KernelQuery(device_type, dtype, head_dim, has_bias, block, is_packed, cap)
    reasons = _unfit(query)
    fitting = [other for other, reason in reasons.items() if reason is None]
    if name is None:
        if not fitting:
            raise ConfigError(f"no kernel fits: {_listed(reasons)}")
        name = fitting[0]
    check_name(name)
    kernel = name if isinstance(name, FunctionKernel) else KERNELS[name]
    reason = kernel.unfit(query) if isinstance(name, FunctionKernel) else reasons[name]
    if reason is not None:
        advice = f"use one of {', '.join(fitting)}" if fitting else f"none fits: {_listed(reasons)}"
        raise ConfigError(f"kernel {name!r} {reason}: {advice}")
    return replace(kernel, cap=cap) if cap and isinstance(kernel, PlainKernel) else kernel


def _listed(reasons: Mapping[str, str | None]) -> str:
    return "; ".join(f"{name} {reason}" for name, reason in reasons.items())


def _scores(q: Tensor, k: Tensor, mask: AttentionMask, scale: float, cap: float = 0.0) -> Tensor:
    scores = (q @ repeated_heads(k, q).mT).to(wide_dtype(q)) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    if mask.bias is not None:
        scores = scores + mask.bias
    if mask.causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return scores


def _by_highest(out: Tensor, lse: Tensor, scores: Tensor) -> OutLse:
    """Set out to 0 and LSE to -inf for queries that see no key, nan where a score is nan."""
    highest = scores.amax(dim=-1)
    is_empty, is_none = torch.isneginf(highest), highest.isnan()
    out = out.masked_fill(is_empty[..., None], 0.0).masked_fill(is_none[..., None], math.nan)
    return out, lse.masked_fill(is_empty, -math.inf).masked_fill(is_none, math.nan)


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """Return the softmax by an LSE; 0 for a query without keys."""
    return (scores - finite(lse)[..., None]).exp()
