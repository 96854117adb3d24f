"""The packed MM-DiT: FLUX's blocks on one flat tensor of interleaved text and image tokens.

Shapes: T tokens (t text, i image), N samples, C model width.
"""

import torch
from torch import Tensor, nn

from bascule.errors import ConfigError
from bascule.models.blocks import (
    SINUSOID_DIM,
    DoubleBlock,
    FinalLayer,
    Modulation,
    SingleBlock,
    VectorMLP,
    sinusoid,
)
from bascule.models.config import MMDiTConfig
from bascule.models.layout import Interleaving, TokenLayout, count_text
from bascule.models.protocol import Attend, Exchange
from bascule.models.rope import rotary_table


class PackedBatch:
    """One rank's samples before routing; no dataclass, since FSDP2 would round positions."""

    def __init__(
        self,
        *,
        image_tokens: Tensor,  # (i, in_channels) of all samples
        text_tokens: Tensor,  # (t, text_dim) of all samples
        is_image: Tensor,  # bool (T,), T = t + i, packed; on the host, since it is read there
        pos: Tensor,  # (T, number of axes) coordinates of the tokens, float32, float64 or integer
        timestep: Tensor,  # (N,) in [0, 1], float32 or float64
        pooled: Tensor,  # (N, vec_dim)
        guidance: Tensor | None = None,  # (N,), only for models with guidance
    ) -> None:
        self.image_tokens = image_tokens
        self.text_tokens = text_tokens
        self.is_image = is_image
        self.pos = pos
        self.timestep = timestep
        self.pooled = pooled
        self.guidance = guidance


class MMDiT(nn.Module):
    """Packed multimodal diffusion transformer, parameter for parameter a FLUX.

    Shard and checkpoint the members of `double_blocks` and `single_blocks`.
    """

    def __init__(self, config: MMDiTConfig) -> None:
        super().__init__()
        self.config = config
        self.image_in = nn.Linear(config.in_channels, config.d_model)
        self.text_in = nn.Linear(config.text_dim, config.d_model)
        self.time_in = VectorMLP(SINUSOID_DIM, config.d_model)
        self.vec_in = VectorMLP(config.vec_dim, config.d_model)
        self.guidance_in = VectorMLP(SINUSOID_DIM, config.d_model) if config.guidance else None
        self.double_blocks = nn.ModuleList(DoubleBlock(config) for _ in range(config.num_double))
        self.single_blocks = nn.ModuleList(SingleBlock(config) for _ in range(config.num_single))
        self.final = FinalLayer(config)

    def forward(self, batch: PackedBatch, exchange: Exchange) -> Tensor:
        """Predict velocities (T, in_channels) in the batch's order; text rows carry no meaning."""
        vec_NC = exchange.gather_samples(
            self.condition(batch.timestep, batch.pooled, batch.guidance)
        )
        if batch.is_image.is_cpu:
            _check_text(count_text(batch.is_image), batch.is_image, batch.text_tokens)
        is_image = batch.is_image.to(batch.text_tokens.device, non_blocking=True)
        x_TC = self._embed(batch.image_tokens, batch.text_tokens, is_image)
        moved = exchange.route(x=x_TC, is_image=is_image, pos=batch.pos)
        num_text = _routed_text(batch, moved["is_image"], exchange)
        layout = self.layout(moved["is_image"], moved["pos"], exchange.token_slot, num_text)
        vec_NC = vec_NC.index_select(0, exchange.local_seq_ids)
        return exchange.restore(self.blocks(moved["x"], vec_NC, layout, exchange.attend))

    def embed(self, image_tokens: Tensor, text_tokens: Tensor, is_image: Tensor) -> Tensor:
        """Project both modalities, and interleave them by `is_image` (T,), to (T, C)."""
        _check_text(count_text(is_image), is_image, text_tokens)
        is_image = is_image.to(text_tokens.device, non_blocking=True)
        return self._embed(image_tokens, text_tokens, is_image)

    def _embed(self, image_tokens: Tensor, text_tokens: Tensor, is_image: Tensor) -> Tensor:
        num_text, num_image = text_tokens.shape[0], image_tokens.shape[0]
        if num_text + num_image != is_image.shape[0]:
            raise ConfigError(
                f"is_image has {is_image.shape[0]} rows, the batch {num_text} text and "
                f"{num_image} image tokens"
            )
        text_tC = self.text_in(text_tokens.to(self.text_in.weight.dtype))
        image_iC = self.image_in(image_tokens.to(self.image_in.weight.dtype))
        return Interleaving(is_image, num_text).pack(text_tC, image_iC)

    def condition(self, timestep: Tensor, pooled: Tensor, guidance: Tensor | None = None) -> Tensor:
        """Return one vector a sample, (N, C), from its timestep and its pooled text (N, vec_dim).

        Timesteps are in [0, 1], in float32 or float64, since bf16 cannot tell 0.999 from 1.
        """
        if (guidance is not None) != self.config.guidance:
            has, got = ("has", "no") if self.config.guidance else ("has no", "a")
            raise ConfigError(f"the model {has} guidance, the batch brings {got} guidance scale")
        vec_NC = self.time_in(sinusoid(timestep))
        if self.guidance_in is not None and guidance is not None:
            vec_NC = vec_NC + self.guidance_in(sinusoid(guidance))
        return vec_NC + self.vec_in(pooled)

    def layout(
        self, is_image: Tensor, pos: Tensor, slot: Tensor, num_text: int | None = None
    ) -> TokenLayout:
        """Index tokens once for all blocks; `slot` (T,) is the row of each token's vector."""
        num_axes = len(self.config.axes_dim)
        if pos.shape != (is_image.shape[0], num_axes):
            raise ConfigError(
                f"pos must be ({is_image.shape[0]}, {num_axes}), got {tuple(pos.shape)}"
            )
        dtype = self.image_in.weight.dtype
        rotary = rotary_table(pos, self.config.axes_dim, self.config.theta, dtype)
        return TokenLayout(is_image=is_image, slot=slot, rotary=rotary, num_text=num_text)

    def blocks(self, x_TC: Tensor, vec_NC: Tensor, layout: TokenLayout, attend: Attend) -> Tensor:
        """Run all blocks and the final projection, to (T, in_channels) with rows of text tokens."""
        text_tC, image_iC = layout.interleaving.split(x_TC)
        for block in self.double_blocks:
            text_tC, image_iC = block(text_tC, image_iC, vec_NC, layout, attend)
        x_TC = layout.interleaving.pack(text_tC, image_iC)
        for block in self.single_blocks:
            x_TC = block(x_TC, vec_NC, layout, attend)
        return self.final(x_TC, vec_NC, layout.slot)

    @torch.no_grad()
    def init_weights(self, seed: int, *, adaln_zero: bool = False) -> None:
        """Draw all parameters before sharding, the same on every machine and in every dtype.

        With `adaln_zero`, modulations and the last projection are zero, and so is the output.
        """
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                stds = ((module.weight, module.in_features**-0.5), (module.bias, 0.02))
                for parameter, std in stds:
                    draw = torch.randn(parameter.shape, generator=generator)
                    parameter.copy_(draw * std)
            elif isinstance(module, nn.RMSNorm):
                nn.init.ones_(module.weight)
        linears = [m.linear for m in self.modules() if isinstance(m, Modulation)]
        for linear in [*linears, self.final.linear] if adaln_zero else []:
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)


def _routed_text(batch: PackedBatch, routed: Tensor, exchange: Exchange) -> int:
    """Count routed text tokens, on the device only where the host cannot know."""
    if batch.is_image.is_cpu and not routed.is_cpu:
        return exchange.count_routed(~batch.is_image)
    num_own, num_text = torch.stack([(~batch.is_image).sum(), (~routed).sum()]).tolist()
    _check_text(num_own, batch.is_image, batch.text_tokens)
    return num_text


def _check_text(num_text: int, is_image: Tensor, text_tokens: Tensor) -> None:
    if num_text != text_tokens.shape[0]:
        raise ConfigError(
            f"is_image asks for {num_text} text and {is_image.shape[0] - num_text} image tokens, "
            f"the batch has {text_tokens.shape[0]} text tokens"
        )
