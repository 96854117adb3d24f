"""Rectified flow on packed samples: what the model sees, what it must predict, and the loss.

Source: Liu et al. 2022 (arXiv:2209.03003): `x_t = (1 - t) x_0 + t noise`, velocity `noise - x_0`.
Shapes: T packed tokens, i image tokens, C channels, N samples.
"""

from typing import Self

import torch
from torch import Tensor

from bascule.models import PackedBatch
from bascule.workload.streams import SampleBatch, flow_noise, flow_timesteps


class FlowBatch:
    """One rank's samples with their noise: seeded per sample, hence the same wherever it trains.

    Attributes:
        inputs: What the model takes.
        target_iC: The velocity of each image token.
        image_rows: (i,) packed rows of the image tokens.
        seq_lens: Tokens of each sample.
    """

    __slots__ = ("image_rows", "inputs", "seq_lens", "target_iC")

    def __init__(
        self, inputs: PackedBatch, target_iC: Tensor, image_rows: Tensor, seq_lens: list[int]
    ) -> None:
        self.inputs = inputs
        self.target_iC = target_iC
        self.image_rows = image_rows
        self.seq_lens = seq_lens

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
            is_image=batch.is_image,  # the model knows the host's without waiting for the device
            pos=batch.pos.to(device),
            timestep=timestep.to(device),
            pooled=batch.pooled.to(device, dtype),
        )
        rows = batch.is_image.nonzero()[:, 0].to(device)
        return cls(inputs, (noise - batch.image).to(device), rows, batch.seq_lens)

    def use_on(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory of its tensors, made on another stream, until this one has used them."""
        of = self.inputs
        inputs = of.image_tokens, of.text_tokens, of.pos, of.timestep, of.pooled
        for x in (*inputs, self.target_iC, self.image_rows):
            x.record_stream(stream)

    def per_token_loss(self, predicted_TC: Tensor) -> Tensor:
        """(i,) squared error of each image token, mean over its channels."""
        predicted = predicted_TC.index_select(0, self.image_rows)
        return (predicted - self.target_iC).square().mean(dim=-1)  # the target is float32
