"""Blocks of the MM-DiT on packed tokens; without rows they run too, and give zero gradients.

Shapes: T tokens (t text, i image), N samples, C model width, H heads, D head_dim, F features.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from bascule.models.config import MMDiTConfig
from bascule.models.layout import TokenLayout
from bascule.models.protocol import Attend
from bascule.models.rope import apply_rotary
from bascule.models.rows import look_up, scale_rows

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
        return self.linear_out(
            functional.silu(self.linear_in(x_NF.to(self.linear_in.weight.dtype)))
        )


class Modulation(nn.Module):
    """adaLN tables: `num_tables` vectors a sample, computed a sample and looked up a token."""

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
        """Run the block on both streams, each in packed order; vectors go by the layout's slots."""
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
