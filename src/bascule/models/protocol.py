"""The protocol by which the model reaches other ranks; it never knows how many there are.

Shapes: T tokens on this rank after routing, N samples, H heads, D head_dim.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from bascule.errors import ConfigError

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention in packed sequences: q (T, H, D), k and v (T, kv heads, D) to (T, H, D)."""


class Exchange(Protocol):
    """One step's movement of tokens between ranks, which call all methods in the same order.

    All methods are differentiable. No implementation is a dataclass: FSDP2 would cast its tensors.
    """

    @property
    def local_seq_ids(self) -> Tensor:
        """Global ids of the sequences with tokens on this rank after routing, int64 (n,)."""
        ...

    @property
    def token_slot(self) -> Tensor:
        """For each routed token the place of its sequence in `local_seq_ids`, int64 (T,)."""
        ...

    def route(self, **tensors: Tensor) -> Mapping[str, Tensor]:
        """Move rows, tokens first, to the ranks that compute them; same names, any dtypes."""
        ...

    def count_routed(self, is_marked: Tensor, /) -> int:
        """Count the marked rows, bool (T before) on the host, that `route` brings here."""
        ...

    def gather_samples(self, vec: Tensor, /) -> Tensor:
        """Gather every rank's per-sample rows, (N here, d) to (N everywhere, d), by global id."""
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, /) -> Tensor:
        """See `Attend`."""
        ...

    def restore(self, x: Tensor, /) -> Tensor:
        """Undo `route` for one tensor: back to the source rank and order."""
        ...


class LocalExchange:
    """The exchange of one process. Its own attention is a reference, quadratic in all tokens."""

    def __init__(
        self,
        seq_lens: Sequence[int],
        *,
        attend: Attend | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if any(seq_len < 0 for seq_len in seq_lens):
            raise ConfigError(f"sequence lengths must not be negative: {list(seq_lens)}")
        lens_N = torch.tensor(list(seq_lens), dtype=torch.int64, device=device)
        self.local_seq_ids = torch.arange(lens_N.shape[0], device=device)
        self.token_slot = self.local_seq_ids.repeat_interleave(lens_N, output_size=sum(seq_lens))
        self.attend: Attend = self._attend_masked if attend is None else attend

    def route(self, **tensors: Tensor) -> Mapping[str, Tensor]:
        """Return the tensors as they are."""
        return tensors

    def count_routed(self, is_marked: Tensor, /) -> int:
        """Return how many there are."""
        return int(is_marked.sum())

    def gather_samples(self, vec: Tensor, /) -> Tensor:
        """Return the only process's samples."""
        return vec

    def restore(self, x: Tensor, /) -> Tensor:
        """Return the tensor as it is."""
        return x

    def _attend_masked(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, /) -> Tensor:
        same_TT = self.token_slot.unsqueeze(1) == self.token_slot
        q_1HTD, k_1HTD, v_1HTD = (x.transpose(0, 1).unsqueeze(0) for x in (q_THD, k_THD, v_THD))
        gqa = q_THD.shape[1] != k_THD.shape[1]
        out_1HTD = functional.scaled_dot_product_attention(
            q_1HTD, k_1HTD, v_1HTD, attn_mask=same_TT, enable_gqa=gqa
        )
        return out_1HTD.squeeze(0).transpose(0, 1)
