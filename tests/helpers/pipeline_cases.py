"""Tiny pipelines of diffusers with random weights, their prompts, and their pixels."""

import importlib
import inspect
from typing import Any

import torch
from torch import Tensor

from bascule.diffusers import Cut, SplitTable
from bascule.generate import tiny
from tests.helpers.split_models import CASES, built
from tests.helpers.tile_cases import other_vae, tiny_vae

TEXT_DIM = 32
_CHANNELS: dict[str, Any] = {"in_channels": 4, "out_channels": 4}
_HEADS: dict[str, Any] = {"attention_head_dim": 16, "num_attention_heads": 2, "num_layers": 1}
_FLUX: dict[str, Any] = {"joint_attention_dim": TEXT_DIM, "axes_dims_rope": (4, 6, 6), **_HEADS}
_DIT = SplitTable(
    segments=("image",),
    inputs={},
    outputs={"pos_embed": {0: Cut("image")}},
    gathers={"proj_out_2": Cut("image")},
    blocks={"transformer_blocks.*": ("image",)},
    replicated=("hidden_states", "timestep", "class_labels"),
)
_VAE: dict[str, Any] = {
    "block_out_channels": (8, 8),
    "norm_num_groups": 4,
    "latent_channels": 4,
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
}
TABLES = {"dit": _DIT}
"""Tables of models that bascule does not know."""

PIPELINES = {
    "videos": ("wan", "cogvideox", "hunyuan"),
    "images": ("flux", "kontext", "qwen", "sd3", "zimage"),
    "draws first": ("control", "dit", "ernie"),  # before or without `prepare_latents`
}
ONE_BY_ONE = "flux", "kontext", "qwen", "wan", "hunyuan"
"""Those that call their transformer once for each branch of guidance."""


def make_pipeline(name: str, **scheduling: Any) -> Any:
    """A pipeline; `scheduling` changes its scheduler."""
    diffusers: Any = importlib.import_module("diffusers")
    torch.manual_seed(0)
    if name == "texts":  # encodes prompts itself
        pipeline = tiny.pipeline(diffusers, importlib.import_module("transformers"), tiny.TINY)
    else:
        pipeline = _assembled(diffusers, name)
    if scheduling:
        config = {**pipeline.scheduler.config, **scheduling}
        pipeline.scheduler = type(pipeline.scheduler).from_config(config)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _assembled(diffusers: Any, name: str) -> Any:
    """A pipeline of parts; those that are not named are None."""
    scheduler, more = "FlowMatchEulerDiscreteScheduler", dict[str, Any]()
    if name in ("flux", "kontext", "control"):
        kind, vae = f"Flux{name.title().replace('Flux', '')}Pipeline", _vae(diffusers)
        sizes: dict[str, Any] = {"in_channels": 16, "pooled_projection_dim": TEXT_DIM}
        if name == "control":  # samples the latents of its control image before it draws noise
            sizes |= {"in_channels": 32, "out_channels": 16}
        model = diffusers.FluxTransformer2DModel(**_FLUX, **sizes, num_single_layers=1)
    elif name == "qwen":
        kind, vae = "QwenImagePipeline", tiny_vae("qwen")
        model = diffusers.QwenImageTransformer2DModel(**_FLUX, in_channels=16, out_channels=4)
    elif name == "wan":  # one model for the first half of the noise, and one for the rest
        kind, vae, scheduler = "WanPipeline", tiny_vae("wan"), "UniPCMultistepScheduler"
        sizes = {**_CHANNELS, **_HEADS, "attention_head_dim": 12, "freq_dim": 16, "ffn_dim": 16}
        model, other = (
            diffusers.WanTransformer3DModel(text_dim=TEXT_DIM, **sizes).eval() for _ in range(2)
        )
        more = {"transformer_2": other, "boundary_ratio": 0.8}
    elif name == "cogvideox":  # one call of two samples; its scheduler draws in every step
        kind, vae, scheduler = "CogVideoXPipeline", other_vae(name), "CogVideoXDPMScheduler"
        model = diffusers.CogVideoXTransformer3DModel(
            **_CHANNELS,
            **_HEADS,
            time_embed_dim=16,
            text_embed_dim=TEXT_DIM,
            max_text_seq_length=7,
            use_rotary_positional_embeddings=True,
        )
    elif name == "sd3":  # one call of two samples
        kind, vae = "StableDiffusion3Pipeline", _vae(diffusers)
        model = diffusers.SD3Transformer2DModel(
            **_CHANNELS,
            **{**_HEADS, "num_layers": 2},
            sample_size=32,
            patch_size=2,
            joint_attention_dim=TEXT_DIM,
            caption_projection_dim=32,
            pooled_projection_dim=TEXT_DIM,
            pos_embed_max_size=32,
        )
    elif name == "zimage":  # one call; takes and gives a list with an entry for each sample
        kind, vae = "ZImagePipeline", _vae(diffusers)
        sizes = {"dim": 32, "n_layers": 1, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2}
        axes: dict[str, Any] = {"axes_dims": [4, 6, 6], "axes_lens": [96, 32, 32]}
        model = diffusers.ZImageTransformer2DModel(
            in_channels=4, cap_feat_dim=TEXT_DIM, **sizes, **axes
        )
    elif name == "hunyuan":  # a call for each branch, with masked prompts
        kind, vae = "HunyuanVideoPipeline", other_vae(name)
        model = diffusers.HunyuanVideoTransformer3DModel(
            **_CHANNELS,
            **_HEADS,
            num_single_layers=1,
            num_refiner_layers=1,
            guidance_embeds=True,
            text_embed_dim=TEXT_DIM,
            pooled_projection_dim=TEXT_DIM,
            rope_axes_dim=(4, 6, 6),
        )
    elif name == "dit":
        kind, vae, scheduler = "DiTPipeline", _vae(diffusers), "DDIMScheduler"
        model = diffusers.DiTTransformer2DModel(
            in_channels=4, out_channels=8, **_HEADS, sample_size=10
        )
    elif name == "ernie":
        kind, vae = "ErnieImagePipeline", diffusers.AutoencoderKLFlux2(**_VAE).eval()
        model = diffusers.ErnieImageTransformer2DModel(
            hidden_size=32,
            num_attention_heads=2,
            num_layers=1,
            ffn_hidden_size=32,
            in_channels=16,
            out_channels=16,
            text_in_dim=TEXT_DIM,
            rope_axes_dim=(4, 6, 6),
        )
    else:
        return _ideogram(diffusers)
    with torch.no_grad():
        for parameter in model.parameters() if name in ("zimage", "dit", "ernie") else ():
            parameter.add_(torch.randn_like(parameter) * 0.02)  # some begin as zeros
    cls = getattr(diffusers, kind)
    required = inspect.signature(cls).parameters.values()
    absent = {one.name: None for one in required if one.default is one.empty}
    parts = {"transformer": model.eval(), "vae": vae, "scheduler": getattr(diffusers, scheduler)()}
    return cls(**(absent | parts | more))


def _vae(diffusers: Any) -> Any:
    """Of 2 x 2 pixels a latent."""
    vae = diffusers.AutoencoderKL(**_VAE, shift_factor=0.1).eval()
    vae.tile_sample_min_size, vae.tile_latent_min_size = 16, 8
    return vae


def _ideogram(diffusers: Any) -> Any:
    """Guides with a second model; its prompts are encoded already."""
    case = next(one for one in CASES if one.model == "ideogram4")
    models: list[Any] = [built(case).eval() for _ in range(2)]
    width = models[0].config.llm_features_dim

    class Encoded(diffusers.Ideogram4Pipeline):
        def encode_prompt(
            self, prompt: str, grid_h: int, grid_w: int, max_sequence_length: int, device: Any
        ) -> Any:
            ids = self._prepare_ids([4], grid_h, grid_w, max_sequence_length, device)
            tokens = max_sequence_length + grid_h * grid_w
            return torch.randn(1, tokens, width, generator=seeded(3)), *ids

    return Encoded(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=_vae(diffusers),
        text_encoder=None,
        tokenizer=None,
        transformer=models[0],
        unconditional_transformer=models[1],
    )


def prompt_of(
    name: str, *, seed: int = 0, is_guided: bool = True, num_prompts: int = 1
) -> dict[str, Any]:
    """Arguments of a pipeline besides sizes: embeddings, and guidance."""
    random = seeded(seed)
    if name == "dit":
        return {"class_labels": [*range(num_prompts)], "guidance_scale": 3.0 if is_guided else 1.0}
    if name == "texts":
        return {"prompt": ["w1 w2 w3", "w4", "w5 w6"], "max_sequence_length": 8}
    if name == "ideogram":
        scale = {"guidance_schedule": None, "guidance_scale": 3.0}
        return {"prompt": "w1", "max_sequence_length": 5, "return_dict": False, **scale}
    texts: dict[str, Any] = {
        "prompt_embeds": torch.randn(num_prompts, 7, TEXT_DIM, generator=random)
    }
    if is_guided:
        unlike = 4 if name in ("qwen", "wan") else 7
        shape = num_prompts, unlike, TEXT_DIM
        texts["negative_prompt_embeds"] = torch.randn(*shape, generator=random)
    pooled = {key.replace("prompt", "pooled_prompt"): x[:, 0] for key, x in texts.items()}
    scale = {"true_cfg_scale": 3.0 if is_guided else 1.0}
    if name in ("flux", "kontext", "control"):
        if name == "control":
            scale = {"control_image": torch.rand(1, 3, 44, 36, generator=random)}
            return {key: x for key, x in (texts | pooled).items() if "negative" not in key} | scale
        if name == "kontext":  # keeps an area, and takes the photo as it is
            photo = torch.rand(num_prompts, 3, 36, 44, generator=random)
            texts |= {"image": photo, "_auto_resize": False, "max_area": 44 * 36}
        return texts | pooled | scale
    if name in ("zimage", "ernie"):  # a list, with the tokens of each prompt
        texts = {key: list(x) for key, x in texts.items()}
        return texts | {"guidance_scale": 3.0 if is_guided else float(name == "ernie")}
    if name == "sd3":
        return texts | pooled | {"guidance_scale": 4.0 if is_guided else 1.0}
    if name == "hunyuan":
        for key, x in dict(texts).items():
            mask = torch.ones(x.shape[:2], dtype=torch.int64)
            mask[:, 5:] = 0
            texts[key.replace("embeds", "attention_mask")] = mask
        return texts | pooled | scale | {"num_frames": 9}
    if name == "qwen":
        masks = {f"{key}_mask": torch.ones(x.shape[:2]).long() for key, x in texts.items()}
        return texts | masks | scale
    return texts | {"guidance_scale": 4.0 if is_guided else 1.0, "num_frames": 5}


def generated(name: str, pipeline: Any, prompt: dict[str, Any], **others: Any) -> Tensor:
    """Pixels of odd sizes; for one prompt, or several images of it."""
    sides = {"cogvideox": (48, 32), "wan": (48, 80), "hunyuan": (48, 80), "ideogram": (32, 32)}
    height, width = sides.get(name, (44, 36))
    sizes = {"height": height, "width": width, "num_inference_steps": 2, "output_type": "pt"}
    if name == "dit":
        sizes = {key: sizes[key] for key in ("num_inference_steps", "output_type")}
    return pipeline(**{**sizes, **prompt, **others})[0]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
