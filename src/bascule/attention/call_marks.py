"""What all ranks must mean alike before they exchange rows, and what marks their exchanges."""

import zlib

import torch
from torch import Tensor

from bascule.attention.call_spec import CallSpec
from bascule.attention.layout import SequenceLayout, num_tokens
from bascule.attention.tiles import kept_of
from bascule.comm.agree import agree_once
from bascule.comm.wire import Wire
from bascule.errors import ConfigError


def rows_of_call(
    q: Tensor, wire: Wire | None, mask: Tensor | None, replicated: tuple[int, ...]
) -> str:
    """What rows are and see, and how they travel, as text."""
    text = f"head_dim {q.shape[-1]}, {q.dtype}"
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


def agree_on_call(
    spec: CallSpec, layout: SequenceLayout, batch: int, tokens: int, mask: Tensor | None
) -> None:
    """Before the first exchange of a form, make sure that all ranks mean the same.

    One all-gather for each form of call; later calls of that form gather nothing.

    Args:
        spec: What all must mean alike.
        layout: Which tokens each rank has.
        batch: B.
        tokens: T, of the queries of this rank.
        mask: Whose values are compared, on the host.

    Raises:
        CommError: They do not.
        RemoteConfigError: A rank has another number of tokens than the layout gives it.
    """
    ranks = spec.ranks
    group = ranks.whole
    key = None if group is None else (group.ranks, layout, batch, tokens, spec, mask is None)

    def say() -> tuple[dict[str, str], ConfigError | None]:
        wanted, error = num_tokens(layout.own_runs(*ranks.place)), None
        if tokens != wanted:
            error = ConfigError(
                f"attention: q has {tokens} tokens, and the layout gives this rank {wanted} of "
                f"{layout.seq_len}: take them with split(x, mesh, layout, dim)"
            )
        text = (
            f"a layout of {layout.segments} tokens, zigzag={layout.zigzag}, "
            f"stripe={layout.stripe}, batch {batch}, {spec.meaning}"
        )
        return {"the call": text, "the mask": digest_of(mask)}, error

    agree_once(group, key, say, what="attention")


def digest_of(mask: Tensor | None) -> str:
    """What tells masks with other values apart, on the host; large ones by their sum and samples.

    On other devices only the shape, as the device would have to be waited for.
    """
    if mask is None or mask.device.type != "cpu":
        return "none" if mask is None else str(tuple(mask.shape))
    return kept_of(mask, "digest", lambda: _digest(mask))


def _digest(mask: Tensor) -> str:
    carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[mask.element_size()]
    values = mask.detach().view(carrier)
    total = int(values.sum(dtype=torch.int64))
    flat = values.flatten() if values.numel() <= _MOST_READ else values.flatten()[:: _step(values)]
    return f"{tuple(mask.shape)} {total} {zlib.crc32(flat.numpy().tobytes())}"


_MOST_READ = 1 << 18


def _step(values: Tensor) -> int:
    """Odd, so that samples fall into all columns."""
    return values.numel() // _MOST_READ | 1
