"""Mesh attention under the signatures of other engines (xDiT, ParaAttention).

xDiT calls one function, `USP` (xfuser 0.7.0), and reads the ranks from its own globals; here they
are bound first: `usp(mesh)` is that function. ParaAttention (0.3.38) calls `ulysses_attn_func`,
`ring_attn_func` and `in_batch_attn_func`, which take what `scaled_dot_product_attention` takes.

What an engine asks for and mesh attention does not do is refused, not ignored.

Shapes: as in `attention.api`; J joint tokens, which every rank has.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from bascule.attention.api import AttentionOptions, attention
from bascule.attention.layout import SequenceLayout
from bascule.comm.groups import member_of
from bascule.comm.mesh import (
    RING_AXIS,
    ULYSSES_AXIS,
    AttentionMesh,
    Place,
    facts_of,
    place_in,
    real_mesh,
)
from bascule.errors import ConfigError

Mesh = AttentionMesh | DeviceMesh | dist.ProcessGroup
JointStrategy = Literal["front", "rear"]


@dataclass(frozen=True, slots=True)
class Usp:
    """xDiT's `USP` on a mesh.

    Attributes:
        mesh: This rank's place among the ranks.
        layout: Which tokens, without the joint ones, each rank has. None: one segment, the same
            number on every rank.
    """

    mesh: Place
    layout: SequenceLayout | None = None

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        joint_query: Tensor | None = None,
        joint_key: Tensor | None = None,
        joint_value: Tensor | None = None,
        joint_strategy: JointStrategy | None = None,
        attn_layer: object = None,
        combine_qkv_a2a: bool | None = None,
        backend: str | None = None,
        attention_kwargs: Mapping[str, object] | None = None,
        head_balance_layer: object = None,
        kv_head_repeat: int = 1,
    ) -> Tensor:
        """Attention of (B, H, T, D) and joint (B, H, J, D) tokens; (B, H, T + J, D).

        Args:
            query: Of this rank's tokens.
            key: As `query`, of H / kv_head_repeat heads.
            value: As `key`.
            dropout_p: 0.
            is_causal: As in `attention`.
            joint_query: The same on every rank, as the next two; all three or none.
            joint_key: See `joint_query`.
            joint_value: See `joint_query`.
            joint_strategy: Whether the joint tokens come before ("front") or after ("rear") the
                others, as keys and in what is returned.
            attn_layer: None.
            combine_qkv_a2a: Has no effect: all three always travel in one all-to-all.
            backend: Name of a kernel of bascule.
            attention_kwargs: Empty.
            head_balance_layer: Has no effect: xDiT finds its head costs by it.
            kv_head_repeat: Query heads of each key-value head.

        Raises:
            ConfigError: The arguments do not fit together, or ask for what is not done here.
        """
        _refuse_dropout(dropout_p)
        if attn_layer is not None:
            raise ConfigError(
                f"USP: attn_layer is a {type(attn_layer).__name__}, and xDiT finds PipeFusion's "
                "cache of keys and values by it, which mesh attention does not have: give None"
            )
        if attention_kwargs:
            raise ConfigError(
                f"USP: attention_kwargs {sorted(attention_kwargs)} are for back ends of xDiT: call "
                "bascule.attention.api.attention, which takes a mask"
            )
        if backend is not None and not isinstance(backend, str):
            raise ConfigError(
                f"USP: backend {backend!r} is one of xDiT's: give the name of a kernel of bascule"
            )
        if query.shape[1] != key.shape[1] * kv_head_repeat:
            raise ConfigError(
                f"USP: {query.shape[1]} query heads and {key.shape[1]} key-value heads, and "
                f"kv_head_repeat is {kv_head_repeat}: give {query.shape[1] // key.shape[1]}"
            )
        layout, joint = self._layout(query), (joint_query, joint_key, joint_value)
        if any(x is not None for x in joint) or joint_strategy is not None:
            joined = _joined((query, key, value), joint, joint_strategy)
            query, key, value = joined
            assert joint_query is not None
            layout = _with_joint(layout, joint_query.shape[2], joint_strategy == "front")
        options = AttentionOptions(layout=layout, kernel=backend)
        return attention(query, key, value, self.mesh, is_causal=is_causal, options=options)

    def _layout(self, query: Tensor) -> SequenceLayout:
        if self.layout is not None:
            return self.layout
        ring, ulysses = self.mesh.degrees
        return SequenceLayout((query.shape[2] * ring * ulysses,), ring, ulysses)


def usp(mesh: Mesh, layout: SequenceLayout | None = None) -> Usp:
    """Make xDiT's `USP` for the ranks of a mesh; see `Usp`.

    Args:
        mesh: A mesh with the axes "ring" and "ulysses", others aside, or a group for Ulysses.
        layout: See `Usp`.
    """
    return Usp(_place(mesh), layout)


def unified_attn_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    mesh: Mesh,
    attn_func: None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """ParaAttention's `ulysses_attn_func` and `ring_attn_func`: attention of the whole mesh.

    Args:
        query: (B, H, T, D), the same number of tokens on every rank.
        key: (B, K, T, D).
        value: (B, K, T, D).
        attn_mask: Of the whole sequence, as in `attention`; also around a ring.
        dropout_p: 0.
        is_causal: As in `attention`.
        scale: As in `attention`.
        mesh: A mesh with the axes "ring" and "ulysses", others aside, or a group for Ulysses.
        attn_func: None.
        enable_gqa: Whether K may differ from H, as in `scaled_dot_product_attention`.

    Raises:
        ConfigError: The arguments do not fit together, or ask for what is not done here.
    """
    _refuse_dropout(dropout_p)
    if attn_func is not None:
        raise ConfigError(
            f"attn_func {attn_func!r} returns no log-sum-exp, without which a ring cannot merge: "
            "name a kernel of bascule in bascule.attention.api.attention"
        )
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ConfigError(
            f"{query.shape[1]} query heads and {key.shape[1]} key-value heads: set enable_gqa"
        )
    return attention(
        query, key, value, _place(mesh), attn_mask=attn_mask, is_causal=is_causal, scale=scale
    )


def in_batch_attn_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    mesh: Mesh,
) -> Tensor:
    """ParaAttention's function of that name: every token attends to those of the whole batch.

    Args:
        query: (B, H, T, D), the same number of tokens on every rank.
        key: (B, K, T, D).
        value: (B, K, T, D).
        attn_mask: None.
        dropout_p: 0.
        is_causal: False.
        scale: As in `attention`.
        mesh: As in `unified_attn_func`.

    Raises:
        ConfigError: The arguments ask for what is not done here.
    """
    _refuse_dropout(dropout_p)
    if attn_mask is not None or is_causal:
        raise ConfigError("in-batch attention takes no mask and is not causal")
    ranks, (batch, _, tokens, _) = _place(mesh), query.shape
    num_ranks = ranks.degrees[0] * ranks.degrees[1]
    layout = SequenceLayout((tokens * num_ranks,) * batch, *ranks.degrees)
    q, k, v = (x.transpose(0, 1).flatten(1, 2)[None] for x in (query, key, value))
    out = attention(q, k, v, ranks, scale=scale, options=AttentionOptions(layout=layout))
    return out[0].unflatten(1, (batch, tokens)).transpose(0, 1)


def _place(mesh: Mesh) -> Place:
    if isinstance(mesh, DeviceMesh):
        return Place(*_facts_among_others(mesh))
    if isinstance(mesh, AttentionMesh):
        return place_in(mesh)
    group = member_of(mesh, ULYSSES_AXIS)
    several = group if group.size > 1 else None
    return place_in(AttentionMesh(None, several, several))


@torch.compiler.assume_constant_result
def _facts_among_others(mesh: DeviceMesh) -> tuple[tuple[int, int], tuple[int, int], str]:
    """`facts_of` the two axes of a mesh that attend."""
    mesh = real_mesh(mesh)
    axes = mesh.mesh_dim_names or ()
    names = tuple(name for name in (RING_AXIS, ULYSSES_AXIS) if name in axes)
    if not names:
        raise ConfigError(f"a mesh with the axes {axes}: needs 'ring' or 'ulysses'")
    return facts_of(mesh if names == tuple(axes) else mesh[names])


def _joined(
    tensors: tuple[Tensor, Tensor, Tensor],
    joint: tuple[Tensor | None, Tensor | None, Tensor | None],
    strategy: str | None,
) -> list[Tensor]:
    """Query, key and value with the joint tokens before or after the others."""
    found = [x for x in joint if x is not None]
    if strategy not in ("front", "rear") or len(found) < 3:
        raise ConfigError(
            f"USP: joint_strategy {strategy!r} and {len(found)} joint tensors: give 'front' or "
            "'rear', and joint_query, joint_key and joint_value"
        )
    pairs = zip(tensors, found, strict=True)
    return [torch.cat((y, x) if strategy == "front" else (x, y), dim=2) for x, y in pairs]


def _with_joint(layout: SequenceLayout, num_joint: int, is_front: bool) -> SequenceLayout:
    """The layout with one more segment, of tokens that every rank has."""
    if not is_front:
        segments = (*layout.segments, num_joint)
        return replace(
            layout, segments=segments, replicated=(*layout.replicated, len(layout.segments))
        )
    moved = (segment + 1 for segment in layout.replicated)
    return replace(layout, segments=(num_joint, *layout.segments), replicated=(0, *moved))


def _refuse_dropout(dropout_p: float) -> None:
    if dropout_p:
        raise ConfigError(f"dropout_p is {dropout_p}: mesh attention drops nothing, give 0")
