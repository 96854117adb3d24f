"""Rectified flow on packed samples: inputs of the model, its target, and the loss.

Source: Liu et al. 2022 (arXiv:2209.03003): `x_t = (1 - t) x_0 + t noise`, velocity `noise - x_0`.
Shapes: T packed tokens, i image tokens, C channels, N samples.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from bascule.models import PackedBatch
from bascule.train.streams import SampleBatch, flow_noise, flow_timesteps


@dataclass(frozen=True, slots=True, eq=False)
class FlowBatch:
    """The samples of one rank with their noise, whose seed depends on the sample, not the rank."""

    inputs: PackedBatch  # of the model
    target: Tensor  # (i, C) velocity of the image tokens, float32 at least
    image_rows: Tensor  # (i,) packed rows of the image tokens
    seq_lens: list[int]  # tokens of each sample

    @classmethod
    def build(
        cls, batch: SampleBatch, *, seed: int, device: torch.device, dtype: torch.dtype
    ) -> Self:
        """Add noise to a batch and bring it to the device."""
        noise = flow_noise(batch, seed=seed).to(batch.image.device)
        timestep = flow_timesteps(batch, seed=seed)
        lens = torch.tensor(batch.image_lens, dtype=torch.int64)
        t = timestep.repeat_interleave(lens)[:, None].to(batch.image.device)
        inputs = PackedBatch(
            image_tokens=((1 - t) * batch.image + t * noise).to(device, dtype),
            text_tokens=batch.text.to(device, dtype),
            is_image=batch.is_image,  # on the host, so that the model need not wait for the device
            pos=batch.pos.to(device),
            timestep=timestep.to(device),
            pooled=batch.pooled.to(device, dtype),
        )
        rows = batch.is_image.nonzero()[:, 0].to(device)
        return cls(inputs, (noise - batch.image).to(device), rows, batch.seq_lens)

    def per_token_loss(self, predicted_TC: Tensor) -> Tensor:
        """Return the (i,) squared error of each image token, mean over its channels."""
        predicted = predicted_TC.index_select(0, self.image_rows)
        return (predicted - self.target).square().mean(dim=-1)
