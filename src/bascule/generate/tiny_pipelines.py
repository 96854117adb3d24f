"""A pipeline of diffusers from a folder, or a tiny one of the real classes with random weights."""

import importlib
from typing import Any

import torch

from bascule.errors import ConfigError
from bascule.generate.generate_options import TINY, TINY_WAN

_TEXT_DIM = 32
_TOKENS = 64  # of a prompt, in tiny pipelines


def load_pipeline(model: str, dtype: torch.dtype, device: torch.device) -> Any:
    """The pipeline, on the device; all files are of this machine alone.

    Args:
        model: A folder, or "tiny", a Flux, or "tiny-wan".
        dtype: Of its weights.
        device: Where it computes.

    Raises:
        ConfigError: A library or a file is missing, or it is no pipeline.
    """
    try:
        diffusers, transformers = _libraries()
    except ImportError as error:
        raise ConfigError(
            f"--model {model}: {error.name} is not installed: pip install "
            "'bascule[diffusers,transformers]'"
        ) from error
    transformers.logging.set_verbosity_error()  # advice to install what nothing here needs
    try:
        if model in (TINY, TINY_WAN):
            made = _tiny(model)
            made = made if dtype == torch.float32 else made.to(dtype)
        else:
            load = diffusers.DiffusionPipeline.from_pretrained
            made = load(model, torch_dtype=dtype, local_files_only=True)
    except Exception as error:  # loaders raise anything on damaged files
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"--model {model}: cannot be loaded: {said}") from error
    return made.to(device)


def _tiny(model: str) -> Any:
    """The same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _flux() if model == TINY else _wan()


def _flux() -> Any:
    """Of 8 pixels a latent; its tokenizers take a prompt's bytes."""
    diffusers, transformers = _libraries()
    clip = {"hidden_size": _TEXT_DIM, "intermediate_size": 64, "max_position_embeddings": _TOKENS}
    ids = {"vocab_size": 384, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4}
    widths = (16, 32, 32, 32)
    return diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        text_encoder=transformers.CLIPTextModel(
            transformers.CLIPTextConfig(**clip, **ids, **layers)
        ),
        tokenizer=transformers.ByT5Tokenizer(model_max_length=_TOKENS),
        text_encoder_2=_t5(transformers.T5EncoderModel, transformers.T5Config),
        tokenizer_2=transformers.ByT5Tokenizer(model_max_length=_TOKENS),
        vae=diffusers.AutoencoderKL(
            block_out_channels=widths,
            down_block_types=("DownEncoderBlock2D",) * len(widths),
            up_block_types=("UpDecoderBlock2D",) * len(widths),
            latent_channels=4,
            norm_num_groups=8,
            shift_factor=0.1,
            sample_size=128,
        ).eval(),
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


def _wan() -> Any:
    """Of 8 x 8 pixels and 4 frames a latent."""
    diffusers, transformers = _libraries()
    vae = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    constants = {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
    return diffusers.WanPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        text_encoder=_t5(transformers.UMT5EncoderModel, transformers.UMT5Config),
        tokenizer=transformers.ByT5Tokenizer(model_max_length=_TOKENS),
        vae=diffusers.AutoencoderKLWan(**vae, **constants).eval(),
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


def _t5(encoder: Any, config: Any) -> Any:
    sizes = {"d_model": _TEXT_DIM, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return encoder(config(vocab_size=384, **sizes)).eval()


def _libraries() -> tuple[Any, Any]:
    return importlib.import_module("diffusers"), importlib.import_module("transformers")
