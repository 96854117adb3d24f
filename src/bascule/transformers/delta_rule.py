"""Gated delta layers of transformers over ranks and in rows of sequences, by heads.

Their convolution and their state run along a sequence, each head by itself. So between exchanges
each rank computes some heads of all tokens, one sequence after another. Shapes: B batch, T tokens
of this rank, S of all ranks together, K key heads, V value heads (a multiple of K), D head width.
"""

from collections.abc import Callable, Sequence
from functools import partial
from inspect import unwrap
from itertools import accumulate, pairwise
from math import prod
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.utils import is_causal_conv1d_available, is_flash_linear_attention_available

from bascule.comm.collectives import start_all_to_all
from bascule.comm.groups import RankGroup
from bascule.errors import ConfigError
from bascule.stand_in import StandIn

_CONV, _DELTA = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"  # so layers call the kernels


class Rows(NamedTuple):
    """The sequences of a row, and where their tokens are."""

    seq_lens: Sequence[int]  # one after the other
    group: RankGroup | None = None  # that shares them; None for one rank
    counts: Sequence[int] = ()  # tokens of each of its ranks
    order: Tensor | None = None  # (S,) indices from the order of ranks to that of sequences


RowsOf = Callable[[Any, Tensor], Rows]
"""Returns the rows of a step, on the device of a tensor."""


class ByHeads(StandIn):
    """The forward of a gated delta layer, by heads where a call carries a step.

    Or bounds of samples, `cu_seq_lens_q`, which transformers' own code needs two packages for.
    Other calls are the layer's own. It stays until `remove`, not for a call only: checkpoints
    compute the layer again in backward, with the arguments of the call.
    """

    __slots__ = ()

    def __init__(self, layer: nn.Module, rows_of: RowsOf) -> None:
        super().__init__(layer, "forward", partial(_forward, layer, rows_of))


def by_heads(model: nn.Module) -> list[ByHeads]:
    """Return the stand-ins of a model's gated delta layers that have one."""
    forwards = [vars(module).get("forward") for module in model.modules()]
    return [one for one in forwards if isinstance(one, ByHeads)]


def put_by_heads(model: nn.Module, rows_of: RowsOf) -> list[ByHeads]:
    """Put stand-ins on a model's gated delta layers that have none; return them."""
    known = {one.owner for one in by_heads(model)}
    return [ByHeads(layer, rows_of) for layer in delta_layers(model) if layer not in known]


def delta_layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose forward calls transformers' convolution and delta rule."""

    def is_one(kind: type[nn.Module]) -> bool:
        code = getattr(unwrap(kind.forward), "__code__", None)
        return {_CONV, _DELTA} <= {*getattr(code, "co_names", ())}

    kinds = {kind for kind in {type(module) for module in model.modules()} if is_one(kind)}
    return [module for module in model.modules() if type(module) in kinds]


def _forward(
    layer: nn.Module, rows_of: RowsOf, own: Callable[..., Tensor], *args: Any, **kwargs: Any
) -> Tensor:
    step, bounds = kwargs.get("bascule_step"), kwargs.get("cu_seq_lens_q")
    if step is None and (bounds is None or _has_kernels()):
        return own(*args, **kwargs)
    return _split(layer, rows_of, step, bounds, *args, **kwargs)


def _has_kernels() -> bool:
    """Return whether transformers itself can keep samples apart."""
    return is_causal_conv1d_available() and is_flash_linear_attention_available()


@torch.compiler.disable(reason="gated delta layers exchange heads")
def _split(
    layer: nn.Module, rows_of: RowsOf, step: Any, bounds: Any, *args: Any, **kwargs: Any
) -> Tensor:
    """Call the code of a layer with other functions in place of the two that mix tokens."""
    code: Any = unwrap(type(layer).forward)
    places = code.__globals__
    heads = _Heads(
        places[_CONV],
        places[_DELTA],
        lambda x: Rows(bounds.diff().tolist()) if step is None else rows_of(step, x),
    )
    places = places | {_CONV: heads.convolve, _DELTA: heads.scan}
    forward = FunctionType(code.__code__, places, None, code.__defaults__, code.__closure__)
    forward.__kwdefaults__ = code.__kwdefaults__
    return forward(layer, *args, **kwargs)


class _Heads:
    """One call of a layer: its convolution and its delta rule, for some heads of all tokens."""

    def __init__(
        self, conv: Callable[..., Tensor], delta: Callable[..., Any], rows_of: Callable[..., Rows]
    ) -> None:
        self._conv, self._delta, self._rows_of = conv, delta, rows_of

    def convolve(
        self, x: Tensor, weight: Tensor, bias: None = None, *, activation: Any, **_: Any
    ) -> Tensor:
        """Leave the tokens to `scan`, which gets those of all ranks."""
        assert bias is None  # in all of transformers
        self._weight, self._activation = weight, activation
        return x

    def scan(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        g: Tensor,
        beta: Tensor,
        output_final_state: bool,
        use_qk_l2norm_in_kernel: bool,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Compute (B, T, V, D) from q and k (B, T, K, D), v (B, T, V, D), g and beta (B, T, V)."""
        if output_final_state:
            raise ConfigError(
                "a gated delta layer with a cache, where ranks share its heads or a row has "
                "several sequences: call the model with use_cache=False"
            )
        rows = self._rows_of(q)
        num_ranks, rank = max(len(rows.counts), 1), rows.group.rank if rows.group else 0
        (num_rows, num_tokens, num_heads, dk), (num_values, dv) = k.shape, v.shape[2:]
        sizes = [num_heads * dk, num_heads * dk, num_values * dv]
        kernels = [one.unflatten(0, (num_heads, -1)) for one in self._weight.split(sizes)]
        if num_heads < num_ranks:  # value heads with keys of their own
            each, num_heads = num_values // num_heads, num_values
            q, k = (x.repeat_interleave(each, 2) for x in (q, k))
            kernels[:2] = (x.repeat_interleave(each, 0) for x in kernels[:2])
            kernels[2] = kernels[2].reshape(num_values, dv, -1)
        each = num_values // num_heads  # value heads of a head
        bounds = [place * num_heads // num_ranks for place in range(num_ranks + 1)]
        own = bounds[rank + 1] - bounds[rank]
        kernel = torch.cat([x[bounds[rank] : bounds[rank + 1]].flatten(0, 1) for x in kernels])
        tokens = torch.cat([q, k, v.reshape(num_rows, num_tokens, num_heads, each * dv)], 3)
        # Decays are wider than tokens, and betas fit in both: another exchange.
        gates = torch.cat([x.unflatten(2, (num_heads, each)) for x in (g, beta)], 3)
        tokens, gates = (_to_heads(x, rows, bounds) for x in (tokens, gates))
        *_, values = parts = tokens.split([dk, dk, each * dv], 3)
        mixed = torch.cat([x.flatten(2) for x in parts], 2).transpose(1, 2)
        g, own_beta = (x.flatten(2) for x in gates.split(each, 3))
        beta, outs = own_beta.to(beta.dtype), list[Tensor]()
        for end, length in zip(accumulate(rows.seq_lens), rows.seq_lens, strict=True):
            if own and length:
                at = slice(end - length, end)
                x = self._conv(mixed[:, :, at], kernel, None, activation=self._activation)
                xs = x.transpose(1, 2).split([own * dk, own * dk, own * each * dv], 2)
                xs = [x.unflatten(2, (-1, d)) for x, d in zip(xs, (dk, dk, dv), strict=True)]
                settings: Any = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
                outs.append(self._delta(*xs, g=g[:, at], beta=beta[:, at], **settings)[0])
        # Without heads or tokens it is empty, but of all inputs: backward exchanges what others do.
        out = torch.cat(outs, 1) if outs else values + (g.sum() + beta.sum() + kernel.sum())
        out = _to_tokens(out.reshape(values.shape), rows, bounds)
        out = out.reshape(num_rows, -1, num_values, dv)
        # A rank without tokens computes one, of zeros.
        return pad(out, (0, 0, 0, 0, 0, num_tokens - out.shape[1])), None


def _to_heads(x: Tensor, rows: Rows, bounds: Sequence[int]) -> Tensor:
    """Return this rank's heads of all tokens, (B, S, own heads, F), from (B, T, heads, F)."""
    if rows.group is None or rows.order is None:
        return x[:, : sum(rows.seq_lens)]
    rank, (num_rows, _, _, width) = rows.group.rank, x.shape
    parts = [x[:, : rows.counts[rank], a:b].transpose(0, 1) for a, b in pairwise(bounds)]
    shape = num_rows, bounds[rank + 1] - bounds[rank], width
    come = _exchange(rows.group, parts, [(count, *shape) for count in rows.counts])
    return torch.cat(come)[rows.order].transpose(0, 1)


def _to_tokens(x: Tensor, rows: Rows, bounds: Sequence[int]) -> Tensor:
    """Return this rank's tokens of all heads, (B, T, heads, F): back from `_to_heads`."""
    if rows.group is None or rows.order is None:
        return x
    (num_rows, _, _, width), count = x.shape, rows.counts[rows.group.rank]
    parts = x.transpose(0, 1)[rows.order.argsort()].split(list(rows.counts))
    shapes = [(count, num_rows, b - a, width) for a, b in pairwise(bounds)]
    return torch.cat(_exchange(rows.group, parts, shapes), 2).transpose(0, 1)


def _exchange(
    group: RankGroup, parts: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]
) -> list[Tensor]:
    """Send a tensor to each rank, and return what comes from each, of these shapes."""
    flat, go = torch.cat([x.flatten() for x in parts]), [x.numel() for x in parts]
    come = [prod(shape) for shape in shapes]
    received: Tensor = _AllToAll.apply(flat, group, come, go)  # pyright: ignore
    return [x.view(shape) for x, shape in zip(received.split(come), shapes, strict=True)]


class _AllToAll(torch.autograd.Function):
    """Values to each rank of a group, and from each; backward the other way."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, group: RankGroup, come: list[int], go: list[int]) -> Tensor:
        ctx.way = group, go, come
        received = flat.new_empty(sum(come))
        start_all_to_all(group, "heads of a gated delta layer", received, flat, come, go)()
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _AllToAll.apply(grad.contiguous(), *ctx.way), None, None, None
