"""Tiny diffusers models with random weights, and inputs of awkward shapes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

TEXT_DIM, CHANNELS = 32, 8
Inputs = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A model and the shapes of its inputs; `grid` is height and width in tokens."""

    model: str
    heads: int
    batch: int
    text: int
    grid: tuple[int, int]
    options: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        rows, columns = self.grid
        shape = f"heads{self.heads}-batch{self.batch}-text{self.text}-{rows}x{columns}"
        return "-".join((self.model, shape, *self.options))


# Odd lengths, text or images shorter than the ranks, heads that do not divide.
CASES = [
    Case("flux", 4, 1, 16, (4, 4)),
    Case("flux", 5, 2, 7, (3, 5)),
    Case("flux", 5, 1, 1, (5, 7), ("guidance", "controlnet")),
    Case("flux", 4, 2, 3, (1, 1)),
    Case("flux", 4, 1, 1, (1, 2)),
    Case("flux", 4, 1, 7, (3, 5), ("no single",)),
    Case("flux", 4, 1, 7, (3, 5), ("no double",)),
    Case("qwen", 4, 2, 16, (4, 4), ("mask",)),
    Case("qwen", 5, 2, 7, (3, 5), ("mask",)),
    Case("qwen", 5, 1, 13, (5, 3)),
    Case("qwen", 4, 2, 3, (3, 3), ("mask", "zero_cond")),
    Case("qwen", 4, 1, 1, (1, 3), ("mask", "controlnet")),
    Case("wan", 4, 1, 8, (4, 4)),
    Case("wan", 5, 2, 7, (3, 5)),
    Case("wan", 5, 2, 9, (3, 3), ("token_times",)),
    Case("wan", 4, 2, 3, (1, 1), ("token_times",)),
    Case("wan", 4, 1, 3, (1, 3), ("image",)),
    Case("cogvideox", 4, 1, 8, (4, 4)),
    Case("cogvideox", 5, 2, 7, (3, 5), ("1.5",)),
    Case("cogvideox", 4, 2, 1, (1, 3), ("sincos",)),
]


def make_model(case: Case, dtype: torch.dtype = torch.float32) -> Any:
    """No parameter is left at zero or one, where it could hide a term."""
    model = _MODELS[case.model](case).to(dtype).eval()
    generator = torch.Generator().manual_seed(len(str(case)))
    with torch.no_grad():
        for parameter in model.parameters():
            std = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.2
            draw = torch.randn(parameter.shape, generator=generator) * std
            parameter.copy_(draw if parameter.ndim > 1 else parameter + draw)
    return model


def make_inputs(case: Case, dtype: torch.dtype = torch.float32, seed: int = 0) -> Inputs:
    return _INPUTS[case.model](case, Draw(dtype, seed))


class Draw:
    """Random tensors of a shape, the same on every rank."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        self.dtype, self.generator = dtype, torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype)


def _flux(case: Case) -> nn.Module:
    from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel

    return FluxTransformer2DModel(
        in_channels=CHANNELS,
        num_layers=0 if "no double" in case.options else 2,
        num_single_layers=0 if "no single" in case.options else 2,
        attention_head_dim=16,
        num_attention_heads=case.heads,
        joint_attention_dim=TEXT_DIM,
        pooled_projection_dim=TEXT_DIM,
        guidance_embeds="guidance" in case.options,
        axes_dims_rope=(4, 6, 6),
    )


def _qwen(case: Case) -> nn.Module:
    from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel(
        patch_size=1,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=case.heads,
        joint_attention_dim=TEXT_DIM,
        axes_dims_rope=(4, 6, 6),
        zero_cond_t="zero_cond" in case.options,
    )


def _wan(case: Case) -> nn.Module:
    from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

    image = "image" in case.options
    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=case.heads,
        attention_head_dim=12,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        text_dim=TEXT_DIM,
        freq_dim=16,
        ffn_dim=48,
        num_layers=2,
        image_dim=16 if image else None,
        added_kv_proj_dim=12 * case.heads if image else None,
        rope_max_seq_len=16,
    )


def _cogvideox(case: Case) -> nn.Module:
    from diffusers.models.transformers.cogvideox_transformer_3d import CogVideoXTransformer3DModel

    return CogVideoXTransformer3DModel(
        num_attention_heads=case.heads,
        attention_head_dim=16,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        time_embed_dim=16,
        ofs_embed_dim=16 if "1.5" in case.options else None,
        text_embed_dim=TEXT_DIM,
        num_layers=2,
        patch_size_t=2 if "1.5" in case.options else None,
        max_text_seq_length=case.text,
        use_rotary_positional_embeddings="sincos" not in case.options,
    )


def _flux_inputs(case: Case, draw: Draw) -> Inputs:
    tokens = case.grid[0] * case.grid[1]
    ids = torch.zeros(tokens, 3)
    ids[:, 1:] = torch.cartesian_prod(*(torch.arange(size) for size in case.grid))
    inputs: Inputs = {
        "hidden_states": draw(case.batch, tokens, CHANNELS),
        "encoder_hidden_states": draw(case.batch, case.text, TEXT_DIM),
        "pooled_projections": draw(case.batch, TEXT_DIM),
        "timestep": draw(case.batch).abs(),
        "img_ids": ids,
        "txt_ids": torch.zeros(case.text, 3),
    }
    if "guidance" in case.options:
        inputs["guidance"] = draw(case.batch).abs()
    if "controlnet" in case.options:
        for name in ("controlnet_block_samples", "controlnet_single_block_samples"):
            inputs[name] = [draw(case.batch, tokens, 16 * case.heads) for _ in range(2)]
    return inputs


def _qwen_inputs(case: Case, draw: Draw) -> Inputs:
    tokens = case.grid[0] * case.grid[1]
    shapes = [(1, *case.grid)]
    if "zero_cond" in case.options:  # the last row is a reference image
        shapes = [(1, case.grid[0] - 1, case.grid[1]), (1, 1, case.grid[1])]
    inputs: Inputs = {
        "hidden_states": draw(case.batch, tokens, CHANNELS),
        "encoder_hidden_states": draw(case.batch, case.text, TEXT_DIM),
        "timestep": draw(case.batch).abs(),
        "img_shapes": [shapes] * case.batch,
    }
    if "mask" in case.options:
        mask = draw(case.batch, case.text) < 0.3
        mask[:, 0] = True
        inputs["encoder_hidden_states_mask"] = mask.long()
    if "controlnet" in case.options:
        inputs["controlnet_block_samples"] = [draw(case.batch, tokens, 16 * case.heads)]
    return inputs


def _wan_inputs(case: Case, draw: Draw) -> Inputs:
    frames, (rows, columns) = 2, case.grid
    times = draw(case.batch)
    if "token_times" in case.options:
        times = draw(case.batch, frames * rows * columns)
    inputs: Inputs = {
        "hidden_states": draw(case.batch, CHANNELS, frames, 2 * rows, 2 * columns),
        "timestep": times.abs() * 100,
        "encoder_hidden_states": draw(case.batch, case.text, TEXT_DIM),
    }
    if "image" in case.options:  # the model takes the last 512 keys for text
        inputs["encoder_hidden_states"] = draw(case.batch, 512, TEXT_DIM)
        inputs["encoder_hidden_states_image"] = draw(case.batch, case.text, 16)
    return inputs


def _cogvideox_inputs(case: Case, draw: Draw) -> Inputs:
    rows, columns = case.grid
    depth = 2 if "1.5" in case.options else 1  # frames of a token
    inputs: Inputs = {
        "hidden_states": draw(case.batch, 2 * depth, CHANNELS, 2 * rows, 2 * columns),
        "encoder_hidden_states": draw(case.batch, case.text, TEXT_DIM),
        "timestep": draw(case.batch).abs() * 100,
    }
    if "sincos" not in case.options:
        angles = draw(2 * rows * columns, 16)
        inputs["image_rotary_emb"] = (angles.cos(), angles.sin())
    if "1.5" in case.options:
        inputs["ofs"] = draw(1).abs()
    return inputs


_MODELS: dict[str, Callable[[Case], nn.Module]] = {
    "flux": _flux,
    "qwen": _qwen,
    "wan": _wan,
    "cogvideox": _cogvideox,
}
_INPUTS: dict[str, Callable[[Case, Draw], Inputs]] = {
    "flux": _flux_inputs,
    "qwen": _qwen_inputs,
    "wan": _wan_inputs,
    "cogvideox": _cogvideox_inputs,
}


def make_mesh(ring: int, ulysses: int) -> Any:
    return init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))


def difference(found: Tensor, wanted: Tensor) -> float:
    """Relative L2."""
    return float((found - wanted).detach().norm() / wanted.detach().norm().clamp(min=1e-300))
