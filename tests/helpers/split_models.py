"""Tiny models of diffusers with random weights, and inputs of awkward shapes, as one table.

Odd lengths, fewer tokens than ranks, heads that do not divide, padded texts.
"""

import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

TEXT_DIM, CHANNELS = 32, 8
PLAN = "plan"
"""Option: split by the plan of the model's class, also where bascule has a table."""

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


class Draw:
    """Random tensors of a shape, the same on every rank."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        self.dtype, self.generator = dtype, torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype)


@dataclass(frozen=True)
class Model:
    """A model of diffusers. Sizes and inputs are arguments as Python writes them.

    They may name, besides torch: B batch, T text, C channels, D width of the text, H and W height
    and width in tokens, I both, F frames, V tokens of a video, A of its sound, N heads, E width of
    the model; and of inputs `draw`, and the functions of `_FUNCTIONS`.

    Attributes:
        cls: Its class.
        cases: Each "heads batch text ROWSxCOLUMNS option, option", after " | ".
        sizes: Of the class; layers, heads, their width and channels need none (`built`).
        inputs: Of a call, in the order in which they are drawn and passed.
        options: Sizes and inputs that an option changes; an input of `...` is left out.
        frames: F, without an option that says another.
    """

    cls: str
    cases: str
    sizes: str
    inputs: str
    options: Mapping[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    frames: int = 3


def _names(case: Case) -> dict[str, Any]:
    """Return what sizes and inputs may name."""
    rows, columns = case.grid
    frames = {"3 frames": 3, "4 frames": 4, "learned": 3}
    num = next((frames[name] for name in case.options if name in frames), MODELS[case.model].frames)
    image, heads = rows * columns, case.heads
    shapes = {"B": case.batch, "T": case.text, "H": rows, "W": columns, "I": image, "F": num}
    others = {"C": CHANNELS, "D": TEXT_DIM, "V": num * image, "A": 7, "N": heads, "E": 16 * heads}
    return {**shapes, **others, "torch": torch, "case": case}


def _arguments(texts: list[str], names: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that texts give, the later ones instead of the earlier ones."""
    arguments: dict[str, Any] = {}
    for text in texts:
        arguments |= eval(f"dict({text})", names)
    return arguments


def built(case: Case, **others: Any) -> nn.Module:
    """Return a model with the weights that its class draws.

    It has two layers of heads of width 16, unless its sizes or `others` say otherwise.
    """
    model = MODELS[case.model]
    cls = getattr(importlib.import_module("diffusers"), model.cls)
    usual = {"in_channels": CHANNELS, "out_channels": CHANNELS, "num_layers": 2}
    usual |= {"num_attention_heads": case.heads, "attention_head_dim": 16}
    takes = inspect.signature(cls).parameters
    texts = [model.sizes, *(model.options[name][0] for name in case.options if name != PLAN)]
    sizes = _arguments(texts, _names(case))
    module = cls(**{key: size for key, size in usual.items() if key in takes} | sizes | others)
    if "causal" in case.options:
        module._set_ar_attention(2)
    return module


def make_model(case: Case, dtype: torch.dtype = torch.float32) -> Any:
    """Return a model of which no parameter is left at zero or one, where it could hide a term."""
    model = built(case).to(dtype).eval()
    generator = torch.Generator().manual_seed(len(str(case)))
    with torch.no_grad():
        for parameter in model.parameters():
            std = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.2
            draw = torch.randn(parameter.shape, generator=generator) * std
            parameter.copy_(draw if parameter.ndim > 1 else parameter + draw)
    return model


def make_inputs(case: Case, dtype: torch.dtype = torch.float32, seed: int = 0) -> Inputs:
    """Return random inputs of a model."""
    model, draw = MODELS[case.model], Draw(dtype, seed)
    texts = [model.inputs, *(model.options[name][1] for name in case.options if name != PLAN)]
    bound = {name: lambda *args, f=f: f(case, draw, *args) for name, f in _FUNCTIONS.items()}
    inputs = _arguments(texts, {**_names(case), "draw": draw, **bound})
    return {name: value for name, value in inputs.items() if value is not ...}


def plan_of(case: Case, model: nn.Module) -> dict[str, object] | None:
    """Return what `table=` is to be."""
    return type(model)._cp_plan if PLAN in case.options else None  # pyright: ignore


def grid_ids(grid: tuple[int, int]) -> Tensor:
    """Return (rows x columns, 3) positions of the tokens of an image."""
    ids = torch.zeros(grid[0] * grid[1], 3)
    ids[:, 1:] = torch.cartesian_prod(*(torch.arange(size) for size in grid))
    return ids


def _seen(case: Case, draw: Draw) -> Tensor:
    """Return a random mask of a text, of which the first token is seen."""
    mask = draw(case.batch, case.text) < 0.3
    mask[:, 0] = True
    return mask


def _half(case: Case, draw: Draw) -> Tensor:
    """Return a mask of a text, of which the first is padded from its middle on."""
    mask = torch.ones(case.batch, case.text, dtype=torch.long)
    mask[0, case.text // 2 :] = 0
    return mask


def _counts(case: Case, draw: Draw, length: int) -> Tensor:
    """Return a mask with another number of ones first in each row, at least one."""
    counts = 1 + torch.arange(case.batch) * 2 % length
    return (torch.arange(length) < counts.clamp(max=length)[:, None]).to(draw.dtype)


def _turns(case: Case, draw: Draw, *shape: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of random angles."""
    angles = draw(*shape)
    return angles.cos(), angles.sin()


def _range(case: Case, draw: Draw, start: int, end: int) -> Tensor:
    return torch.arange(start, end).expand(case.batch, -1)


def _z_image(case: Case, draw: Draw) -> Inputs:
    rows, columns = (2 * size for size in case.grid)
    images = [draw(CHANNELS, 1, rows, columns) for _ in range(case.batch)]
    texts = [draw(case.text, TEXT_DIM) for _ in range(case.batch)]
    if "unlike" in case.options:  # padded to the longest, which is masked
        images[0], texts[-1] = images[0][:, :, :2], texts[-1][:1]
    inputs: Inputs = {"x": images, "t": draw(case.batch).abs(), "cap_feats": texts}
    if "omni" in case.options:  # a reference image, that is not noisy, and the image to make
        inputs["x"] = [[draw(CHANNELS, 1, 2, 4), images[0]]]
        inputs["cap_feats"] = [[texts[0], draw(3, TEXT_DIM)]]
        inputs["siglip_feats"] = [[draw(2, 3, 24), None]]
        inputs["image_noise_mask"] = [[0, 1]]
    return inputs


def _ideogram4(case: Case, draw: Draw) -> Inputs:
    from diffusers.models.transformers import transformer_ideogram4 as module

    tokens = case.text + math.prod(case.grid)
    indicator = torch.full((case.batch, tokens), module.OUTPUT_IMAGE_INDICATOR)
    indicator[:, : case.text] = module.LLM_TOKEN_INDICATOR
    segments = torch.zeros(case.batch, tokens, dtype=torch.long)
    if "packed" in case.options:  # two samples in a row
        segments[:, tokens // 3 :] = 1
    times = (case.batch, tokens) if "token_times" in case.options else (case.batch,)
    return {
        "hidden_states": draw(case.batch, tokens, CHANNELS),
        "timestep": draw(*times).abs(),
        "encoder_hidden_states": draw(case.batch, tokens, TEXT_DIM),
        "position_ids": torch.arange(tokens)[None, :, None].expand(case.batch, -1, 3),
        "segment_ids": segments,
        "indicator": indicator,
    }


def _minimax(case: Case, draw: Draw) -> Inputs:
    counts = {1: case.text, 0: 3 * math.prod(case.grid), 2: 7}  # by tag
    order = torch.randperm(sum(counts.values()), generator=draw.generator)
    places = dict(zip(counts, order.split(list(counts.values())), strict=True))
    tags = torch.empty_like(order)
    for tag, where in places.items():
        tags[where] = tag
    return {
        "hidden_states": draw(case.batch, counts[0], 4 * CHANNELS),
        "audio_hidden_states": draw(case.batch, counts[2], CHANNELS),
        "encoder_hidden_states": draw(case.batch, counts[1], TEXT_DIM),
        "timestep": draw(2).sigmoid(),
        "timestep_indices": torch.arange(len(order)) % 2,
        "token_tags": tags,
        "position_ids": draw(len(order), 3),
        "video_indices": places[0],
        "audio_indices": places[2],
        "text_indices": places[1],
    }


def _cosmos3(case: Case, draw: Draw) -> Inputs:
    """Return one sequence of a text, as many videos as the batch has, and perhaps a sound."""
    (rows, columns), num_sound = case.grid, 5 if "sound" in case.options else 0
    size, start = rows * columns, case.text
    video, length = case.batch * 3 * size, case.text + num_sound
    places = torch.arange(start, start + video)
    inputs: Inputs = {
        "input_ids": torch.arange(case.text),
        "text_indexes": torch.arange(case.text),
        "position_ids": torch.arange(length + video).expand(3, -1),
        "und_len": case.text,
        "sequence_length": length + video,
        "vision_tokens": [draw(1, CHANNELS, 3, 2 * rows, 2 * columns) for _ in range(case.batch)],
        "vision_token_shapes": [(3, rows, columns)] * case.batch,
        "vision_sequence_indexes": places,
        "vision_mse_loss_indexes": places.view(case.batch, 3, size)[:, 1:].flatten(),
        "vision_timesteps": draw(case.batch * 2 * size).abs() * 1000,
        # after a frame that is there
        "vision_noisy_frame_indexes": [torch.arange(1, 3)] * case.batch,
    }
    if num_sound:
        inputs |= {
            "sound_tokens": [draw(CHANNELS, num_sound)],
            "sound_token_shapes": [(num_sound, 1, 1)],
            "sound_sequence_indexes": torch.arange(start + video, length + video),
            "sound_mse_loss_indexes": torch.arange(start + video, length + video),
            "sound_timesteps": draw(num_sound).abs() * 1000,
            "sound_noisy_frame_indexes": [torch.arange(num_sound)],
        }
    return inputs


def _allegro_turns(case: Case, draw: Draw) -> Any:
    """Return angles of each axis, and the places of the tokens."""
    sizes = (3, *case.grid)
    angles = [draw(size, 4) for size in sizes]
    places = torch.cartesian_prod(*(torch.arange(size) for size in sizes)).T[:, None]
    return tuple((x.cos(), x.sin()) for x in angles), tuple(places)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "seen": _seen,
    "half": _half,
    "counts": _counts,
    "turns": _turns,
    "range_": _range,
    "ids": lambda case, draw: grid_ids(case.grid),
    "z_image": _z_image,
    "ideogram4": _ideogram4,
    "minimax": _minimax,
    "cosmos3": _cosmos3,
    "allegro_turns": _allegro_turns,
}
_ROPE = "axes_dims_rope=(4, 6, 6), "
_TWO_KINDS = "num_single_layers=2, joint_attention_dim=D, " + _ROPE
_POOLED = "pooled_projection_dim=D, "
_SD3 = "joint_attention_dim=D, caption_projection_dim=E, sample_size=8, " + _POOLED
_TOKENS = "hidden_states=draw(B, I, C), encoder_hidden_states=draw(B, T, D), "
_TIME = "timestep=draw(B).abs(), "
_IDS = "img_ids=ids(), txt_ids=torch.zeros(T, 3), "
_FLUX_INPUTS = _TOKENS + "pooled_projections=draw(B, D), " + _TIME + _IDS
_QWEN_INPUTS = _TOKENS + _TIME + "img_shapes=[[(1, H, W)]] * B, "
_SD3_INPUTS = (
    "hidden_states=draw(B, C, 2 * H, 2 * W), encoder_hidden_states=draw(B, T, D), "
    "pooled_projections=draw(B, D), timestep=draw(B).abs() * 100, "
)
_LATENTS = "hidden_states=draw(B, C, 2 * H, 2 * W), encoder_hidden_states=draw(B, T, D), " + _TIME
_SMALL_LATENTS = _LATENTS.replace("2 * ", "")
_MASK = "", "encoder_attention_mask=seen()"
_GUIDANCE = "guidance_embeds=True", "guidance=draw(B).abs()"
_GUIDANCE_1000 = "guidance_embeds=True", "guidance=draw(B).abs() * 1000"
_QWEN_MASK = "", "encoder_hidden_states_mask=seen().long()"
_CONTROLLED = "", "controlnet_block_samples=[draw(B, I, E)]"
_BOTH_CONTROLLED = (
    "",
    "controlnet_block_samples=[draw(B, I, E)], controlnet_single_block_samples=[draw(B, I, E)]",
)

_IMAGES = {
    "flux": Model(
        "FluxTransformer2DModel",
        "4 1 16 4x4 | 5 2 7 3x5 | 5 1 1 5x7 guidance, controlnet | 4 2 3 1x1 | 4 1 1 1x2"
        " | 4 1 7 3x5 no single | 5 1 7 3x5 kontext | 4 1 7 3x5 no double",
        _TWO_KINDS + _POOLED,
        _FLUX_INPUTS,
        {
            "guidance": _GUIDANCE,
            "controlnet": (
                "",
                "controlnet_block_samples=[draw(B, I, E) for _ in range(2)], "
                "controlnet_single_block_samples=[draw(B, I, E) for _ in range(2)]",
            ),
            "no single": ("num_single_layers=0", ""),
            "no double": ("num_layers=0", ""),
            "kontext": (  # an image to edit follows
                "",
                "hidden_states=draw(B, 2 * I, C), "
                "img_ids=torch.cat([ids(), ids() + torch.tensor([1.0, 0.0, 0.0])])",
            ),
        },
    ),
    "qwen": Model(
        "QwenImageTransformer2DModel",
        "4 2 16 4x4 mask | 5 2 7 3x5 mask | 5 1 13 5x3 | 4 2 3 3x3 mask, zero_cond"
        " | 4 1 1 1x3 mask, controlnet | 5 2 7 5x3 mask, edit | 4 1 5 5x3 layers",
        "patch_size=1, joint_attention_dim=D, " + _ROPE,
        _QWEN_INPUTS,
        {
            "mask": _QWEN_MASK,
            "controlnet": _CONTROLLED,
            # The last row is a reference image.
            "zero_cond": ("zero_cond_t=True", "img_shapes=[[(1, H - 1, W), (1, 1, W)]] * B"),
            # An image, and two to edit it by.
            "edit": ("", "img_shapes=[[(1, H - 2, W), (1, 1, W), (1, W, 1)]] * B"),
            "layers": (  # two layers and the image that they are of
                "use_layer3d_rope=True, use_additional_t_cond=True",
                "img_shapes=[[(1, 2, 3), (1, 2, 3), (1, 1, 3)]] * B, "
                "additional_t_cond=torch.ones(B, dtype=torch.long)",
            ),
        },
    ),
    "flux_controlnet": Model(
        "FluxControlNetModel",
        "5 2 7 3x5 guidance | 4 1 3 1x3 hint",
        _TWO_KINDS.replace("=2", "=1") + _POOLED,
        _FLUX_INPUTS + "controlnet_cond=draw(B, I, C), conditioning_scale=0.7",
        {
            "guidance": _GUIDANCE,
            # A picture, of which 8 x 8 pixels make a token.
            "hint": ("conditioning_embedding_channels=C", "controlnet_cond=draw(B, 3, 8*H, 8*W)"),
        },
    ),
    "qwen_controlnet": Model(
        "QwenImageControlNetModel",
        "5 2 7 3x5 mask",
        "patch_size=1, joint_attention_dim=D, " + _ROPE,
        _QWEN_INPUTS + "controlnet_cond=draw(B, I, C)",
        {"mask": _QWEN_MASK},
    ),
    "sd3_controlnet": Model(
        "SD3ControlNetModel",
        "5 2 7 3x5",
        _SD3 + "pos_embed_max_size=8, dual_attention_layers=(0,)",
        _SD3_INPUTS + "controlnet_cond=draw(B, C, 2 * H, 2 * W)",
    ),
    "flux2": Model(
        "Flux2Transformer2DModel",
        "4 2 7 3x5 guidance | 5 1 3 1x3 | 5 2 1 2x1 no double",
        "num_single_layers=2, joint_attention_dim=D, timestep_guidance_channels=16, "
        "axes_dims_rope=(4, 4, 4, 4), guidance_embeds=False",
        _TOKENS + _TIME + "img_ids=torch.nn.functional.pad(ids(), (0, 1)).expand(B, -1, -1), "
        "txt_ids=torch.zeros(B, T, 4)",
        {"guidance": _GUIDANCE, "no double": ("num_layers=0", "")},
    ),
    "z_image": Model(
        "ZImageTransformer2DModel",
        "5 1 7 3x5 | 4 2 5 3x3 controlnet | 4 3 37 5x7 unlike | 4 1 5 3x3 omni",
        "dim=E, n_layers=2, n_heads=N, n_kv_heads=N, cap_feat_dim=D, axes_dims=[4, 6, 6], "
        "axes_lens=[96, 16, 16]",
        "**z_image()",
        {
            # Each is padded to a multiple of 32 tokens.
            "controlnet": ("", "controlnet_block_samples={1: draw(B, 64, E)}"),
            "unlike": ("", ""),
            "omni": ("siglip_feat_dim=24", ""),
        },
    ),
    "sd3": Model(
        "SD3Transformer2DModel",
        "5 2 7 3x5 | 4 1 3 1x3 dual, qk norm, controlnet | 5 2 1 3x3 dual, skip",
        _SD3 + "patch_size=2, num_layers=3, pos_embed_max_size=16",
        _SD3_INPUTS,
        {
            "dual": ("dual_attention_layers=(0, 1)", ""),
            "qk norm": ("qk_norm='rms_norm'", ""),
            "skip": ("", "skip_layers=[0]"),
            "controlnet": ("", "block_controlnet_hidden_states=[draw(B, I, E)]"),
        },
    ),
    "chroma": Model(
        "ChromaTransformer2DModel",
        "5 2 7 3x5 mask | 4 1 3 1x3 controlnet",
        _TWO_KINDS + "approximator_num_channels=16, approximator_hidden_dim=24, "
        "approximator_layers=1",
        _TOKENS + _TIME + _IDS,
        {
            "mask": ("", "attention_mask=torch.cat([seen(), torch.ones(B, I).bool()], dim=1)"),
            "controlnet": _BOTH_CONTROLLED,
        },
    ),
    "aura_flow": Model(
        "AuraFlowTransformer2DModel",
        "5 2 7 3x5",
        "sample_size=16, num_mmdit_layers=2, num_single_dit_layers=2, joint_attention_dim=D, "
        "caption_projection_dim=E, pos_embed_max_size=64",
        _LATENTS,
    ),
    "cogview4": Model(
        "CogView4Transformer2DModel",
        "5 2 7 3x5 | 4 1 3 1x3 rotary",
        "text_embed_dim=D, time_embed_dim=16, condition_dim=8",
        _LATENTS + "original_size=draw(B, 2).abs(), target_size=draw(B, 2).abs(), "
        "crop_coords=draw(B, 2).abs()",
        {"rotary": ("", "image_rotary_emb=turns(I, 16)")},
    ),
    "hunyuan_image": Model(
        "HunyuanImageTransformer2DModel",
        "5 2 7 3x5 mask | 4 1 5 1x3 mask, two texts, guidance",
        "num_single_layers=2, num_refiner_layers=1, text_embed_dim=D, text_embed_2_dim=None, "
        "rope_axes_dim=(8, 8)",
        _SMALL_LATENTS,
        {
            "mask": _MASK,
            "two texts": (
                "text_embed_2_dim=24",
                "encoder_hidden_states_2=draw(B, T, 24), encoder_attention_mask_2=seen()",
            ),
            "guidance": _GUIDANCE,
        },
    ),
    "lumina2": Model(
        "Lumina2Transformer2DModel",
        "6 1 7 3x5 | 4 2 9 3x3 mask",
        "sample_size=16, hidden_size=E, num_refiner_layers=2, num_kv_heads=2, multiple_of=16, "
        "axes_dim_rope=(4, 6, 6), axes_lens=(32, 16, 16), cap_feat_dim=D",
        _LATENTS + "encoder_attention_mask=torch.ones(B, T, dtype=torch.long)",
        {"mask": ("", "encoder_attention_mask=half()")},
    ),
    "krea2": Model(
        "Krea2Transformer2DModel",
        "6 2 7 3x5 mask | 4 1 3 1x3",
        "num_key_value_heads=2, intermediate_size=48, timestep_embed_dim=16, text_hidden_dim=D, "
        "num_text_layers=3, text_num_attention_heads=4, text_num_key_value_heads=4, "
        "text_intermediate_size=48, " + _ROPE,
        # Positions first: their length is known from what follows.
        "position_ids=torch.cat([torch.zeros(T, 3), ids()]), hidden_states=draw(B, I, C), "
        "encoder_hidden_states=draw(B, T, 3, D), " + _TIME,
        {"mask": _MASK},
    ),
    "ideogram4": Model(
        "Ideogram4Transformer2DModel",
        "5 2 7 3x5 packed | 4 1 2 1x1 token_times",
        "intermediate_size=48, adaln_dim=16, llm_features_dim=D, mrope_section=(4, 2, 2)",
        "**ideogram4()",
        {"packed": ("", ""), "token_times": ("", "")},
    ),
    "pixart": Model(
        "PixArtTransformer2DModel",
        "5 2 7 3x5 mask | 4 1 3 1x2",
        "norm_num_groups=1, cross_attention_dim=E, sample_size=16, caption_channels=D, "
        "use_additional_conditions=False",
        _LATENTS,
        {"mask": ("", "encoder_attention_mask=seen().to(draw.dtype)")},
    ),
    "longcat": Model(
        "LongCatImageTransformer2DModel",
        "4 1 3 1x1 | 5 2 7 3x5",
        "in_channels=C, " + _TWO_KINDS,
        _TOKENS + _TIME + _IDS,
    ),
    "ovis": Model(
        "OvisImageTransformer2DModel",
        "4 1 1 1x2 | 5 2 7 3x5",
        "in_channels=C, " + _TWO_KINDS,
        _TOKENS + _TIME + _IDS,
    ),
    "bria": Model(
        "BriaTransformer2DModel",
        "4 1 3 1x3 | 5 2 7 3x5 controlnet",
        "in_channels=C, " + _TWO_KINDS,
        _TOKENS + _TIME + _IDS,
        {"controlnet": _CONTROLLED},
    ),
    "ernie": Model(
        "ErnieImageTransformer2DModel",
        "4 1 2 1x1 | 5 2 7 3x5 lengths",
        "hidden_size=E, ffn_hidden_size=48, text_in_dim=D, rope_axes_dim=(4, 6, 6)",
        "hidden_states=draw(B, C, H, W), timestep=draw(B).abs(), text_bth=draw(B, T, D), "
        "text_lens=torch.tensor([T] * B)",
        {"lengths": ("", "text_lens=torch.tensor([T // 2, *[T] * (B - 1)])")},  # padded at the end
    ),
    "hidream": Model(
        "HiDreamImageTransformer2DModel",
        "4 1 3 1x1 | 5 1 5 3x3 packed | 5 2 7 3x5",
        "patch_size=2, num_single_layers=1, caption_channels=[D, 24], text_emb_dim=16, "
        "num_routed_experts=3, max_resolution=(12, 12), llama_layers=[0, 2, 1], " + _ROPE,
        "hidden_states=draw(B, C, 2 * H, 2 * W), timesteps=draw(B).abs() * 100, "
        "encoder_hidden_states_t5=draw(B, T, D), "
        "encoder_hidden_states_llama3=draw(3, B, 4, 24), pooled_embeds=draw(B, 16)",
        {
            "packed": (
                "",
                "hidden_states=draw(B, I, 4 * C), "
                "hidden_states_masks=(draw(B, I) < 0.5).to(draw.dtype), "
                "img_ids=ids().expand(B, -1, -1), img_sizes=[(H, W)] * B",
            )
        },
    ),
}

_FRAMES = (  # a video, of which 2 x 2 values make a token
    "hidden_states=draw(B, C, F, 2 * H, 2 * W), timestep=draw(B).abs() * 100, "
    "encoder_hidden_states=draw(B, T, D), "
)
_WAN = (
    "patch_size=(1, 2, 2), attention_head_dim=12, text_dim=D, freq_dim=16, ffn_dim=48, "
    "rope_max_seq_len=16, image_dim=None, added_kv_proj_dim=None, "
)
_WAN_OPTIONS = {
    "image": (  # models with keys of an image take the last 512 for text
        "image_dim=16, added_kv_proj_dim=12 * N",
        "encoder_hidden_states=draw(B, 512, D), encoder_hidden_states_image=draw(B, T, 16)",
    ),
    "last image": ("pos_embed_seq_len=2 * T", "encoder_hidden_states_image=draw(2 * B, T, 16)"),
    "token_times": ("", "timestep=draw(B, V).abs() * 100"),
    "3 frames": ("", ""),
    "4 frames": ("", ""),
}
_HUNYUAN = (
    "num_single_layers=2, num_refiner_layers=1, guidance_embeds=False, text_embed_dim=D, "
    "rope_axes_dim=(4, 6, 6), " + _POOLED
)
_LTX_INPUTS = (
    "hidden_states=draw(B, V, C), encoder_hidden_states=draw(B, T, D), "
    "timestep=draw(B).abs() * 100, encoder_attention_mask=counts(T), num_frames=F, height=H, "
    "width=W, "
)
_NO_SIZES = "num_frames=..., height=..., width=..., "
_TOKEN_TIMES = "", "timestep=draw(B, V).abs() * 100"

_VIDEOS = {
    "wan": Model(
        "WanTransformer3DModel",
        "4 1 8 4x4 | 5 2 7 3x5 3 frames | 5 2 9 3x3 token_times | 4 2 3 1x1 token_times"
        " | 4 1 3 1x3 image | 4 1 3 3x3 image, last image",
        _WAN,
        _FRAMES,
        _WAN_OPTIONS,
        frames=2,
    ),
    "vace": Model(
        "WanVACETransformer3DModel",
        "5 2 7 3x5 3 frames | 4 1 3 1x1 image, scales",
        _WAN + "num_layers=3, vace_layers=[0, 2], vace_in_channels=C",
        _FRAMES + "control_hidden_states=draw(B, C, F, 2 * H, 2 * W)",
        {**_WAN_OPTIONS, "scales": ("", "control_hidden_states_scale=draw(2)")},
        frames=2,
    ),
    "animate": Model(
        "WanAnimateTransformer3DModel",
        "5 1 7 3x5 | 4 2 3 1x1 image",
        _WAN + "in_channels=2 * C + 4, latent_channels=C, num_layers=4, motion_encoder_size=8, "
        "motion_encoder_channel_sizes={'4': 4, '8': 4}, motion_style_dim=8, motion_dim=4, "
        "motion_encoder_dim=8, face_encoder_hidden_dim=8, face_encoder_num_heads=2, "
        "inject_face_latents_blocks=2",
        _FRAMES.replace("C, F", "2 * C + 4, F")
        + "pose_hidden_states=draw(B, C, 2, 2 * H, 2 * W), face_pixel_values=draw(B, 3, 5, 8, 8)",
        _WAN_OPTIONS,
    ),
    "skyreels": Model(
        "SkyReelsV2Transformer3DModel",
        "5 2 7 3x3 3 frames | 4 1 3 3x3 frame_times, 4 frames, causal, fps | 4 2 3 1x1 frame_times",
        _WAN,
        _FRAMES,
        {
            **_WAN_OPTIONS,
            "frame_times": ("", "timestep=draw(B, F).abs() * 100, enable_diffusion_forcing=True"),
            "causal": ("", ""),
            "fps": ("inject_sample_info=True", "fps=[1] * B"),
        },
        frames=2,
    ),
    "chronoedit": Model(
        "ChronoEditTransformer3DModel",
        "5 1 7 3x5 image | 4 2 3 1x3 token_times, 3 frames",
        _WAN,
        _FRAMES,
        _WAN_OPTIONS,
        frames=2,
    ),
    "cogvideox": Model(
        "CogVideoXTransformer3DModel",
        "4 1 8 4x4 | 5 2 7 3x5 1.5 | 4 2 1 1x3 sincos | 4 1 7 3x5 image, learned",
        "time_embed_dim=16, text_embed_dim=D, max_text_seq_length=T, "
        "use_rotary_positional_embeddings=True",
        "hidden_states=draw(B, F, C, 2 * H, 2 * W), encoder_hidden_states=draw(B, T, D), "
        "timestep=draw(B).abs() * 100, image_rotary_emb=turns(V, 16)",
        {
            "1.5": (  # two frames a token
                "ofs_embed_dim=16, patch_size_t=2",
                "hidden_states=draw(B, 2 * F, C, 2 * H, 2 * W), ofs=draw(1).abs()",
            ),
            "sincos": ("use_rotary_positional_embeddings=False", "image_rotary_emb=..."),
            "image": ("in_channels=2 * C", "hidden_states=draw(B, F, 2 * C, 2 * H, 2 * W)"),
            "learned": (
                "use_learned_positional_embeddings=True, sample_height=2 * H, "
                "sample_width=2 * W, sample_frames=9",
                "",
            ),
        },
        frames=2,
    ),
    "hunyuan": Model(
        "HunyuanVideoTransformer3DModel",
        "5 2 7 3x5 | 4 1 16 4x4 guidance, token_replace | 4 2 3 1x1 token_replace"
        " | 4 1 1 1x2 latent_concat",
        _HUNYUAN,
        _FRAMES + "encoder_attention_mask=counts(T).long(), pooled_projections=draw(B, D)",
        {
            "guidance": _GUIDANCE_1000,
            "token_replace": ("image_condition_type='token_replace'", ""),
            "latent_concat": ("image_condition_type='latent_concat'", ""),
        },
    ),
    "hunyuan1.5": Model(
        "HunyuanVideo15Transformer3DModel",
        "5 2 7 3x5 image | 4 1 5 1x1 meanflow",
        "num_refiner_layers=1, text_embed_dim=D, text_embed_2_dim=D, image_embed_dim=D, "
        "rope_axes_dim=(4, 6, 6)",
        _FRAMES.replace("2 * ", "")
        + "encoder_attention_mask=counts(T), encoder_hidden_states_2=draw(B, 3, D), "
        "encoder_attention_mask_2=counts(3), image_embeds=0 * draw(B, 3, D)",
        {
            "image": ("", "image_embeds=draw(B, 3, D)"),
            "meanflow": ("use_meanflow=True", "timestep_r=draw(B).abs() * 100"),
        },
    ),
    "ltx": Model(
        "LTXVideoTransformer3DModel",
        "5 2 7 3x5 token_times | 4 1 3 1x1 coordinates",
        "attention_head_dim=8, cross_attention_dim=8 * N, caption_channels=D",
        _LTX_INPUTS + "rope_interpolation_scale=(0.3, 32, 32)",
        {
            "token_times": _TOKEN_TIMES,
            "coordinates": (
                "",
                _NO_SIZES + "rope_interpolation_scale=..., video_coords=draw(B, 3, V).abs() * 9",
            ),
        },
    ),
    "ltx2": Model(
        "LTX2VideoTransformer3DModel",
        "5 2 7 3x5 token_times, guided | 4 1 3 1x1 2.3, coordinates"
        " | 4 2 3 3x3 2.3, isolated, references",
        "attention_head_dim=8, cross_attention_dim=8 * N, audio_in_channels=C, "
        "audio_out_channels=C, audio_num_attention_heads=N, audio_attention_head_dim=4, "
        "audio_cross_attention_dim=4 * N, caption_channels=D",
        _LTX_INPUTS
        + "audio_hidden_states=draw(B, A, C), audio_encoder_hidden_states=draw(B, T, D), "
        "audio_encoder_attention_mask=counts(T), audio_timestep=draw(B).abs() * 100, "
        "isolate_modalities=False, use_cross_timestep=False, audio_num_frames=A",
        {
            "token_times": _TOKEN_TIMES,
            "coordinates": (
                "",
                _NO_SIZES + "audio_num_frames=..., video_coords=draw(B, 3, V, 2).abs() * 9, "
                "audio_coords=draw(B, 1, A, 2).abs() * 9",
            ),
            "2.3": (
                "gated_attn=True, audio_gated_attn=True, cross_attn_mod=True, "
                "audio_cross_attn_mod=True, rope_type='split', "
                "use_keyframes_abs_pos_embedding=True",
                "audio_timestep=draw(B, A).abs() * 100, use_cross_timestep=True, "
                "sigma=draw(B).abs() * 100, video_keyframes_mask=draw(B, V, 1)",
            ),
            "guided": (  # the second sample without attention in the first block
                "perturbed_attn=True",
                "spatio_temporal_guidance_blocks=[0], "
                "perturbation_mask=torch.arange(B).eq(0).to(draw.dtype)",
            ),
            "isolated": ("", "isolate_modalities=True"),
            "references": ("", "video_self_attention_mask=1 - draw(B, V, V).abs() / 10_000"),
        },
    ),
    "minimax": Model(
        "MiniMaxH3Transformer3DModel",
        "5 1 7 3x5 | 4 2 3 1x1",
        "hidden_size=24, num_refiner_layers=1, ffn_dim=32, audio_in_channels=C, text_dim=D, "
        "freq_dim=16, time_embed_hidden_dim=16, time_embed_dim=16, rope_freq_dim=2",
        "**minimax()",
    ),
    "helios": Model(
        "HeliosTransformer3DModel",
        "4 1 3 1x1 amplified | 5 2 7 3x5 history | 4 1 3 2x3 history, amplified, one time",
        "text_dim=D, freq_dim=16, ffn_dim=48, rope_dim=(4, 6, 6), guidance_cross_attn=True, "
        "zero_history_timestep=True, is_amplify_history=False",
        _FRAMES + "indices_hidden_states=range_(7, 10)",
        {
            "amplified": ("is_amplify_history=True", ""),
            "one time": ("guidance_cross_attn=False, zero_history_timestep=False", ""),
            "history": (
                "",
                "latents_history_long=draw(B, C, 4, 2 * H, 2 * W), "
                "indices_latents_history_long=range_(0, 4), "
                "latents_history_mid=draw(B, C, 2, 2 * H, 2 * W), "
                "indices_latents_history_mid=range_(4, 6), "
                "latents_history_short=draw(B, C, 1, 2 * H, 2 * W), "
                "indices_latents_history_short=range_(6, 7)",
            ),
        },
    ),
    "mochi": Model(
        "MochiTransformer3DModel",
        "4 1 3 1x1 | 5 2 7 3x5 mask",
        "pooled_projection_dim=24, text_embed_dim=D, time_embed_dim=16",
        _FRAMES + "encoder_attention_mask=torch.ones(B, T).bool()",
        {"mask": _MASK},
    ),
    "cosmos": Model(
        "CosmosTransformer3DModel",
        "5 2 7 3x5 learned, mask | 4 1 3 1x1 frame_times, image, controlnet, fps",
        # torchvision would resize a mask of padding
        "text_embed_dim=D, adaln_lora_dim=8, max_size=(4, 16, 16), concat_padding_mask=False, "
        "extra_pos_embed_type=None, controlnet_block_every_n=1, img_context_dim_out=E",
        _FRAMES,
        {
            "learned": ("extra_pos_embed_type='learnable'", ""),
            "mask": ("", "attention_mask=seen()"),
            "frame_times": ("", "timestep=draw(B, 1, F, 1, 1).abs() * 100"),
            "image": (
                "img_context_dim_in=16",
                "encoder_hidden_states=(draw(B, T, D), draw(B, 4, 16))",
            ),
            "controlnet": ("", "block_controlnet_hidden_states=[draw(B, V, E), draw(B, V, E)]"),
            "fps": ("", "fps=16"),
        },
    ),
    "cosmos3": Model(
        "Cosmos3OmniTransformer",
        "4 1 3 1x1 | 4 2 7 3x5 sound",
        "head_dim=16, hidden_size=24, intermediate_size=32, latent_channel=C, "
        "patch_latent_dim=4 * C, num_hidden_layers=2, num_key_value_heads=2, sound_dim=C, "
        "sound_gen=False, vocab_size=50, rope_axes_dim=(4, 2, 2)",
        "**cosmos3()",
        {"sound": ("sound_gen=True", "")},
    ),
    "framepack": Model(
        "HunyuanVideoFramepackTransformer3DModel",
        "4 1 3 1x1 guidance | 5 2 7 3x5",
        _HUNYUAN + "has_image_proj=True, image_proj_dim=16, has_clean_x_embedder=True",
        _FRAMES + "encoder_attention_mask=half(), pooled_projections=draw(B, D), "
        "image_embeds=draw(B, 4, 16), indices_latents=torch.arange(7, 10), "
        "latents_clean=draw(B, C, 2, 2 * H, 2 * W), indices_latents_clean=torch.tensor([0, 6]), "
        "latents_history_4x=draw(B, C, 4, 2 * H, 2 * W), "
        "indices_latents_history_4x=torch.arange(4), "
        "latents_history_2x=draw(B, C, 2, 2 * H, 2 * W), "
        "indices_latents_history_2x=torch.arange(2)",
        {"guidance": _GUIDANCE_1000},
    ),
    "allegro": Model(
        "AllegroTransformer3DModel",
        "4 1 3 2x2 | 5 2 7 3x5 mask",
        "attention_head_dim=12, cross_attention_dim=12 * N, caption_channels=D",
        _FRAMES + "image_rotary_emb=allegro_turns()",
        {"mask": _MASK},
    ),
    "stable_audio": Model(
        "StableAudio3DiTModel",
        "4 1 3 1x1 plain | 5 2 7 3x5 mask, inpaint",
        "io_channels=C, embed_dim=E, depth=2, num_heads=N, cond_token_dim=D, global_cond_dim=24, "
        "local_add_cond_dim=4, timestep_features_dim=16, num_memory_tokens=3, "
        "use_differential_attention=True",
        "hidden_states=draw(B, C, I), timestep=draw(B).sigmoid(), "
        "encoder_hidden_states=draw(B, T, D), global_hidden_states=draw(B, 24)",
        {
            "plain": ("use_differential_attention=False", ""),
            "mask": _MASK,
            "inpaint": ("", "local_add_cond=draw(B, 4, I)"),
        },
    ),
}
_BY_PLAN = {
    "ltx by plan": Model(
        "LTXVideoTransformer3DModel",
        "5 2 6 1x3 | 4 1 3 3x5 mask",
        "cross_attention_dim=E, caption_channels=D",
        _LTX_INPUTS.replace("counts(T)", "torch.ones(B, T, dtype=torch.long)"),
        {"mask": ("", "encoder_attention_mask=seen().long()")},
        frames=2,
    )
}
MODELS = _IMAGES | _VIDEOS | _BY_PLAN


def _case(model: str, text: str) -> Case:
    heads, batch, length, grid, *options = text.split(" ", 4)
    rows, columns = (int(size) for size in grid.split("x"))
    named = tuple(options[0].split(", ")) if options else ()
    return Case(model, int(heads), int(batch), int(length), (rows, columns), named)


def _cases(models: Mapping[str, Model]) -> list[Case]:
    return [
        _case(name, text) for name, model in models.items() for text in model.cases.split(" | ")
    ]


# Text as long as the image, lengths and heads that do not divide, fewer tokens than ranks.
PLAN_CASES = [
    _case("flux", "5 2 7 3x5 plan"),
    _case("flux2", "5 2 9 3x3 plan"),
    _case("qwen", "5 2 7 3x5 plan"),
    _case("qwen", "4 1 9 3x3 plan, zero_cond"),
    _case("wan", "5 2 7 3x5 plan"),
    _case("wan", "4 2 3 1x1 plan, token_times"),
    *_cases(_BY_PLAN),
]
CASES = [*_cases(_IMAGES | _VIDEOS), *PLAN_CASES]
