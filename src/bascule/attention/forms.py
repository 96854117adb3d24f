"""The form of a call of mesh attention: what all ranks must mean alike before they exchange."""

import zlib

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from bascule.attention.shards import SequenceLayout, num_tokens
from bascule.comm.agree import Statement, agree
from bascule.comm.meshes import AttentionMesh
from bascule.comm.quantize import Wire
from bascule.errors import ConfigError


def form_of(
    head_dim: int,
    dtype: torch.dtype,
    wire: Wire | None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    mask: Tensor | None = None,
    replicated: tuple[int, ...] = (),
) -> str:
    """What rows are and see, and how they travel, as text."""
    text = f"head_dim {head_dim}, {dtype}, causal={is_causal}, scale={scale}"
    if replicated:
        text = f"{text}, replicated segments {replicated}"
    if mask is not None:
        text = f"{text}, mask of {mask.dim()} dims, {mask.dtype}"
    if wire is None:
        return text
    text = f"{text} as {wire.format}"
    if wire.takes_centres:
        return f"{text}, takes_centres"
    text = text if wire.k_centre is None else f"{text}, with k_centre"
    return text if wire.v_centre is None else f"{text}, with v_centre"


def agree_on(
    ranks: AttentionMesh,
    layout: SequenceLayout,
    shape: tuple[int, ...],
    num_kv_heads: int,
    form: str,
) -> None:
    """Before the first exchange of a form, make sure that all ranks mean the same.

    One all-gather for each form of call; later calls of that form gather nothing.

    Args:
        ranks: The mesh.
        layout: Which tokens each rank has.
        shape: (B, H, T) of the queries of this rank.
        num_kv_heads: K.
        form: What `form_of` says.

    Raises:
        CommError: They do not.
        RemoteConfigError: A rank has another number of tokens than the layout gives it.
    """
    group = ranks.whole
    key = None if group is None else (group.ranks, layout, shape, num_kv_heads, form)
    if group is not None and group.calls.has_agreed(key):
        return
    batch, num_heads, tokens = shape
    wanted = num_tokens(layout.own_runs(*ranks.place))
    error = None
    if tokens != wanted:
        error = ConfigError(
            f"attention: q has {tokens} tokens, and the layout gives this rank {wanted} of "
            f"{layout.seq_len}: take them with split(x, mesh, layout, dim)"
        )
    if group is not None:
        text = (
            f"a layout of {layout.segments} tokens, zigzag={layout.zigzag}, "
            f"stripe={layout.stripe}, batch {batch}, "
            f"{num_heads} heads for {num_kv_heads}, {form}"
        )
        statement = Statement({"the call": text}, np.zeros(0, np.int64), error)
        agree(group, statement, what="attention", step=0, capacity=0)
        group.calls.agree(key)
    elif error is not None:
        raise error


_digests = WeakIdKeyDictionary()
"""By mask, its version and digest: a mask is used in every layer, and read once."""


def digest_of(mask: Tensor | None) -> str:
    """What tells masks with other values apart, on the host; large ones by their sum and samples.

    On other devices only the shape, as the device would have to be waited for.
    """
    if mask is None or mask.device.type != "cpu":
        return "none" if mask is None else str(tuple(mask.shape))
    version = None if mask.is_inference() else mask._version
    known = _digests.get(mask)
    if known is not None and version is not None and known[0] == version:
        return known[1]
    carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[mask.element_size()]
    values = mask.detach().view(carrier)
    total = int(values.sum(dtype=torch.int64))
    flat = values.flatten() if values.numel() <= _MOST_READ else values.flatten()[:: _step(values)]
    digest = f"{tuple(mask.shape)} {total} {zlib.crc32(flat.numpy().tobytes())}"
    if version is not None:
        _digests[mask] = version, digest
    return digest


_MOST_READ = 1 << 18


def _step(values: Tensor) -> int:
    """Odd, so that samples fall into all columns."""
    return values.numel() // _MOST_READ | 1
