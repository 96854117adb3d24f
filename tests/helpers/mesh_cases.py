"""Cases of attention over a mesh, and the same in one process."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from bascule.attention.api import AttentionMesh, SequenceLayout
from tests.helpers.oracle import dense_attention

Three = tuple[Tensor, Tensor, Tensor]


def three(tensors: Iterable[Tensor]) -> Three:
    """Queries, keys and values."""
    q, k, v = tensors
    return q, k, v


def draw(
    shape: tuple[int, int, int, int], length: int, seed: int, dtype: torch.dtype = torch.float64
) -> Three:
    """Queries, keys and values of a batch, query heads, key-value heads and their width."""
    batch, heads, kv_heads, dim = shape
    generator = torch.Generator().manual_seed(seed)
    return three(
        torch.randn(batch, num, length, dim, generator=generator).to(dtype)
        for num in (heads, kv_heads, kv_heads)
    )


def make_mesh(ring: int, ulysses: int) -> AttentionMesh:
    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    return AttentionMesh.of(mesh)


def layout_of(case: Mapping[str, Any], mesh: AttentionMesh) -> SequenceLayout:
    """Segments of a case, and perhaps how they are dealt."""
    zigzag, replicated = case.get("zigzag", False), case.get("replicated", ())
    return SequenceLayout(case["segments"], *mesh.degrees, zigzag, replicated)


def make_mask(kind: str, batch: int, heads: int, length: int, dtype: torch.dtype) -> Tensor | None:
    generator = torch.Generator().manual_seed(length)
    if kind in ("none", "causal"):
        return None
    if kind == "additive":
        return torch.randn(1, 1, length, length, generator=generator, dtype=dtype)
    if kind == "key padding":
        mask = torch.rand(batch, 1, 1, length, generator=generator) < 0.7
        mask[..., :1] = True
        return mask
    shape = (batch, heads if kind == "by head" else 1, length, length)
    mask = torch.rand(shape, generator=generator) < 0.5
    if kind == "empty rows":
        mask[:, :, ::2] = False
    else:
        mask[..., 0] = True
    return mask


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Attention of one process over the whole sequence."""
    return dense_attention(q, k, v, mask, causal=causal)[0]


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-300))


def placed(local: Tensor, mesh: AttentionMesh, layout: SequenceLayout) -> Tensor:
    """A rank's tokens where they belong in the sequence, zeros elsewhere."""
    whole = local.new_zeros(*local.shape[:2], layout.seq_len, local.shape[3])
    first = 0
    for start, stop in layout.shares(*mesh.place):
        whole[:, :, start:stop] += local[:, :, first : first + stop - start]
        first += stop - start
    assert first == local.shape[2]
    return whole


def summed(mesh: AttentionMesh, layout: SequenceLayout, *local: Tensor) -> list[Tensor]:
    """Sums over the ranks of what each of them has, where it belongs, of one dtype; in one call."""
    wholes = [placed(one, mesh, layout) for one in local]
    dist.all_reduce(flat := torch.cat([whole.flatten() for whole in wholes]))
    parts = flat.split([whole.numel() for whole in wholes])
    return [part.view_as(whole) for part, whole in zip(parts, wholes, strict=True)]
