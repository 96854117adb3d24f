"""The packed MM-DiT: FLUX's blocks on one flat tensor of interleaved text and image tokens.

Blocks also run on zero rows, and then give zero gradients.

Shapes: T tokens (t text, i image), N samples, C model width, H heads, D head_dim, F features.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from bascule.checks import each, fields, number, rate, whole
from bascule.errors import ConfigError
from bascule.models.layout import (
    Interleaving,
    TokenLayout,
    apply_rotary,
    count_text,
    look_up,
    rotary_table,
    scale_rows,
)

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention in packed sequences: q (T, H, D), k and v (T, kv heads, D) to (T, H, D)."""


class Exchange(Protocol):
    """Moves the tokens of one step between ranks, which call all methods in the same order.

    All methods are differentiable. No implementation is a dataclass: FSDP2 would cast its tensors.
    """

    local_seq_ids: Tensor  # int64 (n,), global ids of sequences with routed tokens on this rank
    token_slot: Tensor  # int64 (T,), index in `local_seq_ids` of each routed token's sequence

    def route(self, **tensors: Tensor) -> Mapping[str, Tensor]:
        """Move rows, tokens first, to the ranks that compute them; same names, any dtypes."""
        ...

    def count_routed(self, is_marked: Tensor, /) -> int:
        """Count the rows that `route` brings here, of those marked in a bool mask on the host."""
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
    """The exchange of one process; its default attention is quadratic in all tokens."""

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
        """Count the marked rows."""
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
        is_grouped = q_THD.shape[1] != k_THD.shape[1]
        out_1HTD = functional.scaled_dot_product_attention(
            q_1HTD, k_1HTD, v_1HTD, attn_mask=same_TT, enable_gqa=is_grouped
        )
        return out_1HTD.squeeze(0).transpose(0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class MMDiTConfig:
    """Sizes of a packed MM-DiT; `MMDiTConfig.flux` gives those of FLUX.1."""

    in_channels: int  # width of an image token, in and out
    text_dim: int  # width of a text token (the text encoder's embeddings)
    vec_dim: int  # width of the pooled text vector, one a sample
    d_model: int  # width of the residual stream
    num_heads: int  # query heads; `d_model // num_heads` is the head width
    num_kv_heads: int | None = None  # key and value heads, a divisor of `num_heads`; None: as many
    num_double: int  # blocks with separate weights for text and image tokens
    num_single: int  # blocks with shared weights
    mlp_ratio: float = 4.0  # MLP width over `d_model`
    axes_dim: tuple[int, ...]  # head width of each axis of a position; even, a whole head together
    theta: float = 10_000.0  # base of the rotary frequencies
    guidance: bool = False  # a sample also carries a guidance scale (distilled models)

    def __post_init__(self) -> None:
        names = "in_channels", "text_dim", "vec_dim", "d_model", "num_heads", "num_kv_heads"
        fields(self, **dict.fromkeys(names, (whole, 1)))
        fields(self, num_double=whole, num_single=whole, theta=rate)
        fields(self, mlp_ratio=(number, 1 / self.d_model), axes_dim=(each, whole, 2))
        if self.d_model % self.num_heads:
            raise ConfigError(f"num_heads {self.num_heads} does not divide d_model {self.d_model}")
        if self.num_heads % self.kv_heads:
            wrong = f"num_kv_heads {self.kv_heads} does not divide"
            raise ConfigError(f"{wrong} num_heads {self.num_heads}")
        if sum(self.axes_dim) != self.head_dim or any(dim % 2 for dim in self.axes_dim):
            wrong = f"axes_dim {self.axes_dim} must be even and add up to the head width,"
            raise ConfigError(f"{wrong} {self.head_dim}, not to {sum(self.axes_dim)}")

    @classmethod
    def flux(cls, *, guidance: bool = True) -> "MMDiTConfig":
        """Return the sizes of FLUX.1, 12 billion parameters (schnell with `guidance=False`)."""
        return cls(
            in_channels=64,
            text_dim=4096,
            vec_dim=768,
            d_model=3072,
            num_heads=24,
            num_double=19,
            num_single=38,
            axes_dim=(16, 56, 56),
            guidance=guidance,
        )

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.d_model // self.num_heads

    @property
    def qkv_dim(self) -> int:
        """Width of the fused query, key and value projection."""
        return (self.num_heads + 2 * self.kv_heads) * self.head_dim

    @property
    def mlp_dim(self) -> int:
        """Hidden width of an MLP."""
        return int(self.d_model * self.mlp_ratio)


NORM_EPS = 1e-6
SINUSOID_DIM = 256
SINUSOID_MAX_PERIOD = 10_000.0


def sinusoid(scalar_N: Tensor) -> Tensor:
    """Embed a timestep in [0, 1] or a guidance scale: cosines, then sines, of 1000x the value."""
    half = SINUSOID_DIM // 2
    step = torch.arange(half, dtype=torch.float32, device=scalar_N.device)
    # Rounded to float32, as where FLUX was trained: at an argument of 1000 that is visible.
    frequency = torch.exp(-math.log(SINUSOID_MAX_PERIOD) * step / half)
    scalar_N = scalar_N.to(torch.promote_types(scalar_N.dtype, torch.float32))
    angle = (1000.0 * scalar_N).unsqueeze(1) * frequency
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


class VectorMLP(nn.Module):
    """Two linear layers with a SiLU between: a per-sample input to the model width."""

    def __init__(self, in_dim: int, d_model: int) -> None:
        super().__init__()
        self.linear_in = nn.Linear(in_dim, d_model)
        self.linear_out = nn.Linear(d_model, d_model)

    def forward(self, x_NF: Tensor) -> Tensor:
        """Map (N, in_dim) to (N, C), in the weights' dtype."""
        x_NF = x_NF.to(self.linear_in.weight.dtype)
        return self.linear_out(functional.silu(self.linear_in(x_NF)))


class Modulation(nn.Module):
    """adaLN tables: `num_tables` vectors for each sample, which its tokens look up."""

    def __init__(self, d_model: int, num_tables: int) -> None:
        super().__init__()
        self.num_tables = num_tables
        self.linear = nn.Linear(d_model, num_tables * d_model)

    def forward(self, vec_NC: Tensor) -> tuple[Tensor, ...]:
        """Map (N, C) to `num_tables` tables (N, C)."""
        return self.linear(functional.silu(vec_NC)).chunk(self.num_tables, dim=-1)


def modulated_norm(x_TC: Tensor, shift_NC: Tensor, scale_NC: Tensor, slot_T: Tensor) -> Tensor:
    """Layer norm without weights, scaled and shifted by the token's sample."""
    normed_TC = functional.layer_norm(x_TC, x_TC.shape[-1:], eps=NORM_EPS)
    return scale_rows(normed_TC, 1 + scale_NC, slot_T) + look_up(shift_NC, slot_T)


class HeadSplit(nn.Module):
    """Cuts a fused projection into heads and normalises queries and keys."""

    def __init__(self, config: MMDiTConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.num_qkv_heads = (config.num_heads, config.kv_heads, config.kv_heads)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=NORM_EPS)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=NORM_EPS)

    def forward(self, qkv_TF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split (T, F) into q (T, H, D), k and v (T, kv heads, D)."""
        q, k, v = qkv_TF.unflatten(-1, (-1, self.head_dim)).split(self.num_qkv_heads, dim=1)
        return self.q_norm(q), self.k_norm(k), v


class Stream(nn.Module):
    """One modality's weights of a double-stream block; the block calls its two halves."""

    def __init__(self, config: MMDiTConfig) -> None:
        super().__init__()
        self.modulation = Modulation(config.d_model, 6)
        self.qkv = nn.Linear(config.d_model, config.qkv_dim)
        self.heads = HeadSplit(config)
        self.out = nn.Linear(config.d_model, config.d_model)
        self.mlp_in = nn.Linear(config.d_model, config.mlp_dim)
        self.mlp_out = nn.Linear(config.mlp_dim, config.d_model)

    def project(
        self, x_TC: Tensor, tables: tuple[Tensor, ...], slot_T: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v of this modality, before attention."""
        shift, scale = tables[:2]
        return self.heads(self.qkv(modulated_norm(x_TC, shift, scale, slot_T)))

    def finish(
        self, x_TC: Tensor, attended_TC: Tensor, tables: tuple[Tensor, ...], slot_T: Tensor
    ) -> Tensor:
        """Add the output projection and the MLP, gated, after attention."""
        attention_gate, shift, scale, mlp_gate = tables[2:]
        x_TC = x_TC + scale_rows(self.out(attended_TC), attention_gate, slot_T)
        hidden_TF = self.mlp_in(modulated_norm(x_TC, shift, scale, slot_T))
        mlp_TC = self.mlp_out(functional.gelu(hidden_TF, approximate="tanh"))
        return x_TC + scale_rows(mlp_TC, mlp_gate, slot_T)


class DoubleBlock(nn.Module):
    """Text and image tokens with separate weights, one joint attention."""

    def __init__(self, config: MMDiTConfig) -> None:
        super().__init__()
        self.text = Stream(config)
        self.image = Stream(config)

    def forward(
        self, text_tC: Tensor, image_iC: Tensor, vec_NC: Tensor, layout: TokenLayout, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """Run the block on both streams, each in packed order."""
        text_tables, image_tables = self.text.modulation(vec_NC), self.image.modulation(vec_NC)
        text_qkv = self.text.project(text_tC, text_tables, layout.text_slot)
        image_qkv = self.image.project(image_iC, image_tables, layout.image_slot)
        rows = layout.interleaving
        q, k, v = (rows.pack(text, image) for text, image in zip(text_qkv, image_qkv, strict=True))
        q, k = (apply_rotary(x, layout.cos, layout.sin) for x in (q, k))
        text_out, image_out = rows.split(attend(q, k, v).flatten(1))
        return (
            self.text.finish(text_tC, text_out, text_tables, layout.text_slot),
            self.image.finish(image_iC, image_out, image_tables, layout.image_slot),
        )


class SingleBlock(nn.Module):
    """All tokens with the same weights; attention and MLP side by side."""

    def __init__(self, config: MMDiTConfig) -> None:
        super().__init__()
        self.widths = (config.qkv_dim, config.mlp_dim)
        self.modulation = Modulation(config.d_model, 3)
        self.linear_in = nn.Linear(config.d_model, sum(self.widths))
        self.heads = HeadSplit(config)
        self.linear_out = nn.Linear(config.d_model + config.mlp_dim, config.d_model)

    def forward(self, x_TC: Tensor, vec_NC: Tensor, layout: TokenLayout, attend: Attend) -> Tensor:
        """Run the block on packed tokens."""
        shift, scale, gate = self.modulation(vec_NC)
        projected_TF = self.linear_in(modulated_norm(x_TC, shift, scale, layout.slot))
        qkv_TF, mlp_TF = projected_TF.split(self.widths, dim=-1)
        q, k, v = self.heads(qkv_TF)
        q, k = (apply_rotary(x, layout.cos, layout.sin) for x in (q, k))
        attended_TC = attend(q, k, v).flatten(1)
        merged_TF = torch.cat([attended_TC, functional.gelu(mlp_TF, approximate="tanh")], dim=-1)
        return x_TC + scale_rows(self.linear_out(merged_TF), gate, layout.slot)


class FinalLayer(nn.Module):
    """Last adaLN and the projection to image channels."""

    def __init__(self, config: MMDiTConfig) -> None:
        super().__init__()
        self.modulation = Modulation(config.d_model, 2)
        self.linear = nn.Linear(config.d_model, config.in_channels)

    def forward(self, x_TC: Tensor, vec_NC: Tensor, slot_T: Tensor) -> Tensor:
        """Map (T, C) to (T, in_channels)."""
        shift, scale = self.modulation(vec_NC)
        return self.linear(modulated_norm(x_TC, shift, scale, slot_T))


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
    """Packed multimodal diffusion transformer with the parameters of FLUX.

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
        vec_NC = self.condition(batch.timestep, batch.pooled, batch.guidance)
        vec_NC = exchange.gather_samples(vec_NC)
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
            rows = f"{num_text} text and {num_image} image rows"
            raise ConfigError(f"is_image has {len(is_image)} rows for {rows}")
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
        wanted = is_image.shape[0], len(self.config.axes_dim)
        if pos.shape != wanted:
            raise ConfigError(f"pos must be {wanted}, got {tuple(pos.shape)}")
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
    def init_weights(self, seed: int) -> None:
        """Draw all parameters before sharding, the same on every machine and in every dtype."""
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                stds = ((module.weight, module.in_features**-0.5), (module.bias, 0.02))
                for parameter, std in stds:
                    draw = torch.randn(parameter.shape, generator=generator)
                    parameter.copy_(draw * std)
            elif isinstance(module, nn.RMSNorm):
                nn.init.ones_(module.weight)


def _routed_text(batch: PackedBatch, routed: Tensor, exchange: Exchange) -> int:
    """Count routed text tokens, on the device only where the host cannot know."""
    if batch.is_image.is_cpu and not routed.is_cpu:
        return exchange.count_routed(~batch.is_image)
    num_local, num_text = torch.stack([(~batch.is_image).sum(), (~routed).sum()]).tolist()
    _check_text(num_local, batch.is_image, batch.text_tokens)
    return num_text


def _check_text(num_text: int, is_image: Tensor, text_tokens: Tensor) -> None:
    if num_text != text_tokens.shape[0]:
        tokens = f"{num_text} text and {is_image.shape[0] - num_text} image tokens"
        wrong = f"is_image asks for {tokens}, the batch has {text_tokens.shape[0]} text tokens"
        raise ConfigError(wrong)
