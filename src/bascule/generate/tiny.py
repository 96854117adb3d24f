"""Tiny models with random weights, to try a command without files. Importing it loads no torch."""

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

from bascule.errors import ConfigError

TINY, TINY_WAN = "tiny", "tiny-wan"  # in place of a folder: a Flux, and a Wan for videos

_TEXT_DIM = 64
_TOKENS = 64  # most of a prompt
_VOCAB_SIZE = 384  # bytes, special tokens and spare ids of ByT5's tokenizer

_Made = TypeVar("_Made")


def load(what: str, make: Callable[..., _Made], *libraries: str) -> _Made:
    """Import libraries and call `make` with them at torch seed 0; errors begin with `what`."""
    try:
        import torch

        modules = [importlib.import_module(library) for library in libraries]
    except ImportError as error:
        fix = f"pip install 'bascule[{','.join(libraries)}]'"
        raise ConfigError(f"{what}: {error.name} is not installed: {fix}") from None
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # of random weights
            return make(*modules)
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from None
    except Exception as error:  # loaders raise anything on damaged files
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConfigError(f"{what}: cannot be loaded: {reason}") from error


def vae(diffusers: Any, name: str) -> Any:
    """Make a VAE with 8 x 8 pixels per latent; Wan's also has 4 frames per latent."""
    if name == TINY_WAN:
        sizes = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
        constants = {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
        return diffusers.AutoencoderKLWan(**sizes, **constants).eval()
    widths = (16, 32, 32, 32)
    return diffusers.AutoencoderKL(
        block_out_channels=widths,
        down_block_types=("DownEncoderBlock2D",) * len(widths),
        up_block_types=("UpDecoderBlock2D",) * len(widths),
        norm_num_groups=8,
        shift_factor=0.1,
        sample_size=128,
    ).eval()


def t5(transformers: Any, kind: str = "T5") -> Any:
    """Make a T5 or UMT5 encoder for the token ids of `tokenizer`."""
    sizes = {"d_model": _TEXT_DIM, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    config = getattr(transformers, f"{kind}Config")(vocab_size=_VOCAB_SIZE, **sizes)
    return getattr(transformers, f"{kind}EncoderModel")(config).eval()


def tokenizer(transformers: Any, num_tokens: int = _TOKENS) -> Any:
    """Make a tokenizer whose tokens are bytes."""
    return transformers.ByT5Tokenizer(model_max_length=num_tokens)


def pipeline(diffusers: Any, transformers: Any, name: str) -> Any:
    """Make a Flux or a Wan pipeline."""
    byte_tokenizer = tokenizer(transformers)
    if name == TINY_WAN:
        return diffusers.WanPipeline(
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
            text_encoder=t5(transformers, "UMT5"),
            tokenizer=byte_tokenizer,
            vae=vae(diffusers, name),
            transformer=diffusers.WanTransformer3DModel(
                num_attention_heads=4,
                attention_head_dim=12,
                in_channels=4,
                out_channels=4,
                text_dim=_TEXT_DIM,
                freq_dim=16,
                ffn_dim=64,
                num_layers=2,
            ).eval(),
        )
    clip = transformers.CLIPTextConfig(
        hidden_size=_TEXT_DIM,
        intermediate_size=64,
        max_position_embeddings=_TOKENS,
        vocab_size=_VOCAB_SIZE,
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    return diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        text_encoder=transformers.CLIPTextModel(clip).eval(),
        tokenizer=byte_tokenizer,
        text_encoder_2=t5(transformers),
        tokenizer_2=byte_tokenizer,
        vae=vae(diffusers, name),
        transformer=diffusers.FluxTransformer2DModel(
            in_channels=16,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=4,
            joint_attention_dim=_TEXT_DIM,
            pooled_projection_dim=_TEXT_DIM,
            axes_dims_rope=(4, 6, 6),
        ).eval(),
    )
