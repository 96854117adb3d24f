"""The form of a call of mesh attention: what all ranks must mean alike before they exchange."""

from functools import lru_cache

import numpy as np
import torch
import torch.distributed as dist

from bascule.attention.layout import SequenceLayout, num_tokens
from bascule.attention.ranks import AttentionMesh
from bascule.comm.agree import Statement, agree
from bascule.comm.quantize import Wire
from bascule.errors import ConfigError


def form_of(head_dim: int, dtype: torch.dtype, wire: Wire | None) -> str:
    """What rows are, and how they travel, as text."""
    text = f"head_dim {head_dim}, {dtype}"
    if wire is None:
        return text
    text = f"{text} as {wire.format}"
    if wire.takes_centres:
        return f"{text}, takes_centres"
    text = text if wire.k_centre is None else f"{text}, with k_centre"
    return text if wire.v_centre is None else f"{text}, with v_centre"


@lru_cache(maxsize=1024)
def agree_on(
    ranks: AttentionMesh,
    layout: SequenceLayout,
    shape: tuple[int, ...],
    num_kv_heads: int,
    form: str,
) -> None:
    """Before the first exchange of a form, make sure that all ranks mean the same.

    One all-gather for each form of call, where the group carries CPU tensors; later calls of that
    form gather nothing.

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
    batch, num_heads, tokens = shape
    wanted = num_tokens(layout.own_runs(*ranks.place))
    error = None
    if tokens != wanted:
        error = ConfigError(
            f"attention: q has {tokens} tokens, and the layout gives this rank {wanted} of "
            f"{layout.seq_len}: take them with split(x, mesh, layout, dim)"
        )
    group = ranks.whole
    if group is not None and "cpu" in dist.get_backend_config(group.process_group):
        text = (
            f"a layout of {layout.segments} tokens, zigzag={layout.zigzag}, "
            f"stripe={layout.stripe}, batch {batch}, "
            f"{num_heads} heads for {num_kv_heads}, {form}"
        )
        statement = Statement({"the call": text}, np.zeros(0, np.int64), error)
        agree(group, statement, what="attention", step=0, capacity=0)
    elif error is not None:
        raise error
