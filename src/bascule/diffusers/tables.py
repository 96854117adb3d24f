"""Split tables of models of diffusers, by class: what is cut, attended to and gathered."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from bascule.diffusers.cp_plan import table_from_plan
from bascule.diffusers.split_table import Cut, Keys, Mask, SplitTable
from bascule.errors import ConfigError

_IMAGE, _TEXT, _VIDEO, _AUDIO = Cut("image"), Cut("text"), Cut("video"), Cut("audio")
_ALL, _PACKED = Cut("all"), Cut("packed")
_TEXT_IMAGE, _IMAGE_TEXT, _VIDEO_TEXT = ("text", "image"), ("image", "text"), ("video", "text")
_LATENTS = "hidden_states", "encoder_hidden_states", "timestep"
_PROMPT = "encoder_hidden_states", "encoder_attention_mask"
_PROMPT_2 = "encoder_hidden_states_2", "encoder_attention_mask_2"
_NO_KV_CACHE = (
    "a cache of keys would be of a rank's own tokens: leave it out, so that reference tokens are "
    "attended to in every step"
)


def _both(cut: Cut) -> Mapping[int, Cut]:
    return {0: cut, 1: cut}


_FLUX_INPUTS = {
    "hidden_states": _IMAGE,
    "encoder_hidden_states": _TEXT,
    "img_ids": Cut("image", dim=-2),
    "txt_ids": Cut("text", dim=-2),
}

FLUX = SplitTable(
    segments=_TEXT_IMAGE,
    inputs={
        "": {
            **_FLUX_INPUTS,
            "controlnet_block_samples": _IMAGE,
            "controlnet_single_block_samples": _IMAGE,
        }
    },
    gathers={"proj_out": _IMAGE},
    blocks=dict.fromkeys(("transformer_blocks.*", "single_transformer_blocks.*"), _TEXT_IMAGE),
    replicated=("pooled_projections", "timestep", "guidance"),
    unbatched=("img_ids", "txt_ids"),
)

QWEN_IMAGE = SplitTable(
    segments=_TEXT_IMAGE,
    inputs={
        "": {
            "hidden_states": _IMAGE,
            "encoder_hidden_states_mask": Mask("text"),
            "controlnet_block_samples": _IMAGE,
        },
        "transformer_blocks.0": {"encoder_hidden_states": _TEXT},
        "transformer_blocks.*": {"modulate_index": _IMAGE},
    },
    outputs={"pos_embed": {0: Cut("image", dim=0), 1: Cut("text", dim=0)}},
    gathers={"proj_out": _IMAGE},
    blocks={"transformer_blocks.*": _TEXT_IMAGE},
    replicated=("encoder_hidden_states", "timestep", "guidance", "additional_t_cond"),
)

FLUX2 = SplitTable(
    segments=_TEXT_IMAGE,
    inputs={"": _FLUX_INPUTS},
    gathers={"proj_out": _IMAGE},
    blocks={"transformer_blocks.*": _TEXT_IMAGE, "single_transformer_blocks.*": (_TEXT_IMAGE,)},
    replicated=("timestep", "guidance"),
    refused=dict.fromkeys(("kv_cache", "kv_cache_mode"), _NO_KV_CACHE),
)

SD3 = SplitTable(
    segments=_IMAGE_TEXT,
    inputs={"": {"encoder_hidden_states": _TEXT, "block_controlnet_hidden_states": _IMAGE}},
    outputs={"pos_embed": {0: _IMAGE}},
    gathers={"proj_out": _IMAGE},
    blocks={"transformer_blocks.*": ("text", "image")},
    replicated=("hidden_states", "pooled_projections", "timestep"),
    attends={"transformer_blocks.*.attn2": ("image",)},
)

Z_IMAGE = SplitTable(
    segments=("all",),
    inputs={
        "": {"controlnet_block_samples": _ALL},
        "noise_refiner.*": dict.fromkeys(("x", "freqs_cis", "noise_mask"), _IMAGE),
        "layers.0": {"x": _ALL},
        "layers.*": dict.fromkeys(("freqs_cis", "noise_mask"), _ALL),
        "all_final_layer.*": {"noise_mask": _ALL},
    },
    gathers={"noise_refiner.*": _IMAGE, "all_final_layer.*": _ALL},
    blocks={"noise_refiner.*": ("image",), "layers.*": ("all",)},
    replicated=("x", "t", "cap_feats", "siglip_feats"),
    attends={"noise_refiner.*": ("image",), "context_refiner.*": (), "siglip_refiner.*": ()},
)

CHROMA = SplitTable(
    segments=_TEXT_IMAGE,
    inputs=FLUX.inputs,
    gathers=FLUX.gathers,
    blocks={"transformer_blocks.*": _TEXT_IMAGE, "single_transformer_blocks.*": (_TEXT_IMAGE,)},
    replicated=("timestep", "attention_mask"),
    unbatched=FLUX.unbatched,
)

AURA_FLOW = SplitTable(
    segments=_TEXT_IMAGE,
    inputs={"joint_transformer_blocks.0": {"encoder_hidden_states": _TEXT}},
    outputs={"pos_embed": {0: _IMAGE}},
    gathers={"proj_out": _IMAGE},
    blocks={
        "joint_transformer_blocks.*": _TEXT_IMAGE,
        "single_transformer_blocks.*": (_TEXT_IMAGE,),
    },
    replicated=("hidden_states", "encoder_hidden_states", "timestep"),
)

COG_VIEW4 = SplitTable(
    segments=_TEXT_IMAGE,
    inputs={"": {"image_rotary_emb": Cut("image", dim=0)}},
    outputs={"rope": _both(Cut("image", dim=0)), "patch_embed": {0: _IMAGE, 1: _TEXT}},
    gathers={"proj_out": _IMAGE},
    blocks={"transformer_blocks.*": _IMAGE_TEXT},
    replicated=(*_LATENTS, "original_size", "target_size", "crop_coords"),
    unbatched=("image_rotary_emb",),
    refused={
        "attention_mask": "the model adds it to the scores, which hides nothing: leave it out"
    },
)

HUNYUAN_IMAGE = SplitTable(
    segments=_IMAGE_TEXT,
    inputs={"transformer_blocks.0": {"hidden_states": _IMAGE, "encoder_hidden_states": _TEXT}},
    outputs={"rope": _both(Cut("image", dim=0))},
    gathers={"proj_out": _IMAGE},
    blocks=dict.fromkeys(("transformer_blocks.*", "single_transformer_blocks.*"), _IMAGE_TEXT),
    replicated=(*_LATENTS, "encoder_attention_mask", *_PROMPT_2, "timestep_r", "guidance"),
    attends={"context_embedder": ()},
    nonempty=("text",),
)

LUMINA2 = SplitTable(
    segments=("all",),
    inputs={
        "noise_refiner.*": dict.fromkeys(("hidden_states", "image_rotary_emb"), _IMAGE),
        "layers.0": {"hidden_states": _ALL},
        "layers.*": {"image_rotary_emb": _ALL},
    },
    gathers={"noise_refiner.*": _IMAGE, "norm_out": _ALL},
    blocks={"noise_refiner.*": ("image",), "layers.*": ("all",)},
    replicated=(*_LATENTS, "encoder_attention_mask"),
    attends={"noise_refiner.*": ("image",), "context_refiner.*": ()},
)

KREA2 = SplitTable(
    segments=_TEXT_IMAGE,
    inputs={
        "": {
            "hidden_states": _IMAGE,
            "encoder_hidden_states": _TEXT,
            "encoder_attention_mask": Mask("text"),
        }
    },
    outputs={"rotary_emb": _both(Cut(_TEXT_IMAGE, dim=0))},
    gathers={"final_layer": _IMAGE},
    blocks={"text_fusion.refiner_blocks.*": ("text",), "transformer_blocks.*": (_TEXT_IMAGE,)},
    replicated=("timestep", "position_ids"),
    attends={"text_fusion.layerwise_blocks.*": (), "text_fusion.refiner_blocks.*": ("text",)},
    unbatched=("position_ids",),
)

IDEOGRAM4 = SplitTable(
    segments=("all",),
    inputs={
        "": {
            **dict.fromkeys(("hidden_states", "encoder_hidden_states"), _ALL),
            **dict.fromkeys(("position_ids", "indicator"), _ALL),
            "timestep": Cut("all", ndim=2),
        }
    },
    gathers={"final_layer": _ALL},
    blocks={"layers.*": ("all",)},
    replicated=("segment_ids",),
)

PIXART = SplitTable(
    segments=("image",),
    inputs={},
    outputs={"pos_embed": {0: _IMAGE}},
    gathers={"proj_out": _IMAGE},
    blocks={"transformer_blocks.*": ("image",)},
    replicated=(*_LATENTS, "added_cond_kwargs", "encoder_attention_mask"),
    attends={"transformer_blocks.*.attn2": ()},
    refused={"attention_mask": "the model pads it to a rank's own tokens: leave it out"},
)

_LTX2_REPLICATED = (
    "audio_encoder_hidden_states",
    "audio_encoder_attention_mask",
    "sigma",
    "audio_sigma",
    "video_coords",
    "audio_coords",
    "perturbation_mask",
    "video_self_attention_mask",
)
_LTX2_ANGLES: Mapping[str, Mapping[int, Cut]] = {  # of all heads together, or of each
    "rope": _both(Cut("video", dim=-2)),
    "cross_attn_rope": _both(Cut("video", dim=-2)),
    "audio_rope": _both(Cut("audio", dim=-2)),
    "cross_attn_audio_rope": _both(Cut("audio", dim=-2)),
}
_LTX2_ATTENDS: Mapping[str, tuple[str, ...] | Keys] = {
    "transformer_blocks.*.attn1": ("video",),
    "transformer_blocks.*.attn2": (),
    "transformer_blocks.*.audio_attn1": ("audio",),
    "transformer_blocks.*.audio_attn2": (),
    "transformer_blocks.*.audio_to_video_attn": Keys("audio"),
    "transformer_blocks.*.video_to_audio_attn": Keys("video"),
}
_H3_REPLICATED = (
    "timestep",
    "timestep_indices",
    "token_tags",
    "position_ids",
    "video_indices",
    "audio_indices",
    "text_indices",
)

WAN = SplitTable(
    segments=("video",),
    inputs={"": {"timestep": Cut("video", ndim=2)}, "blocks.0": {"hidden_states": _VIDEO}},
    outputs={"rope": _both(_VIDEO)},
    gathers={"proj_out": _VIDEO},
    blocks={"blocks.*": ("video",)},
    replicated=("hidden_states", "encoder_hidden_states", "encoder_hidden_states_image"),
    attends={"blocks.*.attn2": ()},
)

_CONTROL = "control_hidden_states", "control_hidden_states_scale"

WAN_VACE = SplitTable(
    segments=("video",),
    inputs={
        "vace_blocks.0": dict.fromkeys(("hidden_states", "control_hidden_states"), _VIDEO),
        "blocks.0": {"hidden_states": _VIDEO},
    },
    outputs={"rope": _both(_VIDEO)},
    gathers={"proj_out": _VIDEO},
    blocks={"vace_blocks.*": ("video", "video"), "blocks.*": ("video",)},
    replicated=(*WAN.replicated, "timestep", *_CONTROL),
    attends={"vace_blocks.*.attn2": (), "blocks.*.attn2": ()},
    unbatched=("control_hidden_states_scale",),
)

WAN_ANIMATE = SplitTable(
    segments=("video",),
    inputs={"blocks.0": {"hidden_states": _VIDEO}, "face_adapter.*.to_out": {"input": _VIDEO}},
    outputs={"rope": _both(_VIDEO)},
    # A frame attends to its own face, so the queries of the faces are whole on every rank.
    gathers={"face_adapter.*.pre_norm_q": _VIDEO, "proj_out": _VIDEO},
    blocks={"blocks.*": ("video",)},
    replicated=(*WAN.replicated, "timestep", "pose_hidden_states", "face_pixel_values"),
    attends={"blocks.*.attn2": (), "face_adapter.*": ()},
)

SKYREELS_V2 = SplitTable(
    segments=("video",),
    inputs={
        "blocks.0": {"hidden_states": _VIDEO},
        "blocks.*": {"temb": Cut("video", dim=2, ndim=4)},
        "proj_out": {"input": _VIDEO},
    },
    outputs={"rope": _both(_VIDEO)},
    # What follows the last norm is modulated frame by frame, by times that the model has whole.
    gathers={"norm_out": _VIDEO, "proj_out": _VIDEO},
    blocks={"blocks.*": ("video",)},
    replicated=(*WAN.replicated, "timestep", "fps"),
    attends={"blocks.*.attn2": ()},
)

COGVIDEOX = SplitTable(
    segments=("text", "video"),
    inputs={
        "": {"image_rotary_emb": Cut("video", dim=0)},
        "transformer_blocks.0": {"hidden_states": _VIDEO, "encoder_hidden_states": _TEXT},
    },
    gathers={"proj_out": _VIDEO},
    blocks={"transformer_blocks.*": ("video", "text")},
    replicated=("hidden_states", "encoder_hidden_states", "timestep", "timestep_cond", "ofs"),
    unbatched=("image_rotary_emb",),
)

HUNYUAN_VIDEO = SplitTable(
    segments=("video", "text"),
    inputs={
        "transformer_blocks.0": {"hidden_states": _VIDEO, "encoder_hidden_states": _TEXT},
        "transformer_blocks.*": {"num_tokens": Cut("video", ndim=0)},
        "single_transformer_blocks.*": {"num_tokens": Cut("video", ndim=0)},
    },
    outputs={"rope": _both(Cut("video", dim=0))},
    gathers={"proj_out": _VIDEO},
    blocks=dict.fromkeys(("transformer_blocks.*", "single_transformer_blocks.*"), _VIDEO_TEXT),
    replicated=("hidden_states", *_PROMPT, "timestep", "pooled_projections", "guidance"),
    attends={"context_embedder": ()},
    nonempty=("text",),
)

HUNYUAN_VIDEO_15 = SplitTable(
    segments=("video", "text"),
    inputs={
        "transformer_blocks.0": {"hidden_states": _VIDEO, "encoder_hidden_states": _TEXT},
        "transformer_blocks.*": {"attention_mask": Mask("text", of_pairs=True)},
    },
    outputs={"rope": _both(Cut("video", dim=0))},
    gathers={"proj_out": _VIDEO},
    blocks={"transformer_blocks.*": _VIDEO_TEXT},
    replicated=("hidden_states", *_PROMPT, *_PROMPT_2, "image_embeds", "timestep", "timestep_r"),
    attends={"context_embedder": ()},
    nonempty=("text",),
)

LTX = SplitTable(
    segments=("video",),
    inputs={"": {"hidden_states": _VIDEO, "timestep": Cut("video", ndim=2)}},
    outputs={"rope": _both(_VIDEO)},
    gathers={"proj_out": _VIDEO},
    blocks={"transformer_blocks.*": ("video",)},
    replicated=(*_PROMPT, "rope_interpolation_scale", "video_coords"),
    attends={"transformer_blocks.*.attn2": ()},
)

LTX2 = SplitTable(
    segments=("video", "audio"),
    inputs={
        "": {
            **dict.fromkeys(("hidden_states", "video_keyframes_mask"), _VIDEO),
            "timestep": Cut("video", ndim=2),
            "audio_hidden_states": _AUDIO,
            "audio_timestep": Cut("audio", ndim=2),
        },
        "transformer_blocks.*.attn1": {"attention_mask": Mask("video")},
    },
    outputs=_LTX2_ANGLES,
    gathers={"proj_out": _VIDEO, "audio_proj_out": _AUDIO},
    blocks={"transformer_blocks.*": ("video", "audio")},
    replicated=(*_PROMPT, *_LTX2_REPLICATED),
    attends=_LTX2_ATTENDS,
)

MINIMAX_H3 = SplitTable(
    segments=("packed",),  # text, video and audio, in the order that their indices say
    inputs={
        "transformer_blocks.0": {"hidden_states": _PACKED},
        "transformer_blocks.*": {"adaln_indices": Cut("packed", dim=0)},
        "norm_out": {"timestep_indices": Cut("packed", dim=0)},
    },
    outputs={"rope": _both(Cut("packed", dim=0))},
    gathers={"proj_out": _PACKED, "audio_proj_out": _PACKED},
    blocks={"transformer_blocks.*": ("packed",)},
    replicated=("hidden_states", "audio_hidden_states", "encoder_hidden_states", *_H3_REPLICATED),
    attends={"token_refiner": ()},
    unbatched=_H3_REPLICATED,
)

_SAMPLES = ("controlnet_blocks.*", "controlnet_single_blocks.*")
_CONDITION = {"controlnet_x_embedder": {"input": _IMAGE}}

FLUX_CONTROLNET = SplitTable(
    segments=FLUX.segments,
    inputs={"": _FLUX_INPUTS, **_CONDITION},
    gathers=dict.fromkeys(_SAMPLES, _IMAGE),
    blocks=FLUX.blocks,
    replicated=(*FLUX.replicated, "controlnet_cond"),
    unbatched=FLUX.unbatched,
    refused={"controlnet_mode": "its text has one token more: call the model before parallelize"},
)

QWEN_IMAGE_CONTROLNET = SplitTable(
    segments=QWEN_IMAGE.segments,
    inputs={
        "": {"hidden_states": _IMAGE, "encoder_hidden_states_mask": Mask("text")},
        "transformer_blocks.0": {"encoder_hidden_states": _TEXT},
        **_CONDITION,
    },
    outputs=QWEN_IMAGE.outputs,
    gathers={"controlnet_blocks.*": _IMAGE},
    blocks=QWEN_IMAGE.blocks,
    replicated=("encoder_hidden_states", "timestep", "controlnet_cond"),
)

SD3_CONTROLNET = SplitTable(
    segments=SD3.segments,
    inputs={"": {"encoder_hidden_states": _TEXT, "hidden_states": Cut("image", ndim=3)}},
    outputs={"pos_embed": {0: _IMAGE}, "pos_embed_input": {0: _IMAGE}},
    gathers={"controlnet_blocks.*": _IMAGE},
    blocks=SD3.blocks,
    replicated=("pooled_projections", "timestep", "controlnet_cond"),
    attends=SD3.attends,
)

TABLES: Mapping[str, SplitTable] = {  # by name of a class of diffusers
    "AuraFlowTransformer2DModel": AURA_FLOW,
    "ChromaTransformer2DModel": CHROMA,
    "ChronoEditTransformer3DModel": WAN,
    "CogVideoXTransformer3DModel": COGVIDEOX,
    "CogView4Transformer2DModel": COG_VIEW4,
    "Flux2Transformer2DModel": FLUX2,
    "FluxControlNetModel": FLUX_CONTROLNET,
    "FluxTransformer2DModel": FLUX,
    "HunyuanImageTransformer2DModel": HUNYUAN_IMAGE,
    "HunyuanVideo15Transformer3DModel": HUNYUAN_VIDEO_15,
    "HunyuanVideoTransformer3DModel": HUNYUAN_VIDEO,
    "Ideogram4Transformer2DModel": IDEOGRAM4,
    "Krea2Transformer2DModel": KREA2,
    "LTX2VideoTransformer3DModel": LTX2,
    "LTXVideoTransformer3DModel": LTX,
    "Lumina2Transformer2DModel": LUMINA2,
    "MiniMaxH3Transformer3DModel": MINIMAX_H3,
    "PixArtTransformer2DModel": PIXART,
    "QwenImageControlNetModel": QWEN_IMAGE_CONTROLNET,
    "QwenImageTransformer2DModel": QWEN_IMAGE,
    "SD3ControlNetModel": SD3_CONTROLNET,
    "SD3Transformer2DModel": SD3,
    "SkyReelsV2Transformer3DModel": SKYREELS_V2,
    "WanAnimateTransformer3DModel": WAN_ANIMATE,
    "WanTransformer3DModel": WAN,
    "WanVACETransformer3DModel": WAN_VACE,
    "ZImageTransformer2DModel": Z_IMAGE,
}


def table_of(model: nn.Module, table: SplitTable | Mapping[str, Any] | None = None) -> SplitTable:
    """Return a table, or the table of a plan of diffusers, or of the model's nearest class."""
    if isinstance(table, SplitTable):
        return table
    if table is not None:
        return table_from_plan(model, table)
    for cls in type(model).__mro__:
        if cls.__name__ in TABLES and cls.__module__.startswith("diffusers."):
            return TABLES[cls.__name__]
    plan = getattr(model, "_cp_plan", None)
    if plan is not None:
        return table_from_plan(model, plan)
    raise ConfigError(
        f"no split table for {type(model).__name__}: write one for "
        "parallelize(.., table=SplitTable(..)), as docs/sequence_parallel.md shows (Adding a "
        "table; Models lists those that have one), or use context_parallel(mesh) around its calls"
    )
