"""Convert weights of FLUX between diffusers' model and the packed MM-DiT, without rounding."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from bascule.errors import ConfigError
from bascule.models.mmdit import MMDiTConfig

# Our module: diffusers' module, or several whose rows are concatenated.
_Names = Mapping[str, str | tuple[str, ...]]

_TOP: _Names = {
    "image_in": "x_embedder",
    "text_in": "context_embedder",
    "time_in.linear_in": "time_text_embed.timestep_embedder.linear_1",
    "time_in.linear_out": "time_text_embed.timestep_embedder.linear_2",
    "vec_in.linear_in": "time_text_embed.text_embedder.linear_1",
    "vec_in.linear_out": "time_text_embed.text_embedder.linear_2",
    "final.modulation.linear": "norm_out.linear",
    "final.linear": "proj_out",
}
_GUIDANCE: _Names = {
    "guidance_in.linear_in": "time_text_embed.guidance_embedder.linear_1",
    "guidance_in.linear_out": "time_text_embed.guidance_embedder.linear_2",
}
_DOUBLE: _Names = {
    "image.modulation.linear": "norm1.linear",
    "image.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "image.heads.q_norm": "attn.norm_q",
    "image.heads.k_norm": "attn.norm_k",
    "image.out": "attn.to_out.0",
    "image.mlp_in": "ff.net.0.proj",
    "image.mlp_out": "ff.net.2",
    "text.modulation.linear": "norm1_context.linear",
    "text.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "text.heads.q_norm": "attn.norm_added_q",
    "text.heads.k_norm": "attn.norm_added_k",
    "text.out": "attn.to_add_out",
    "text.mlp_in": "ff_context.net.0.proj",
    "text.mlp_out": "ff_context.net.2",
}
_SINGLE: _Names = {
    "modulation.linear": "norm.linear",
    "linear_in": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
    "heads.q_norm": "attn.norm_q",
    "heads.k_norm": "attn.norm_k",
    "linear_out": "proj_out",
}
_NORMS = ("q_norm", "k_norm")  # without a bias


def config_from_diffusers(config: Mapping[str, Any]) -> MMDiTConfig:
    """Read the sizes of a `FluxTransformer2DModel` from its `config`."""
    try:
        heads, width = int(config["num_attention_heads"]), int(config["attention_head_dim"])
        channels, out = int(config["in_channels"]), config.get("out_channels")
        sizes = MMDiTConfig(
            in_channels=channels,
            text_dim=int(config["joint_attention_dim"]),
            vec_dim=int(config["pooled_projection_dim"]),
            d_model=heads * width,
            num_heads=heads,
            num_double=int(config["num_layers"]),
            num_single=int(config["num_single_layers"]),
            axes_dim=tuple(config["axes_dims_rope"]),
            guidance=bool(config["guidance_embeds"]),
        )
    except (KeyError, TypeError) as error:
        raise ConfigError(f"this is no config of a FluxTransformer2DModel: {error!r}") from None
    if out not in (None, channels) or config.get("patch_size", 1) != 1:
        raise ConfigError(
            f"in_channels={channels}, out_channels={out}, patch_size={config.get('patch_size', 1)}:"
            " the packed model needs out_channels equal to in_channels, and patches of 1"
        )
    return sizes


def weights_from_diffusers(theirs: Mapping[str, Tensor], config: MMDiTConfig) -> dict[str, Tensor]:
    """Convert a state dict of a `FluxTransformer2DModel` with these sizes to one of `MMDiT`."""
    made: dict[str, Tensor] = {}
    left = dict(theirs)
    missing: list[str] = []
    for ours, sources in _tensors(config):
        parts = [left.pop(name, None) for name in sources]
        missing += [name for name, part in zip(sources, parts, strict=True) if part is None]
        joined = [part for part in parts if part is not None]
        if joined:
            made[ours] = joined[0] if len(joined) == 1 else torch.cat(joined)
    _refuse(missing, list(left), "a FluxTransformer2DModel", config)
    return _with_swapped_final(made)


def weights_to_diffusers(ours: Mapping[str, Tensor], config: MMDiTConfig) -> dict[str, Tensor]:
    """Convert a state dict of `MMDiT` to diffusers', the inverse of `weights_from_diffusers`."""
    if config.kv_heads != config.num_heads:
        raise ConfigError(
            f"{config.kv_heads} key-value heads for {config.num_heads}: FLUX needs as many of both"
        )
    names = dict(_tensors(config))
    missing, unknown = [n for n in names if n not in ours], [n for n in ours if n not in names]
    _refuse(missing, unknown, "an MMDiT", config)
    made: dict[str, Tensor] = {}
    for name, whole in _with_swapped_final(ours).items():
        targets, sizes = names[name], [*[config.d_model] * 3, config.mlp_dim]
        parts = [whole] if len(targets) == 1 else whole.split(sizes[: len(targets)])
        made |= dict(zip(targets, parts, strict=True))
    return made


def _tensors(config: MMDiTConfig) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the name of each tensor of `MMDiT`, with the names of diffusers' tensors for it."""
    tables: list[tuple[str, str, _Names]] = [("", "", _TOP)]
    tables += [("", "", _GUIDANCE)] if config.guidance else []
    for kind, theirs, num, names in (
        ("double_blocks", "transformer_blocks", config.num_double, _DOUBLE),
        ("single_blocks", "single_transformer_blocks", config.num_single, _SINGLE),
    ):
        tables += [(f"{kind}.{place}.", f"{theirs}.{place}.", names) for place in range(num)]
    for prefix, their_prefix, names in tables:
        for ours, source in names.items():
            sources = (source,) if isinstance(source, str) else source
            for part in ("weight",) if ours.endswith(_NORMS) else ("weight", "bias"):
                theirs_of = tuple(f"{their_prefix}{name}.{part}" for name in sources)
                yield f"{prefix}{ours}.{part}", theirs_of


def _with_swapped_final(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Swap shift and scale of the final modulation, which diffusers has in the other order."""
    swapped = dict(weights)
    for part in ("weight", "bias"):
        name = f"final.modulation.linear.{part}"
        swapped[name] = torch.cat(swapped[name].chunk(2)[::-1])
    return swapped


def _refuse(missing: list[str], left: list[str], what: str, config: MMDiTConfig) -> None:
    if missing or left:
        raise ConfigError(
            f"these are not the weights of {what} with {config.num_double} + {config.num_single} "
            f"blocks{'' if config.guidance else ', without guidance'}: {len(missing)} are missing "
            f"{missing[:3]}, and {len(left)} are unknown {left[:3]}"
        )
