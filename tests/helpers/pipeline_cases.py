"""Tiny pipelines of diffusers with random weights, their prompts, and their pixels."""

import importlib
import inspect
from typing import Any

import torch
from torch import Tensor

from bascule.diffusers import Cut, SplitTable
from bascule.generate import tiny
from tests.helpers.split_models import CASES, TEXT_DIM, Case, built
from tests.helpers.tile_cases import other_vae, tiny_vae

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
_FOUR: dict[str, Any] = {"in_channels": 4, "out_channels": 4, "num_layers": 1}
_SIXTEEN: dict[str, Any] = {"in_channels": 16, "out_channels": 16, "num_layers": 1}
_FLUX = {**_SIXTEEN, "num_single_layers": 1}
_QWEN = {**_SIXTEEN, "out_channels": 4, "patch_size": 2}
_WAN = {**_FOUR, "ffn_dim": 16, "rope_max_seq_len": 1024}
_SD3 = {**_FOUR, "num_layers": 2, "sample_size": 32, "pos_embed_max_size": 32}
_Z_IMAGE = {"in_channels": 4, "n_layers": 1, "n_refiner_layers": 1, "axes_lens": [96, 32, 32]}
_HUNYUAN = {**_FOUR, "num_single_layers": 1, "guidance_embeds": True}
_KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {  # class, model, and sizes unlike `built`'s
    "flux": ("FluxPipeline", "flux", _FLUX),
    "kontext": ("FluxKontextPipeline", "flux", _FLUX),
    # Samples the latents of its control image before it draws noise.
    "control": ("FluxControlPipeline", "flux", {**_FLUX, "in_channels": 32}),
    "qwen": ("QwenImagePipeline", "qwen", _QWEN),
    "wan": ("WanPipeline", "wan", _WAN),
    "cogvideox": ("CogVideoXPipeline", "cogvideox", _FOUR),  # one call of two samples
    "sd3": ("StableDiffusion3Pipeline", "sd3", _SD3),  # one call of two samples
    # One call; takes and gives a list with an entry for each sample.
    "zimage": ("ZImagePipeline", "z_image", _Z_IMAGE),
    "hunyuan": ("HunyuanVideoPipeline", "hunyuan", _HUNYUAN),  # a call a branch, masked prompts
    "dit": ("DiTPipeline", "", {**_FOUR, "out_channels": 8, "sample_size": 10}),
    "klein": ("Flux2KleinPipeline", "flux2", _FLUX),  # takes several pictures
    "ernie": ("ErnieImagePipeline", "ernie", {**_SIXTEEN, "ffn_hidden_size": 32}),
}
_SCHEDULERS = {  # other than Flux has; that of CogVideoX draws in every step
    "wan": "UniPCMultistepScheduler",
    "cogvideox": "CogVideoXDPMScheduler",
    "dit": "DDIMScheduler",
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
        make = _ideogram if name == "ideogram" else _assembled
        pipeline = make(diffusers, name)
    if scheduling:
        config = {**pipeline.scheduler.config, **scheduling}
        pipeline.scheduler = type(pipeline.scheduler).from_config(config)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _assembled(diffusers: Any, name: str) -> Any:
    """A pipeline of parts; those that are not named are None."""
    kind, model_name, sizes = _KINDS[name]
    vae, more = _vae(diffusers, name), dict[str, Any]()
    if name == "dit":
        heads = {"num_attention_heads": 2, "attention_head_dim": 16}
        model = diffusers.DiTTransformer2DModel(**sizes, **heads)
    else:
        case = Case(model_name, 2, 1, 7, (2, 2))
        model = built(case, **sizes)
        if name == "wan":  # one model for the first half of the noise, and one for the rest
            more = {"transformer_2": built(case, **sizes).eval(), "boundary_ratio": 0.8}
    with torch.no_grad():
        for parameter in model.parameters() if name in ("zimage", "dit", "ernie") else ():
            parameter.add_(torch.randn_like(parameter) * 0.02)  # some begin as zeros
    cls = getattr(diffusers, kind)
    required = inspect.signature(cls).parameters.values()
    absent = {one.name: None for one in required if one.default is one.empty}
    scheduler = getattr(diffusers, _SCHEDULERS.get(name, "FlowMatchEulerDiscreteScheduler"))()
    parts = {"transformer": model.eval(), "vae": vae, "scheduler": scheduler}
    return cls(**(absent | parts | more))


def _vae(diffusers: Any, name: str) -> Any:
    """Of 2 x 2 pixels a latent, unless the class says otherwise."""
    if name in ("cogvideox", "hunyuan"):
        return other_vae(name)
    if name in ("qwen", "wan"):
        return tiny_vae(name)
    if name in ("ernie", "klein"):
        return diffusers.AutoencoderKLFlux2(**_VAE).eval()
    vae = diffusers.AutoencoderKL(**_VAE, shift_factor=0.1).eval()
    vae.tile_sample_min_size, vae.tile_latent_min_size = 16, 8
    return vae


def _ideogram(diffusers: Any, name: str) -> Any:
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
        vae=_vae(diffusers, name),
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
    """Pixels for one prompt, or several images of it."""
    return pipeline(**{**sizes_of(name), **prompt, **others})[0]


def sizes_of(name: str) -> dict[str, Any]:
    """Arguments of a pipeline besides its prompt: two steps of pixels of odd sizes."""
    sides = {"cogvideox": (48, 32), "wan": (48, 80), "hunyuan": (48, 80), "ideogram": (32, 32)}
    height, width = sides.get(name, (44, 36))
    sizes = {} if name == "dit" else {"height": height, "width": width}
    return {**sizes, "num_inference_steps": 2, "output_type": "pt"}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
