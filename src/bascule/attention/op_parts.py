"""What the operators of attention have in common: what their arguments mean, how results lie.

Shapes: as in `ops`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from bascule.attention.blocks import select_block_kernel
from bascule.attention.head_exchange import HeadExchange
from bascule.attention.layout import SequenceLayout
from bascule.attention.masks import tiles_of
from bascule.attention.ranks import AttentionMesh, mesh_named
from bascule.attention.ring import RingPlan
from bascule.attention.ulysses import HeadShares
from bascule.comm.quantize import Wire
from bascule.errors import CommError


def places(
    segments: Sequence[int], zigzag: bool, stripe: int, mesh: str
) -> tuple[AttentionMesh, SequenceLayout]:
    """The mesh of that name, and which tokens each of its ranks has."""
    ranks = mesh_named(mesh)
    return ranks, SequenceLayout(tuple(segments), *ranks.degrees, zigzag, stripe=stripe)


def wire_of(format: str, k_centre: Tensor | None, v_centre: Tensor | None) -> Wire | None:
    """From what operators can take; "" stands for none."""
    return Wire(format, k_centre, v_centre) if format else None  # pyright: ignore[reportArgumentType]


def ring_plan(
    ranks: AttentionMesh,
    layout: SequenceLayout,
    q: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    kernel: str,
    wire: Wire | None,
) -> RingPlan:
    """What this rank does in each round, of a call with these settings."""
    tiles = tiles_of(layout, ranks.place[0], mask, causal, q)
    return RingPlan(
        group=ranks.ring,
        kv_lens=layout.ring_lens,
        tiles=tiles,
        kernel=select_block_kernel(
            kernel or None,
            q.device.type,
            dtype=q.dtype,
            head_dim=q.shape[-1],
            has_bias=any(tile.seen.bias is not None for row in tiles for tile in row),
        ),
        scale=scale,
        wire=wire,
    )


@lru_cache(maxsize=256)
def exchange_of(ranks: AttentionMesh, layout: SequenceLayout, num_kv_heads: int) -> HeadExchange:
    """Who of the Ulysses ranks has which tokens and heads."""
    assert ranks.ulysses is not None
    shares = HeadShares.split(num_kv_heads, num_kv_heads, ranks.degrees[1])
    return HeadExchange(ranks.ulysses, shares, layout.exchanged_lens(ranks.place[0]))


@lru_cache(maxsize=256)
def gather_index(layout: SequenceLayout, device: torch.device) -> tuple[Tensor, int]:
    """(S,) row of each token where all ranks' tokens are padded to the same number; that number."""
    num_ring, num_ulysses = layout.ring_degree, layout.ulysses_degree
    places = [(ring, one) for ring in range(num_ring) for one in range(num_ulysses)]
    owned = [
        np.concatenate([np.arange(*run) for run in layout.own_runs(*place) or [(0, 0)]])
        for place in places
    ]
    padded = max(1, *(tokens.size for tokens in owned))
    index = np.empty(layout.seq_len, dtype=np.int64)
    for number, tokens in enumerate(owned):
        index[tokens] = number * padded + np.arange(tokens.size)
    return torch.from_numpy(index).to(device), padded


@contextmanager
def naming(what: str, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Add to a failed collective's error which operator it belongs to, and the shapes."""
    try:
        yield
    except CommError as error:
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors)
        raise CommError(f"{error} [{what} of {shapes}, {tensors[0].dtype}]") from error


def own_kv_heads(ranks: AttentionMesh, num_kv_heads: int) -> int:
    """Key-value heads of this rank."""
    shares = HeadShares.split(num_kv_heads, num_kv_heads, ranks.degrees[1])
    return shares.of(ranks.place[1])


def laid_out(x: Tensor) -> Tensor:
    """(B, H, T, D), in memory as (B, T, H, D)."""
    return own_memory(x.transpose(1, 2)).transpose(1, 2)


def own_memory(x: Tensor) -> Tensor:
    """Contiguous; a copy if it is a part of something, as results of operators must not be."""
    is_part = x.untyped_storage().nbytes() != x.numel() * x.element_size() or not x.numel()
    return x.clone(memory_format=torch.contiguous_format) if is_part else x.contiguous()


def empty(x: Tensor, num_heads: int, tokens: int) -> Tensor:
    """(B, `num_heads`, `tokens`, D) as `laid_out` gives it, without values."""
    return x.new_empty(x.shape[0], tokens, num_heads, x.shape[3]).transpose(1, 2)


def as_bytes(x: Tensor) -> Tensor:
    """The same memory."""
    return x.view(-1).view(torch.uint8)
