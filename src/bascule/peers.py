"""Exact attention in place of the attention of yunchang, xDiT and ParaAttention.

Shapes: B batch, H heads, T tokens of this rank, J joint tokens, which every rank has, D head width.
"""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from bascule.attention.api import AttentionMesh, AttentionOptions, SequenceLayout, attention
from bascule.attention.mask import Scores
from bascule.comm.failures import shared
from bascule.comm.groups import member_of, resolve, this_world
from bascule.comm.mesh import as_attention_mesh, group_of, mesh_over
from bascule.diffusers.sparse_layers import SparseConfig, SparseLayers, SparsePass
from bascule.errors import ConfigError

_MODULES = ("LongContextAttention", "LongContextAttentionQKVPacked", "xFuserLongContextAttention")
_KNOWN = ("USP", "ring_attn_func", "ulysses_attn_func", *(f"{name}.forward" for name in _MODULES))
_WITHOUT_EFFECT = ("attn", "backend", "combine_qkv_a2a", "deterministic", "kv_head_repeat", "mesh")
_ROLES = ("query", "key", "value")


def in_place_of(
    peer: Callable[..., Any],
    *,
    mesh: AttentionMesh | DeviceMesh | None = None,
    layout: SequenceLayout | None = None,
    sparse: SparseConfig | None = None,
) -> Callable[..., Tensor]:
    """Return a replacement for another package's attention: same arguments, exact for any shape.

    It replaces `USP` of xDiT, `ulysses_attn_func` or `ring_attn_func` of ParaAttention, with
    tensors (B, H, T, D); or the `forward` of an attention module of yunchang or xDiT, with tensors
    (B, T, H, D). Joint tokens lie before or after the others, in the keys and in the output. Causal
    order, scale, mask, window and cap mean the same as in one process. Choices of a transport or a
    kernel have no effect; nor has `deterministic`: call torch.use_deterministic_algorithms.

    Args:
        peer: The function or the module.
        mesh: The ranks. Default: the ranks of the peer's process groups.
        layout: Which tokens, without joint tokens, each rank has. Default: one segment, split as
            the peer splits it, equally over ranks; with `sparse`, stripes of `sparse.dealt`.
        sparse: Which blocks are computed. A plan is kept between calls; `USP` keeps one for each
            `head_balance_layer` or `attn_layer`.

    Raises:
        ConfigError: An argument, here or in a call, cannot be exact over ranks.
    """
    is_module = isinstance(peer, nn.Module)
    function: Callable[..., Any] = peer.forward if is_module else peer
    if getattr(inspect.unwrap(function), "__qualname__", "") not in _KNOWN:
        raise ConfigError(f"in_place_of({peer!r}): give one of {', '.join(_KNOWN)}")
    for setting in ("attn_processor", "use_kv_cache", "q_descale", "k_descale", "v_descale"):
        _refuse(setting, getattr(peer, setting, None))
    fixed = None if mesh is None else as_attention_mesh(mesh)
    signature, layers = inspect.signature(function), dict[Hashable, SparseLayers]()

    @functools.wraps(function)
    @shared("attention in the place of another package's")
    def attend(*args: Any, **kwargs: Any) -> Tensor:
        arguments = dict(signature.bind(*args, **kwargs).arguments)
        take: Callable[..., Any] = arguments.pop
        qkv: list[Tensor] = (
            [*take("qkv").unbind(2)] if "qkv" in arguments else list(map(take, _ROLES))
        )
        joint = "joint_tensor_" if is_module else "joint_"
        parts: list[Tensor | None] = [take(joint + role, None) for role in _ROLES]
        text = [x for x in parts if x is not None]
        if is_module:
            qkv, text = ([x.transpose(1, 2) for x in tensors] for tensors in (qkv, text))
        ranks = fixed or _mesh_of_peer(peer, take("mesh", None))
        strategy, mask = take("joint_strategy", None), take("attn_mask", None)
        is_causal = take("causal", take("is_causal", False))
        scale = take("softmax_scale", take("scale", None))
        (left, right), cap = take("window_size", (-1, -1)), take("softcap", 0.0)
        attn, handle = take("attn_layer", None), take("head_balance_layer", None)
        caches = sys.modules.get("xfuser.core.cache_manager.cache_manager")
        if attn is not None and caches is not None:
            _refuse("PipeFusion's cache", caches.get_cache_manager().has_cache_entry(attn))
        for name, value in arguments.items():
            _refuse(name, name not in _WITHOUT_EFFECT and value)
        _refuse("window_size without causal", not is_causal and (left, right) != (-1, -1))
        tokens = layout or _layout(peer, ranks, qkv[0].shape[2], sparse)
        has_text = bool(text) or strategy not in (None, "none")
        if sparse is not None:
            unfit = {"mask": mask, "joint": has_text, "causal": is_causal, "softcap": cap}
            for name, value in unfit.items():
                _refuse(f"{name} with sparse", value)
        elif has_text:
            qkv, tokens = _joined(qkv, text, strategy, tokens)
        q, k, v = qkv
        with torch.autocast(q.device.type, enabled=False):  # the kernels take the dtype of q
            if sparse is not None:
                if tokens.stripe != sparse.dealt:
                    raise ConfigError(f"{tokens} with sparse: give it stripe={sparse.dealt}")
                layer = attn if handle is None else handle
                how = {x: getattr(tokens, x) for x in ("stripe", "turn_step", "turn_skip")}
                new = SparseLayers(sparse, ranks, dealt=how)
                one_pass = SparsePass(layers.setdefault(layer, new))
                lens = {str(number): length for number, length in enumerate(tokens.segments)}
                out = one_pass.attend(one_pass.next_layer() or 0, (q, k, v), lens, scale, None)
                one_pass.end()
            else:
                options = AttentionOptions(tokens, scores=Scores(left + 1, cap=cap))
                more: Any = {"attn_mask": mask, "is_causal": is_causal, "scale": scale}
                out = attention(q, k, v, ranks, options=options, **more)
        return out.transpose(1, 2) if is_module else out

    return attend


def _refuse(name: str, value: object) -> None:
    """Refuse a setting whose value is not None, False, 0 or empty."""
    is_object = isinstance(value, Tensor | nn.Module)
    if is_object or value:
        shown = type(value).__name__ if is_object else repr(value)
        what = f"{name} ({shown}) is not supported in place of another package's attention"
        raise ConfigError(f"{what}: leave it out, or call that package's attention here")


def _mesh_of_peer(peer: Any, mesh: DeviceMesh | dist.ProcessGroup | None) -> AttentionMesh:
    """Return the mesh of the process groups that a peer uses, made once."""
    groups: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]
    if isinstance(peer, nn.Module):
        owner: Any = peer
        groups = owner.ring_pg, owner.ulysses_pg
    elif peer.__name__ == "USP":
        owner = importlib.import_module("yunchang.globals").PROCESS_GROUP
        groups = owner.RING_PG, owner.ULYSSES_PG
    else:
        is_ring = peer.__name__ == "ring_attn_func"
        groups = (resolve(mesh), None) if is_ring else (None, resolve(mesh))
    if groups == (None, None):
        fix = "initialize_model_parallel of xDiT, or set_seq_parallel_pg of yunchang"
        raise ConfigError(f"USP has no process groups yet: first call {fix}; or give mesh=..")
    rows, columns = (dist.get_process_group_ranks(x) if x else [dist.get_rank()] for x in groups)
    ranks = tuple(row + column - dist.get_rank() for row in rows for column in columns)

    def make() -> AttentionMesh:
        if len(ranks) == 1:
            return AttentionMesh(None, None, None)
        existing = [x for x in (*groups, resolve(None)) if x is not None]
        same = [x for x in existing if {*dist.get_process_group_ranks(x)} == {*ranks}]
        whole = member_of(same[0], "attention", ranks=ranks) if same else group_of(ranks)
        return mesh_over(whole, ring=len(rows), ulysses=len(columns))

    return this_world().cached((in_place_of, ranks, len(rows)), make, lambda made: made.exists)


def _layout(
    peer: Any, ranks: AttentionMesh, num_tokens: int, sparse: SparseConfig | None
) -> SequenceLayout:
    """Return the layout in which the peer cuts a sequence, with as many tokens on every rank."""
    ring, ulysses = ranks.degrees
    kind = getattr(getattr(peer, "ring_attn_fn", None), "__name__", "").partition("_")[0]
    is_zigzag, is_dealt = (kind == name and ring > 1 for name in ("zigzag", "stripe"))
    if ulysses > 1 and sparse is None and (is_zigzag or is_dealt):
        what = f"yunchang's {kind} ring on {ring} x {ulysses} ranks (ring x Ulysses)"
        raise ConfigError(f"{what} has an order of its own: shard tokens by a layout, and give it")
    shards: dict[str, Any] = {"zigzag": is_zigzag, "stripe": int(is_dealt), "turn_step": 0}
    shards = shards if sparse is None else {"stripe": sparse.dealt}
    return SequenceLayout((num_tokens * ring * ulysses,), ring, ulysses, **shards)


def _joined(
    qkv: list[Tensor], text: list[Tensor], strategy: str | None, layout: SequenceLayout
) -> tuple[list[Tensor], SequenceLayout]:
    """Join the joint tokens, which every rank has, to q, k and v and the layout."""
    if len(text) < 3 or strategy not in ("front", "rear"):
        what = f"joint_strategy={strategy!r} and {len(text)} joint tensors"
        raise ConfigError(f"{what}: give 'front' or 'rear', and a joint query, key and value")
    at = 0 if strategy == "front" else len(layout.segments)
    pairs = zip(qkv, text, strict=True)
    joined = [torch.cat((x, y) if at else (y, x), 2) for x, y in pairs]
    segments = (*layout.segments[:at], text[0].shape[2], *layout.segments[at:])
    return joined, replace(layout, segments=segments, replicated=(at,))
