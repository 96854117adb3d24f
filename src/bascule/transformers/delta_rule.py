"""Gated delta layers of transformers over ranks and in packed rows, split by heads.

Their convolution and state run along a sequence, separately for each head. So each rank computes
some heads of all tokens between two exchanges, one sequence after another. Shapes: B batch, T
tokens of this rank, K key heads, V value heads (a multiple of K), D head_dim.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from inspect import unwrap
from itertools import accumulate
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.utils.import_utils import is_causal_conv1d_available as has_conv
from transformers.utils.import_utils import is_flash_linear_attention_available as has_fla

from bascule.comm.shared_row import SharedRow
from bascule.errors import ConfigError
from bascule.stand_in import StandIn

_CONV, _DELTA = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"  # globals of transformers' code


def split_delta_layers(model: nn.Module) -> Callable[[], None]:
    """Let gated delta layers keep the sequences of a row apart; return an undo function.

    Layers follow the step of a call; or the bounds of samples in ``cu_seq_lens_q``, if transformers
    lacks the packages for these. Other calls compute as before. `call_packed` and
    `context_parallel` never undo the change, because checkpoints recompute layers in the backward
    pass; training with `BalanceConfig(pack=..)` undoes it at its end.
    """
    return split_layers(delta_layers(model))


def split_layers(layers: Sequence[nn.Module]) -> Callable[[], None]:
    """Replace the forward of gated delta layers by `_forward`; return an undo function."""
    undo = ExitStack()
    for layer in layers:
        if not getattr(layer.forward, "is_on", False):
            follow = partial(_forward, layer, has_conv() and has_fla())
            undo.callback(StandIn(layer, "forward", follow).remove)
    return undo.close


def delta_layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose forward pass calls transformers' convolution and delta rule."""
    return [module for module in model.modules() if _is_delta_layer(type(module))]


@cache
def _is_delta_layer(kind: type[nn.Module]) -> bool:
    code = getattr(unwrap(getattr(kind, "forward", nn.Module.forward)), "__code__", None)
    return code is not None and {_CONV, _DELTA} <= {*code.co_names}


def _forward(
    layer: nn.Module, has_packages: bool, forward: Callable[..., Tensor], *args: Any, **kwargs: Any
) -> Tensor:
    step, bounds = kwargs.get("bascule_step"), kwargs.get("cu_seq_lens_q")
    if step is None and (bounds is None or has_packages):
        return forward(*args, **kwargs)
    return _split(layer, step, bounds, *args, **kwargs)


@torch.compiler.disable(reason="gated delta layers exchange heads")
def _split(layer: nn.Module, step: Any, bounds: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Run a layer's code with its two functions that mix tokens replaced in its globals."""
    code: Any = unwrap(type(layer).forward)
    names = code.__globals__
    row = SharedRow(bounds.diff().tolist()) if step is None else step.row
    heads = _Heads(row, names[_CONV], names[_DELTA])
    names = names | {_CONV: heads.convolve, _DELTA: heads.scan}
    forward = FunctionType(code.__code__, names, None, code.__defaults__, code.__closure__)
    return forward(layer, *args, **kwargs)


@dataclass
class _Heads:
    """Convolution and delta rule of one call of a layer, for some heads of all tokens."""

    row: SharedRow
    conv: Callable[..., Tensor]
    delta: Callable[..., Any]
    weight: Any = None
    activation: Any = None

    def convolve(self, x: Tensor, weight: Tensor, bias: None = None, **settings: Any) -> Tensor:
        """Record the weight and return x: `scan` convolves the tokens of all ranks."""
        assert bias is None  # in all models of transformers
        self.weight, self.activation = weight, settings["activation"]
        return x

    def scan(self, q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> tuple[Tensor, None]:
        """Map q and k (B, T, K, D), v (B, T, V, D), g and beta (B, T, V) to (B, T, V, D)."""
        if settings["output_final_state"]:
            where = "where ranks share its heads or a row has several sequences"
            raise ConfigError(f"a gated delta layer with a cache, {where}: give use_cache=False")
        gates, is_normed = (settings["g"], settings["beta"]), settings["use_qk_l2norm_in_kernel"]
        row, (num_tokens, num_heads, dk), (num_values, dv) = self.row, k.shape[1:], v.shape[2:]
        sizes = [num_heads * dk, num_heads * dk, num_values * dv]
        kernels = [kernel.unflatten(0, (num_heads, -1)) for kernel in self.weight.split(sizes)]
        if num_heads < len(row.counts):  # too few key heads: repeat them for each value head
            each, num_heads = num_values // num_heads, num_values
            q, k = (x.repeat_interleave(each, 2) for x in (q, k))
            kernels[:2] = (x.repeat_interleave(each, 0) for x in kernels[:2])
            kernels[2] = kernels[2].reshape(num_values, dv, -1)
        kernel = torch.cat([x[row.own_heads(num_heads)].flatten(0, 1) for x in kernels])
        by_head = [x.reshape(len(x), num_tokens, num_heads, -1) for x in (v, *gates)]
        *qkv, g, beta = row.to_heads([q, k, *by_head])
        g, beta, widths = g.flatten(2), beta.flatten(2), [x.shape[2] * x.shape[3] for x in qkv]
        mixed = torch.cat([x.flatten(2) for x in qkv], 2).transpose(1, 2)
        outs = list[Tensor]()
        for end, length in zip(accumulate(row.seq_lens), row.seq_lens, strict=True):
            if length and widths[0]:
                at = slice(end - length, end)
                x = self.conv(mixed[:, :, at], kernel, None, activation=self.activation)
                parts = zip(x.transpose(1, 2).split(widths, 2), (dk, dk, dv), strict=True)
                xs: Any = [x.unflatten(2, (-1, width)) for x, width in parts]
                seq_gates: Any = {"g": g[:, at], "beta": beta[:, at]}
                outs.append(self.delta(*xs, **seq_gates, use_qk_l2norm_in_kernel=is_normed)[0])
        # Without heads or tokens it is empty, but in the graph: all ranks exchange in backward.
        out = torch.cat(outs, 1) if outs else qkv[2] + kernel.sum()
        out = row.to_tokens(out.reshape(qkv[2].shape), num_heads).reshape(len(v), -1, *v.shape[2:])
        # A rank without tokens computes one, of zeros.
        return pad(out, (0, 0, 0, 0, 0, num_tokens - out.shape[1])), None
