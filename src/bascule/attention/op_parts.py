"""What the operators of attention have in common: what their arguments mean, how results lie.

Shapes: as in `ops`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from bascule.attention.forms import digest_of
from bascule.attention.head_exchange import HeadExchange
from bascule.attention.kernels.registry import select_block_kernel
from bascule.attention.masks import tiles_of
from bascule.attention.ring import RingPlan
from bascule.attention.shards import SequenceLayout, num_tokens
from bascule.attention.ulysses import HeadShares
from bascule.comm.meshes import AttentionMesh, mesh_named
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
    k: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    kernel: str,
    wire: Wire | None,
    form: str,
) -> RingPlan:
    """What this rank does in each round, of a call with these settings.

    They mark the next calls of the ring and of the Ulysses ranks: all must be given the same.
    """
    settings = f"{layout}, {causal=}, {scale=}, {kernel=}, {form}, mask {digest_of(mask)}"
    for group in (ranks.ring, ranks.ulysses):
        if group is not None:
            group.calls.mean(settings)
    tiles = tiles_of(layout, ranks.place[0], _of_own_heads(mask, q, k, ranks), causal, q)
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


def numbers_of(mesh: str) -> str:
    """How many calls the groups of a mesh have made, as text."""
    ranks = mesh_named(mesh)
    return str([group.calls.number for group in (ranks.ring, ranks.ulysses) if group is not None])


def going_back(mesh: str, numbers: str, grad: Tensor) -> None:
    """Mark what follows as the backward of the call of these numbers: ranks must take the same.

    Compilers, which trace with fake tensors, do not see it.
    """
    if is_fake(grad):
        return
    ranks = mesh_named(mesh)
    for group in (ranks.ring, ranks.ulysses):
        if group is not None:
            group.calls.mean(f"gradients of {numbers}")


def _of_own_heads(mask: Tensor | None, q: Tensor, k: Tensor, ranks: AttentionMesh) -> Tensor | None:
    """(B or 1, heads of `q` or 1, S or 1, S or 1) of a mask of all heads.

    `k` has the key-value heads of this rank, and every one of them as many query heads.
    """
    if mask is None:
        return None
    mask = mask[(None,) * (4 - mask.dim())]
    if mask.shape[1] == 1:
        return mask
    queries = q.shape[1] // k.shape[1]
    num_kv_heads = mask.shape[1] // queries
    first = HeadShares.split(num_kv_heads, num_kv_heads, ranks.degrees[1]).first(ranks.place[1])
    return mask.narrow(1, first * queries, q.shape[1])


@lru_cache(maxsize=256)
def exchange_of(ranks: AttentionMesh, layout: SequenceLayout, num_kv_heads: int) -> HeadExchange:
    """Who of the Ulysses ranks has which tokens and heads."""
    assert ranks.ulysses is not None
    shares = HeadShares.split(num_kv_heads, num_kv_heads, ranks.degrees[1])
    return HeadExchange(ranks.ulysses, shares, layout.exchanged_lens(ranks.place[0]))


@lru_cache(maxsize=256)
def gathered_runs(layout: SequenceLayout) -> tuple[list[tuple[int, int, int]], int]:
    """(row, start in the sequence, tokens) of each run, in the order of the sequence.

    Rows are those of all ranks' tokens, padded to the same number a rank, which is the second.
    """
    places = product(range(layout.ring_degree), range(layout.ulysses_degree))
    owned = [layout.own_runs(*place) for place in places]
    padded = max(1, *map(num_tokens, owned))
    found: list[tuple[int, int, int]] = []
    for number, runs in enumerate(owned):
        row = number * padded
        for start, stop in runs:
            found.append((row, start, stop - start))
            row += stop - start
    return sorted(found, key=lambda run: run[1]), padded


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
