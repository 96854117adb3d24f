"""Tiny pipelines of diffusers with random weights, their prompts, and what they make."""

from typing import Any

import torch
from torch import Tensor

from tests.helpers.encoder_cases import text_encoder
from tests.helpers.tile_cases import flux_pipeline, other_vae, tiny_vae

TEXT_DIM = 32
_SIDES = {"cogvideox": (48, 32), "wan": (48, 80), "hunyuan": (48, 80)}
_ABSENT = "text_encoder", "tokenizer"


def make_pipeline(name: str, **scheduling: Any) -> Any:
    """A pipeline; `scheduling` changes its scheduler."""
    pipeline = _MAKERS[name]()
    if scheduling:
        config = {**pipeline.scheduler.config, **scheduling}
        pipeline.scheduler = type(pipeline.scheduler).from_config(config)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def prompt_of(
    name: str, *, seed: int = 0, is_guided: bool = True, num_prompts: int = 1
) -> dict[str, Any]:
    """What a pipeline is called with, besides sizes: embeddings, and guidance."""
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    texts: dict[str, Any] = {"prompt_embeds": draw(num_prompts, 7, TEXT_DIM)}
    if is_guided:
        unlike = 4 if name in ("qwen", "wan") else 7
        texts["negative_prompt_embeds"] = draw(num_prompts, unlike, TEXT_DIM)
    if name in ("flux", "kontext"):
        if name == "kontext":  # keeps an area, and takes the photo as it is
            photo = torch.rand(num_prompts, 3, 36, 44, generator=random)
            texts |= {"image": photo, "_auto_resize": False, "max_area": 44 * 36}
        embeds = {key: x for key, x in texts.items() if "embeds" in key}
        texts |= {key.replace("prompt", "pooled_prompt"): x[:, 0] for key, x in embeds.items()}
        return texts | {"true_cfg_scale": 3.0 if is_guided else 1.0}
    if name == "zimage":  # a list, with the tokens of each prompt
        texts = {key: list(x) for key, x in texts.items()}
        return texts | {"guidance_scale": 3.0 if is_guided else 0.0}
    if name == "sd3":
        pooled = {key.replace("prompt", "pooled_prompt"): x[:, 0] for key, x in texts.items()}
        return texts | pooled | {"guidance_scale": 4.0 if is_guided else 1.0}
    if name == "hunyuan":
        for key, x in dict(texts).items():
            mask = torch.ones(x.shape[:2], dtype=torch.int64)
            mask[:, 5:] = 0
            texts[key.replace("embeds", "attention_mask")] = mask
            texts[key.replace("prompt", "pooled_prompt")] = x[:, 0]
        return texts | {"true_cfg_scale": 3.0 if is_guided else 1.0, "num_frames": 9}
    if name == "qwen":
        for key in ("prompt_embeds", "negative_prompt_embeds"):
            if key in texts:
                texts[f"{key}_mask"] = torch.ones(texts[key].shape[:2], dtype=torch.int64)
        return texts | {"true_cfg_scale": 3.0 if is_guided else 1.0}
    return texts | {"guidance_scale": 4.0 if is_guided else 1.0, "num_frames": 5}


def generated(name: str, pipeline: Any, prompt: dict[str, Any], **others: Any) -> Tensor:
    """Pixels of odd sizes; for one prompt, or several images of it."""
    height, width = _SIDES.get(name, (44, 36))
    sizes = {"height": height, "width": width, "num_inference_steps": 2, "output_type": "pt"}
    return pipeline(**{**prompt, **sizes, **others})[0]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _host() -> Any:
    import diffusers as host

    torch.manual_seed(0)
    return host


def _kontext() -> Any:
    """Edits a photo; takes a part of what a branch gives before it computes the next one."""
    flux = flux_pipeline()
    return _host().FluxKontextPipeline(**flux.components)


def _qwen() -> Any:
    diffusers = _host()
    sizes: dict[str, Any] = {"in_channels": 16, "out_channels": 4, "num_layers": 1}
    sizes |= {"attention_head_dim": 16, "num_attention_heads": 2, "axes_dims_rope": (4, 6, 6)}
    transformer = diffusers.QwenImageTransformer2DModel(joint_attention_dim=TEXT_DIM, **sizes)
    parts = {"transformer": transformer.eval(), "vae": tiny_vae("qwen"), **dict.fromkeys(_ABSENT)}
    parts["scheduler"] = diffusers.FlowMatchEulerDiscreteScheduler()
    return diffusers.QwenImagePipeline(**parts)


def _wan() -> Any:
    """Two transformers: one for the first half of the noise, and one for the rest."""
    diffusers = _host()
    sizes: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 1}
    sizes |= {"in_channels": 4, "out_channels": 4, "freq_dim": 16, "ffn_dim": 16}
    both = [diffusers.WanTransformer3DModel(text_dim=TEXT_DIM, **sizes).eval() for _ in range(2)]
    parts = {"transformer": both[0], "transformer_2": both[1], "boundary_ratio": 0.8}
    parts |= {"vae": tiny_vae("wan"), "scheduler": diffusers.UniPCMultistepScheduler()}
    return diffusers.WanPipeline(**parts, **dict.fromkeys(_ABSENT))


def _cogvideox() -> Any:
    """Guides with one call of two samples; its scheduler draws noise in every step."""
    diffusers = _host()
    transformer = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=16,
        text_embed_dim=TEXT_DIM,
        num_layers=1,
        max_text_seq_length=7,
        use_rotary_positional_embeddings=True,
    )
    parts = {"transformer": transformer.eval(), "vae": other_vae("cogvideox")}
    parts["scheduler"] = diffusers.CogVideoXDPMScheduler()
    return diffusers.CogVideoXPipeline(**parts, **dict.fromkeys(_ABSENT))


def _sd3() -> Any:
    """Guides with one call of two samples."""
    diffusers = _host()
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=32,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=TEXT_DIM,
        caption_projection_dim=32,
        pooled_projection_dim=TEXT_DIM,
        pos_embed_max_size=32,
    )
    parts = {"transformer": transformer.eval(), "vae": flux_pipeline().vae}
    parts["scheduler"] = diffusers.FlowMatchEulerDiscreteScheduler()
    absent = [f"{part}{end}" for part in _ABSENT for end in ("", "_2", "_3")]
    return diffusers.StableDiffusion3Pipeline(**parts, **dict.fromkeys(absent))


def _zimage() -> Any:
    """Guides with one call; takes and gives a list with an entry for each sample."""
    diffusers = _host()
    transformer = diffusers.ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=1,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=TEXT_DIM,
        axes_dims=[4, 6, 6],
        axes_lens=[96, 32, 32],
    )
    with torch.no_grad():
        for parameter in transformer.parameters():  # some begin as zeros
            parameter.add_(torch.randn_like(parameter) * 0.02)
    parts = {"transformer": transformer.eval(), "vae": flux_pipeline().vae}
    parts["scheduler"] = diffusers.FlowMatchEulerDiscreteScheduler()
    return diffusers.ZImagePipeline(**parts, **dict.fromkeys(_ABSENT))


def _hunyuan() -> Any:
    """Calls its transformer once for each branch, with masked prompts."""
    diffusers = _host()
    transformer = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        guidance_embeds=True,
        text_embed_dim=TEXT_DIM,
        pooled_projection_dim=TEXT_DIM,
        rope_axes_dim=(4, 6, 6),
    )
    parts = {"transformer": transformer.eval(), "vae": other_vae("hunyuan")}
    parts["scheduler"] = diffusers.FlowMatchEulerDiscreteScheduler()
    absent = [f"{part}{end}" for part in _ABSENT for end in ("", "_2")]
    return diffusers.HunyuanVideoPipeline(**parts, **dict.fromkeys(absent))


_MAKERS = {
    "flux": flux_pipeline,
    "kontext": _kontext,
    "qwen": _qwen,
    "wan": _wan,
    "cogvideox": _cogvideox,
    "sd3": _sd3,
    "zimage": _zimage,
    "hunyuan": _hunyuan,
}
PIPELINES = {
    "images": ("flux", "kontext", "qwen", "sd3", "zimage"),
    "videos": ("wan", "cogvideox", "hunyuan"),
}
"""By what they make."""

ONE_BY_ONE = "flux", "kontext", "qwen", "wan", "hunyuan"
"""Those that call their transformer once for each branch of guidance."""


def with_text_encoders(pipeline: Any) -> Any:
    """A Flux pipeline that encodes prompts itself; its words are those of `words`."""
    import diffusers as host
    import transformers

    diffusers: Any = host
    clip, t5 = text_encoder("clip").float(), text_encoder("t5").float()
    torch.manual_seed(0)
    parts: dict[str, Any] = {"text_encoder": clip, "tokenizer": _tokenizer(transformers)}
    parts |= {"text_encoder_2": t5, "tokenizer_2": _tokenizer(transformers)}
    sizes: dict[str, Any] = {**pipeline.transformer.config, "joint_attention_dim": 16}
    sizes |= {"pooled_projection_dim": 16}
    transformer = diffusers.FluxTransformer2DModel.from_config(sizes).eval()
    kept = {"transformer": transformer, "vae": pipeline.vae, "scheduler": pipeline.scheduler}
    made = diffusers.FluxPipeline(**kept, **parts)
    made.set_progress_bar_config(disable=True)
    return made


def _tokenizer(transformers: Any) -> Any:
    """Made in memory: a number for each word."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = ["<pad>", "<unk>", "</s>", *(f"w{number}" for number in range(40))]
    made = Tokenizer(WordLevel({word: place for place, word in enumerate(words)}, "<unk>"))
    made.pre_tokenizer = Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="</s>",
        model_max_length=8,
    )
