"""Modality, sample and position of each packed token, for the blocks of the model.

Shapes: T tokens, of which t are text and i are image tokens; D head_dim.
"""

import torch
from torch import Tensor

from bascule.errors import ConfigError
from bascule.models.rows import permute_rows


class Interleaving:
    """Text and image rows of a packed tensor; without `num_text` the host waits to count."""

    def __init__(self, is_image_T: Tensor, num_text: int | None = None) -> None:
        _check(is_image_T)
        self.order = is_image_T.to(torch.uint8).argsort(stable=True)  # int64 (T,), text first
        self.inverse = self.order.argsort()  # int64 (T,), the permutation back
        self.num_text = count_text(is_image_T) if num_text is None else num_text

    def pack(self, text: Tensor, image: Tensor) -> Tensor:
        """Interleave two streams into packed order."""
        return permute_rows(torch.cat([text, image]), self.inverse, self.order)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Part packed rows into the text and the image stream; the inverse of `pack`."""
        rows = permute_rows(x, self.order, self.inverse)
        return rows[: self.num_text], rows[self.num_text :]


def count_text(is_image_T: Tensor) -> int:
    """Count the text rows of a mask. On a device, the host waits for it."""
    _check(is_image_T)
    return is_image_T.shape[0] - int(is_image_T.sum())


def _check(is_image_T: Tensor) -> None:
    if is_image_T.dtype != torch.bool or is_image_T.ndim != 1:
        raise ConfigError(
            f"is_image must be a bool vector, got {is_image_T.dtype} {tuple(is_image_T.shape)}"
        )


class TokenLayout:
    """Rows, samples and angles of tokens for all blocks; no dataclass, which FSDP2 would cast."""

    def __init__(
        self,
        *,
        is_image: Tensor,
        slot: Tensor,
        rotary: tuple[Tensor, Tensor],
        num_text: int | None = None,
    ) -> None:
        self.interleaving = Interleaving(is_image, num_text)
        self.slot = slot  # int64 (T,), the row of the per-sample vectors that each token uses
        self.text_slot, self.image_slot = self.interleaving.split(slot)
        self.cos, self.sin = rotary  # (T, D/2), float64 for float64 models, else float32
